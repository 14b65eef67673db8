// Products of a few bfloat16 rows with a matrix, as a text that is continued token by token needs them. Each element of the matrix
// is used once for each row, so time is what it takes to read the matrix from memory. libtorch's products are made for many rows:
// they rearrange the matrix first. Sums are float32, and rounded once.
#include "few_rows_kernel.h"
#include "avx2.h"
#include "share.h"

#include <cstring>
#include <vector>

#include <ATen/EmptyTensor.h>
#include <ATen/core/grad_mode.h>

namespace te {

#ifdef TE_HAS_KERNEL
namespace {

// With more rows, libtorch's products are faster.
constexpr int64_t MOST_ROWS = 4;
// Elements of a vector register. A register of them is one of even and one of odd elements in float32.
constexpr int64_t STEP = 16;
// A matrix is read at this many places at once, each of which goes on from one end of its part to the other.
constexpr int64_t STREAMS = 4;
// Bytes of a matrix that are worth a thread of their own.
constexpr int64_t PIECE = 1 << 18;
// Sums of this many columns stay in the nearest cache.
constexpr int64_t MOST_COLUMNS = 4096;

struct Product {
  const uint16_t *weight, *bias;
  uint16_t *out;
  int64_t num_rows, in, out_features;
};

inline float widened(uint16_t bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

inline void put(const Product &p, int64_t row, int64_t column, float sum) {
  const float bias = p.bias ? widened(p.bias[column]) : 0;
  p.out[row * p.out_features + column] = c10::detail::round_to_nearest_even(sum + bias);
}

inline void look_ahead(const uint16_t *address) { __builtin_prefetch(address + 512, 0, 3); }

__attribute__((target("avx2,fma"))) inline float sum_of(__m256 even, __m256 odd) {
  float lanes[8];
  _mm256_storeu_ps(lanes, _mm256_add_ps(even, odd));
  return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

// Rows `begin..end` of a weight `[out, in]`. Of `input`, the even elements of each step come first, then the odd ones.
__attribute__((target("avx2,fma"))) void dot_products(const Product &p, const float *input, int64_t begin, int64_t end) {
  const __m256i odd_mask = _mm256_set1_epi32(int32_t(0xffff0000));
  const int64_t part = (end - begin + STREAMS - 1) / STREAMS, whole = p.in / STEP * STEP;
  for (int64_t at = begin; at < begin + part; ++at) {
    for (int64_t row = 0; row < p.num_rows; ++row) {
      const float *x = input + row * p.in;
      __m256 even[STREAMS], odd[STREAMS];
      const uint16_t *weights[STREAMS];
      for (int64_t s = 0; s < STREAMS; ++s) {
        even[s] = odd[s] = _mm256_setzero_ps();
        // A part that is shorter reads a row again.
        weights[s] = p.weight + std::min(at + s * part, end - 1) * p.in;
      }
      for (int64_t i = 0; i < whole; i += STEP) {
        const __m256 even_x = _mm256_loadu_ps(x + i), odd_x = _mm256_loadu_ps(x + i + STEP / 2);
        for (int64_t s = 0; s < STREAMS; ++s) {
          if (i % (2 * STEP) == 0)
            look_ahead(weights[s] + i);
          const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(weights[s] + i));
          even[s] = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(w, 16)), even_x, even[s]);
          odd[s] = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(w, odd_mask)), odd_x, odd[s]);
        }
      }
      for (int64_t s = 0; s < STREAMS; ++s) {
        const int64_t column = at + s * part;
        if (column >= std::min(begin + (s + 1) * part, end))
          continue;
        float sum = sum_of(even[s], odd[s]);
        for (int64_t i = whole; i < p.in; ++i)
          sum += x[i] * widened(weights[s][i]);
        put(p, row, column, sum);
      }
    }
  }
}

