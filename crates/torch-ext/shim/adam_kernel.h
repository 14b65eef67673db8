// One Adam step over many float tensors on the CPU, as at::_fused_adam_ and at::_fused_adamw_ to the bit.
#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace te {

struct AdamNumbers {
  double lr, beta1, beta2, weight_decay, eps;
  // Gradients are multiplied by it on the way; they stay as they are in memory.
  double grad_factor;
  bool amsgrad, maximize, decoupled;
  // A device, or another core, reads the averages next.
  bool demote_averages;
};

struct AdamLists {
  const std::vector<at::Tensor> &params, &grads, &exp_avgs, &exp_avg_sqs, &max_exp_avg_sqs, &state_steps;
};

// False, with nothing done, where the tensors or the processor are not what the kernel is made for.
bool adam_on_cpu(const AdamNumbers &numbers, const AdamLists &lists);

} // namespace te
