// libtorch's kernel (ATen/native/cpu/FusedAdamKernel.cpp) enters its dispatcher and starts its threads anew for every
// tensor, which takes longer than the arithmetic for all but large ones. This one cuts the elements of all tensors
// into pieces and shares those between threads once. The arithmetic is that of libtorch, and where it rounds a product
// and a sum together was found by comparing bits (tests/ops.rs): the loop over eight elements at a time and the one over
// the elements that are left at a tensor's end differ in that.
#include "adam_kernel.h"
#include "avx2.h"
#include "share.h"

#include <cmath>

namespace te {

#ifdef TE_HAS_KERNEL
namespace {

// What is left of the numbers once the step of a tensor is known.
struct Factors {
  double step_size, bias_correction2_sqrt;
};

struct Piece {
  float *param;
  const float *grad;
  float *exp_avg, *exp_avg_sq, *max_exp_avg_sq;
  int64_t count;
  Factors factors;
};

// A multiple of libtorch's vector length, so that a piece ends where one of its loops could; small enough for even
// shares, large enough to be worth a turn.
constexpr int64_t PIECE = 1 << 14;
constexpr int64_t WIDTH = 8;

__attribute__((target("avx2,fma"))) void step_vectors(const AdamNumbers &n, const Piece &p, int64_t end) {
  const __m256 weight = _mm256_set1_ps(float(1 - n.beta1));
  const bool is_small = std::abs(float(1 - n.beta1)) < 0.5f;
  const __m256 coefficient = is_small ? weight : _mm256_sub_ps(weight, _mm256_set1_ps(1.0f));
  const __m256 beta2 = _mm256_set1_ps(float(n.beta2)), square_weight = _mm256_set1_ps(float(1 - n.beta2));
  const __m256 decay = _mm256_set1_ps(float(n.weight_decay)), keep = _mm256_set1_ps(float(1 - n.lr * n.weight_decay));
  const __m256 root = _mm256_set1_ps(float(p.factors.bias_correction2_sqrt)), eps = _mm256_set1_ps(float(n.eps));
  const __m256 minus_step = _mm256_set1_ps(float(-p.factors.step_size)), minus_one = _mm256_set1_ps(-1.0f);
  const bool is_scaled = n.grad_factor != 1;
  const __m256 factor = _mm256_set1_ps(float(n.grad_factor));
  for (int64_t i = 0; i < end; i += WIDTH) {
    if (i % LINE == 0) {
      prefetch(p.grad + i);
      prefetch(p.param + i);
      prefetch(p.exp_avg + i);
      prefetch(p.exp_avg_sq + i);
      if (n.demote_averages && 2 * LINE <= i) {
        demote(p.exp_avg + i);
        demote(p.exp_avg_sq + i);
        if (p.max_exp_avg_sq)
          demote(p.max_exp_avg_sq + i);
      }
    }
    __m256 grad = _mm256_loadu_ps(p.grad + i), param = _mm256_loadu_ps(p.param + i);
    if (is_scaled)
      grad = _mm256_mul_ps(grad, factor);
    if (n.maximize)
      grad = _mm256_mul_ps(grad, minus_one);
    if (n.weight_decay != 0) {
      if (n.decoupled)
        param = _mm256_mul_ps(param, keep);
      else
        grad = _mm256_fmadd_ps(param, decay, grad);
    }
    __m256 mean = _mm256_loadu_ps(p.exp_avg + i);
    mean = _mm256_fmadd_ps(coefficient, _mm256_sub_ps(grad, mean), is_small ? mean : grad);
    _mm256_storeu_ps(p.exp_avg + i, mean);
    __m256 square = _mm256_mul_ps(_mm256_loadu_ps(p.exp_avg_sq + i), beta2);
    square = _mm256_fmadd_ps(_mm256_mul_ps(square_weight, grad), grad, square);
    _mm256_storeu_ps(p.exp_avg_sq + i, square);
    if (p.max_exp_avg_sq) {
      // As at::vec::maximum: not a number wins.
      const __m256 before = _mm256_loadu_ps(p.max_exp_avg_sq + i);
      const __m256 is_nan = _mm256_cmp_ps(before, square, _CMP_UNORD_Q);
      square = _mm256_or_ps(_mm256_max_ps(before, square), is_nan);
      _mm256_storeu_ps(p.max_exp_avg_sq + i, square);
    }
    const __m256 denominator = _mm256_add_ps(_mm256_div_ps(_mm256_sqrt_ps(square), root), eps);
    param = _mm256_add_ps(param, _mm256_div_ps(_mm256_mul_ps(minus_step, mean), denominator));
    _mm256_storeu_ps(p.param + i, param);
  }
}

// libtorch's compiler rounds the product of the second moment together with the sum here, the other product above.
__attribute__((target("avx2,fma"))) void step_rest(const AdamNumbers &n, const Piece &p, int64_t start) {
  const float weight = float(1 - n.beta1), square_weight = float(1 - n.beta2), beta2 = float(n.beta2);
  const bool is_small = std::abs(weight) < 0.5f;
  const float root = float(p.factors.bias_correction2_sqrt), eps = float(n.eps);
  const float minus_step = float(-p.factors.step_size), keep = float(1 - n.lr * n.weight_decay);
  for (int64_t i = start; i < p.count; ++i) {
    float grad = n.grad_factor != 1 ? p.grad[i] * float(n.grad_factor) : p.grad[i], param = p.param[i];
    if (n.maximize)
      grad = -grad;
    if (n.weight_decay != 0) {
      if (n.decoupled)
        param *= keep;
      else
        grad = std::fma(param, float(n.weight_decay), grad);
    }
    const float mean = p.exp_avg[i], difference = grad - mean;
    p.exp_avg[i] = is_small ? std::fma(weight, difference, mean) : std::fma(weight - 1.0f, difference, grad);
    float square = p.exp_avg_sq[i] = std::fma(p.exp_avg_sq[i], beta2, square_weight * grad * grad);
    if (p.max_exp_avg_sq)
      square = p.max_exp_avg_sq[i] = std::max(p.max_exp_avg_sq[i], square);
    p.param[i] = param + minus_step * p.exp_avg[i] / (std::sqrt(square) / root + eps);
  }
}

bool fits(const at::Tensor &tensor, const at::Tensor &param) {
  return tensor.defined() && tensor.device().is_cpu() && tensor.scalar_type() == at::kFloat &&
         tensor.is_contiguous() && tensor.sizes() == param.sizes();
}

bool all_fit(const AdamNumbers &numbers, const AdamLists &lists) {
  for (size_t i = 0; i < lists.params.size(); ++i) {
    const at::Tensor &param = lists.params[i], &step = lists.state_steps[i];
    if (!fits(param, param) || !fits(lists.grads[i], param) || !fits(lists.exp_avgs[i], param) ||
        !fits(lists.exp_avg_sqs[i], param) || (numbers.amsgrad && !fits(lists.max_exp_avg_sqs[i], param)))
      return false;
    if (!step.defined() || !step.device().is_cpu() || step.scalar_type() != at::kFloat || step.numel() != 1)
      return false;
  }
  return true;
}

// Returns the number of elements.
int64_t cut(const AdamNumbers &n, const AdamLists &lists, std::vector<Piece> &pieces) {
  int64_t total = 0;
  pieces.clear();
  for (size_t i = 0; i < lists.params.size(); ++i) {
    const double step = *lists.state_steps[i].const_data_ptr<float>();
    const double bias_correction1 = 1 - std::pow(n.beta1, step), bias_correction2 = 1 - std::pow(n.beta2, step);
    const Factors factors{n.lr / bias_correction1, std::sqrt(bias_correction2)};
    float *param = lists.params[i].data_ptr<float>(), *exp_avg = lists.exp_avgs[i].data_ptr<float>();
    float *exp_avg_sq = lists.exp_avg_sqs[i].data_ptr<float>();
    float *max = n.amsgrad ? lists.max_exp_avg_sqs[i].data_ptr<float>() : nullptr;
    const float *grad = lists.grads[i].const_data_ptr<float>();
    const int64_t size = lists.params[i].numel();
    for (int64_t at = 0; at < size; at += PIECE)
      pieces.push_back({param + at, grad + at, exp_avg + at, exp_avg_sq + at, max ? max + at : nullptr,
                        std::min(PIECE, size - at), factors});
    total += size;
  }
  return total;
}

} // namespace

bool adam_on_cpu(const AdamNumbers &numbers, const AdamLists &lists) {
  if (!processor_has_avx2() || !all_fit(numbers, lists))
    return false;
  // Kept by the thread, so that a step takes no memory.
  thread_local std::vector<Piece> scratch;
  const int64_t total = cut(numbers, lists, scratch);
  // Waking a thread up takes about as long as a few pieces. Those threads have a `scratch` of their own.
  share(scratch.size(), total / (4 * PIECE), [&numbers, &pieces = std::as_const(scratch)](size_t i) {
    const int64_t vectors = pieces[i].count - pieces[i].count % WIDTH;
    step_vectors(numbers, pieces[i], vectors);
    step_rest(numbers, pieces[i], vectors);
  });
  return true;
}

#else

bool adam_on_cpu(const AdamNumbers &, const AdamLists &) { return false; }

#endif

} // namespace te