// Columns `begin..end` of a weight `[in, out]`. Of `sums`, the even columns of each step come first, then the odd ones.
__attribute__((target("avx2,fma"))) void sums_of_rows(const Product &p, const float *input, int64_t begin, int64_t end) {
  const __m256i odd_mask = _mm256_set1_epi32(int32_t(0xffff0000));
  const int64_t width = end - begin, whole = width / STEP * STEP, part = (p.in + STREAMS - 1) / STREAMS;
  thread_local std::vector<float> scratch;
  scratch.assign(p.num_rows * width, 0);
  // What a part that is shorter reads: a row of the weight would add what is not a number where it is not finite.
  thread_local std::vector<uint16_t> nothing;
  nothing.assign(p.in % STREAMS == 0 ? 0 : width, 0);
  for (int64_t at = 0; at < part; ++at) {
    for (int64_t row = 0; row < p.num_rows; ++row) {
      float *sums = scratch.data() + row * width;
      __m256 x[STREAMS];
      float alone[STREAMS];
      const uint16_t *weights[STREAMS];
      for (int64_t s = 0; s < STREAMS; ++s) {
        const int64_t i = at + s * part;
        alone[s] = i < p.in ? input[row * p.in + i] : 0;
        x[s] = _mm256_set1_ps(alone[s]);
        weights[s] = i < p.in ? p.weight + i * p.out_features + begin : nothing.data();
      }
      for (int64_t c = 0; c < whole; c += STEP) {
        __m256 even = _mm256_loadu_ps(sums + c), odd = _mm256_loadu_ps(sums + c + STEP / 2);
        for (int64_t s = 0; s < STREAMS; ++s) {
          if (c % (2 * STEP) == 0)
            look_ahead(weights[s] + c);
          const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(weights[s] + c));
          even = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(w, 16)), x[s], even);
          odd = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(w, odd_mask)), x[s], odd);
        }
        _mm256_storeu_ps(sums + c, even);
        _mm256_storeu_ps(sums + c + STEP / 2, odd);
      }
      for (int64_t c = whole; c < width; ++c)
        for (int64_t s = 0; s < STREAMS; ++s)
          sums[c] += alone[s] * widened(weights[s][c]);
    }
  }
  for (int64_t row = 0; row < p.num_rows; ++row) {
    const float *sums = scratch.data() + row * width;
    for (int64_t c = 0; c < whole; c += STEP)
      for (int64_t k = 0; k < STEP; ++k)
        put(p, row, begin + c + k, sums[c + k / 2 + k % 2 * (STEP / 2)]);
    for (int64_t c = whole; c < width; ++c)
      put(p, row, begin + c, sums[c]);
  }
}

bool is_fit(const at::Tensor &tensor) {
  return tensor.device().is_cpu() && tensor.layout() == at::kStrided && tensor.scalar_type() == at::kBFloat16 &&
         tensor.is_contiguous();
}

bool wants_gradient(const at::Tensor &tensor) { return tensor.defined() && tensor.requires_grad(); }

} // namespace

std::optional<at::Tensor> few_rows_product(const at::Tensor &input, const at::Tensor &weight, const at::Tensor &bias,
                                           bool is_transposed) {
  if (!processor_has_avx2() || !is_fit(input) || !is_fit(weight) || weight.dim() != 2 || input.dim() == 0)
    return std::nullopt;
  const int64_t in = weight.size(is_transposed ? 0 : 1), out_features = weight.size(is_transposed ? 1 : 0);
  if (in == 0 || out_features == 0 || input.size(-1) != in || input.numel() == 0 || input.numel() / in > MOST_ROWS)
    return std::nullopt;
  if (bias.defined() && (!is_fit(bias) || bias.dim() != 1 || bias.size(0) != out_features))
    return std::nullopt;
  if (at::GradMode::is_enabled() && (wants_gradient(input) || wants_gradient(weight) || wants_gradient(bias)))
    return std::nullopt;

  auto sizes = input.sizes().vec();
  sizes.back() = out_features;
  at::Tensor out = at::detail::empty_cpu(sizes, at::kBFloat16);
  const int64_t num_rows = input.numel() / in;
  const auto bits = [](const at::Tensor &tensor) { return static_cast<const uint16_t *>(tensor.const_data_ptr()); };
  const Product product{bits(weight), bias.defined() ? bits(bias) : nullptr, static_cast<uint16_t *>(out.mutable_data_ptr()),
                        num_rows,     in,                                    out_features};
  std::vector<float> wide(num_rows * in);
  const uint16_t *narrow = bits(input);
  const int64_t whole = is_transposed ? 0 : in / STEP * STEP;
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int64_t i = 0; i < in; ++i) {
      const int64_t k = i % STEP, place = i < whole ? i - k + k / 2 + k % 2 * (STEP / 2) : i;
      wide[row * in + place] = widened(narrow[row * in + i]);
    }
  }
  // On one thread the matrix is read from one end to the other, and on several each reads a part.
  const int64_t threads = std::max<int64_t>(1, std::min<int64_t>(at::get_num_threads(), weight.numel() * 2 / PIECE));
  // A thread takes several pieces at once.
  const int64_t most_pieces = threads > 1 ? threads * 8 : 1;
  int64_t length = (out_features + most_pieces - 1) / most_pieces;
  if (is_transposed)
    length = std::min((length + 2 * STEP - 1) / (2 * STEP) * (2 * STEP), MOST_COLUMNS);
  const int64_t num_pieces = (out_features + length - 1) / length;
  share(num_pieces, threads, [product, length, is_transposed, &wide](size_t piece) {
    const int64_t begin = int64_t(piece) * length, end = std::min(begin + length, product.out_features);
    if (is_transposed)
      sums_of_rows(product, wide.data(), begin, end);
    else
      dot_products(product, wide.data(), begin, end);
  });
  return out;
}

#else

std::optional<at::Tensor> few_rows_product(const at::Tensor &, const at::Tensor &, const at::Tensor &, bool) {
  return std::nullopt;
}

#endif

} // namespace te
