// Launches of the kernels in cuda/fp8.cu. For the cargo feature `cuda`. Everything here trusts its caller with types, sizes and devices.
#include "cuda_kernels.h"

using namespace te;

namespace {
constexpr unsigned kThreads = 256;
}

extern "C" {
// `largest` is one zero.
int32_t te_fp8_cuda_largest(void *matrix, bool skips_nan, void *largest) {
  return guard([&] {
    const at::Tensor &from = tensor(matrix);
    const unsigned blocks = std::min(blocks_for((from.numel() + 7) / 8, kThreads), 2048u);
    run(from, std::string("largest_of_all_") + type_of(from), {blocks, kThreads}, from.data_ptr(), from.numel(),
        static_cast<int>(skips_nan), data<float>(tensor(largest)));
  });
}

// Of rows, or of columns, for which `largest` holds zeros.
int32_t te_fp8_cuda_largest_along(void *matrix, bool of_rows, void *largest) {
  return guard([&] {
    const at::Tensor &from = tensor(matrix);
    const auto rows = static_cast<uint32_t>(from.size(0)), columns = static_cast<uint32_t>(from.size(1));
    if (of_rows) {
      run(from, std::string("largest_of_rows_") + type_of(from), {rows, kThreads}, from.data_ptr(), columns,
          data<float>(tensor(largest)));
    } else {
      run(from, std::string("largest_of_columns_") + type_of(from),
          {blocks_for(columns / 8, kThreads), kThreads, (rows + 63) / 64}, from.data_ptr(), rows, columns,
          data<float>(tensor(largest)));
    }
  });
}

int32_t te_fp8_cuda_cast(void *matrix, void *scales, bool scales_rows, bool scales_columns, bool is_e4m3, void *codes) {
  return guard([&] {
    const at::Tensor &from = tensor(matrix);
    run(from, std::string(is_e4m3 ? "to_e4m3_" : "to_e5m2_") + type_of(from), {blocks_for(from.numel() / 8, kThreads), kThreads},
        from.data_ptr(), data<float>(tensor(scales)), static_cast<uint32_t>(scales_rows), static_cast<uint32_t>(scales_columns),
        from.numel(), static_cast<uint32_t>(from.size(1)), tensor(codes).data_ptr());
  });
}

int32_t te_fp8_cuda_transpose(void *matrix, void *result) {
  return guard([&] {
    const at::Tensor &from = tensor(matrix);
    const auto rows = static_cast<uint32_t>(from.size(0)), columns = static_cast<uint32_t>(from.size(1));
    run(from, "transpose_bytes", {(columns + 63) / 64, kThreads, (rows + 63) / 64}, from.data_ptr(), rows, columns,
        tensor(result).data_ptr());
  });
}
}
