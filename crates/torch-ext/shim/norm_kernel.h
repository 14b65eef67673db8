// The sum of the squares of many float tensors on the CPU.
#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace te {

// Nothing where the tensors or the processor are not what the kernel is made for.
std::optional<double> sum_of_squares_on_cpu(const std::vector<at::Tensor> &tensors);

} // namespace te
