// The sum of the squares of many float tensors on the CPU, in one pass and in double: no product of two floats is too large
// for it, so the sum is finite exactly where all elements are.
#include "norm_kernel.h"
#include "avx2.h"
#include "share.h"

namespace te {

#ifdef TE_HAS_KERNEL
namespace {

struct Piece {
  const float *data;
  int64_t count;
};

constexpr int64_t PIECE = 1 << 17;
// A piece is read at this many places at once: one stream alone leaves the memory idle a sixth of the time.
constexpr int64_t STREAMS = 4;

__attribute__((target("avx2,fma"))) double sum_of(const Piece &piece) {
  __m256d low[STREAMS], high[STREAMS];
  for (int64_t s = 0; s < STREAMS; ++s)
    low[s] = high[s] = _mm256_setzero_pd();
  const int64_t length = piece.count / STREAMS / LINE * LINE;
  for (int64_t i = 0; i < length; i += 8) {
    for (int64_t s = 0; s < STREAMS; ++s) {
      const float *data = piece.data + s * length + i;
      if (i % LINE == 0)
        prefetch(data);
      const __m256 x = _mm256_loadu_ps(data);
      const __m256d a = _mm256_cvtps_pd(_mm256_castps256_ps128(x)), b = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
      low[s] = _mm256_fmadd_pd(a, a, low[s]);
      high[s] = _mm256_fmadd_pd(b, b, high[s]);
    }
  }
  double sum = 0;
  for (int64_t s = 0; s < STREAMS; ++s) {
    double lanes[4];
    _mm256_storeu_pd(lanes, _mm256_add_pd(low[s], high[s]));
    sum += (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
  }
  for (int64_t i = STREAMS * length; i < piece.count; ++i)
    sum += double(piece.data[i]) * double(piece.data[i]);
  return sum;
}

} // namespace

std::optional<double> sum_of_squares_on_cpu(const std::vector<at::Tensor> &tensors) {
  if (!processor_has_avx2())
    return std::nullopt;
  // Kept by the thread, so that a step takes no memory. Threads that help have others of their own.
  thread_local std::vector<Piece> pieces_scratch;
  thread_local std::vector<double> sums_scratch;
  std::vector<Piece> &pieces = pieces_scratch;
  std::vector<double> &sums = sums_scratch;
  pieces.clear();
  for (const at::Tensor &tensor : tensors) {
    if (!tensor.device().is_cpu() || tensor.scalar_type() != at::kFloat || !tensor.is_non_overlapping_and_dense())
      return std::nullopt;
    const float *data = tensor.const_data_ptr<float>();
    for (int64_t at = 0; at < tensor.numel(); at += PIECE)
      pieces.push_back({data + at, std::min<int64_t>(PIECE, tensor.numel() - at)});
  }
  // Added up in the order of the tensors, so that the sum does not depend on the number of threads.
  sums.assign(pieces.size(), 0);
  share(pieces.size(), pieces.size(), [&pieces, &sums](size_t i) { sums[i] = sum_of(pieces[i]); });
  double total = 0;
  for (const double sum : sums)
    total += sum;
  return total;
}

#else

std::optional<double> sum_of_squares_on_cpu(const std::vector<at::Tensor> &) { return std::nullopt; }

#endif

} // namespace te
