// Launches of the kernels in cuda/quantization.cu. For the cargo feature `cuda`.
#include "cuda_kernels.h"

using namespace te;

namespace {
// As in cuda/quantization.cu, and as Rust's.
struct Code {
  float values[16];
};
} // namespace

extern "C" {
// Everything below trusts its caller with types, sizes and devices.

int32_t te_quant_cuda_dequantize_4bit(void *packed, void *absmax, const Code *code, int64_t block_size, void *numbers) {
  return guard([&] {
    const at::Tensor &out = tensor(numbers);
    const int64_t count = out.numel();
    const unsigned threads = 256;
    run(out, std::string("dequantize_4bit_") + type_of(out), {blocks_for((count + 7) / 8, threads), threads},
        data<uint8_t>(tensor(packed)), data<float>(tensor(absmax)), *code, static_cast<uint32_t>(block_size / 8), count,
        out.data_ptr());
  });
}

int32_t te_quant_cuda_linear_4bit(void *input, void *packed, void *absmax, const Code *code, int64_t block_size, int64_t rows,
                                  int64_t columns, void *bias, void *output) {
  return guard([&] {
    const at::Tensor &out = tensor(output);
    const int64_t num_inputs = tensor(input).numel() / columns;
    const int most = num_inputs <= 1 ? 1 : num_inputs <= 2 ? 2 : num_inputs <= 4 ? 4 : 8;
    const unsigned warps = 4;
    void *added = bias ? tensor(bias).data_ptr() : nullptr;
    run(out, std::string("linear_4bit_") + type_of(out) + "_" + std::to_string(most),
        {static_cast<unsigned>((rows + warps - 1) / warps), 32 * warps}, tensor(input).data_ptr(),
        data<uint8_t>(tensor(packed)), data<float>(tensor(absmax)), *code, static_cast<uint32_t>(block_size / 32),
        static_cast<uint32_t>(num_inputs), static_cast<uint32_t>(rows), static_cast<uint32_t>(columns), added,
        out.data_ptr());
  });
}

int32_t te_quant_cuda_dequantize_blockwise(void *codes, void *absmax, void *table, int64_t block_size, float offset,
                                           void *numbers) {
  return guard([&] {
    const at::Tensor &out = tensor(numbers);
    const unsigned threads = 256;
    run(out, "dequantize_blockwise", {blocks_for(out.numel(), threads), threads}, data<uint8_t>(tensor(codes)),
        data<float>(tensor(absmax)), data<float>(tensor(table)), static_cast<uint32_t>(block_size), offset,
        static_cast<uint32_t>(out.numel()), data<float>(out));
  });
}

// `is_outlier_column` holds zeros.
int32_t te_quant_cuda_int8_rows(void *matrix, float threshold, void *scales, void *is_outlier_column, void *codes) {
  return guard([&] {
    const at::Tensor &rows = tensor(matrix);
    const auto columns = static_cast<uint32_t>(rows.size(1));
    const Launch size{static_cast<unsigned>(rows.size(0)), 256};
    run(rows, "int8_row_scales", size, rows.data_ptr(), columns, threshold, data<float>(tensor(scales)),
        data<uint8_t>(tensor(is_outlier_column)));
    run(rows, "int8_row_codes", size, rows.data_ptr(), columns, data<float>(tensor(scales)),
        data<uint8_t>(tensor(is_outlier_column)), data<int8_t>(tensor(codes)));
  });
}

// `sums` may have more rows than `numbers`, and is as wide.
int32_t te_quant_cuda_int8_scale(void *sums, void *a_scales, void *b_scales, void *bias, void *numbers) {
  return guard([&] {
    const at::Tensor &out = tensor(numbers);
    const unsigned threads = 256;
    float *added = bias ? data<float>(tensor(bias)) : nullptr;
    run(out, std::string("int8_scale_") + type_of(out), {blocks_for(out.numel(), threads), threads},
        data<int32_t>(tensor(sums)), static_cast<uint32_t>(tensor(sums).size(1)), data<float>(tensor(a_scales)),
        data<float>(tensor(b_scales)), added, static_cast<uint32_t>(out.size(0)), static_cast<uint32_t>(out.size(1)),
        out.data_ptr());
  });
}
}
