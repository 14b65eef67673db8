// Products of a few bfloat16 rows with a matrix on the CPU.
#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

namespace te {

// `input [.., in]` times `weight`, `[out, in]`, or `[in, out]` if it `is_transposed`, plus `bias [out]`, which may be undefined:
// `[.., out]`. Nothing where the tensors or the processor are not what the kernel is made for, and where a gradient is wanted.
std::optional<at::Tensor> few_rows_product(const at::Tensor &input, const at::Tensor &weight, const at::Tensor &bias,
                                           bool is_transposed);

} // namespace te
