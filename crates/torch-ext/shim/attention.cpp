// Attention without a matrix of scores, with the logarithms of the sums that its weights were divided by: libtorch's kernels.
#include "common.h"
#include <ATen/Context.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <limits>

using namespace te;

namespace {
// As libtorch numbers them (`sdp::SDPBackend`).
constexpr int64_t kNone = 0, kFlash = 1, kCudnn = 3;

// The memory-efficient kernel wants logarithms for a multiple of so many queries.
constexpr int64_t kQueriesAtOnce = 32;

// The kernel of the CPU takes it for granted that the elements of a head lie beside each other.
at::Tensor readable(const at::Tensor &t) { return t.stride(-1) == 1 ? t : t.contiguous(); }

// In the order of memory in which the kernel of the CPU has made them.
at::Tensor by_query(const at::Tensor &t) { return t.transpose(1, 2).contiguous().transpose(1, 2); }

at::Tensor nothing(const at::Tensor &like) { return at::empty({0}, like.options().dtype(at::kLong)); }
} // namespace

extern "C" {
int32_t te_attention_choice(void *query, void *key, void *value, int64_t *choice) {
  return guard([&] {
    *choice = at::_fused_sdp_choice(tensor(query), tensor(key), tensor(value));
    // cuDNN's kernel gives no sums. Where it could be taken, FlashAttention can, unless somebody has switched that off.
    if (*choice == kCudnn)
      *choice = at::globalContext().userEnabledFlashSDP() ? kFlash : kNone;
  });
}

// `kernel`: 0 for the CPU's, 1 for FlashAttention, 2 for the memory-efficient one.
int32_t te_attention(int32_t kernel, void *query, void *key, void *value, bool is_causal, double scale, void **output,
                     void **log_sum) {
  return guard([&] {
    const at::Tensor q = readable(tensor(query)), k = readable(tensor(key)), v = readable(tensor(value));
    at::Tensor out, sums;
    if (kernel == 0) {
      std::tie(out, sums) = at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, {}, scale);
    } else if (kernel == 1) {
      auto found = at::_scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, false, scale);
      out = std::get<0>(found);
      sums = std::get<1>(found);
    } else {
      auto found = at::_scaled_dot_product_efficient_attention(q, k, v, {}, true, 0.0, is_causal, scale);
      out = std::get<0>(found);
      sums = std::get<1>(found).narrow(2, 0, q.size(2));
    }
    *output = hand_over(out);
    *log_sum = hand_over(sums);
  });
}

int32_t te_attention_backward(int32_t kernel, void *gradient, void *query, void *key, void *value, void *output, void *log_sum,
                              bool is_causal, double scale, void **of_query, void **of_key, void **of_value) {
  return guard([&] {
    const at::Tensor q = readable(tensor(query)), k = readable(tensor(key)), v = readable(tensor(value));
    const at::Tensor &g = tensor(gradient), &out = tensor(output), &sums = tensor(log_sum);
    at::Tensor dq, dk, dv;
    if (kernel == 0) {
      std::tie(dq, dk, dv) = at::_scaled_dot_product_flash_attention_for_cpu_backward(
          by_query(g), q, k, v, by_query(out), by_query(sums), 0.0, is_causal, {}, scale);
    } else if (kernel == 1) {
      const at::Tensor none = nothing(q);
      std::tie(dq, dk, dv) = at::_scaled_dot_product_flash_attention_backward(
          by_query(g), q, k, v, by_query(out), sums.contiguous(), at::Tensor(), at::Tensor(), q.size(2), k.size(2), 0.0, is_causal,
          none, none, scale);
    } else {
      const at::Tensor none = nothing(q);
      const int64_t missing = (kQueriesAtOnce - sums.size(2) % kQueriesAtOnce) % kQueriesAtOnce;
      // Queries that are not there attend to nothing.
      const at::Tensor padded = at::constant_pad_nd(sums, {0, missing}, std::numeric_limits<double>::infinity());
      auto found = at::_scaled_dot_product_efficient_attention_backward(by_query(g), q, k, v, at::Tensor(), by_query(out),
                                                                        padded.contiguous(), none, none, 0.0,
                                                                        {true, true, true, false}, is_causal, scale);
      std::tie(dq, dk, dv) = std::tie(std::get<0>(found), std::get<1>(found), std::get<2>(found));
    }
    *of_query = hand_over(dq);
    *of_key = hand_over(dk);
    *of_value = hand_over(dv);
  });
}
}
