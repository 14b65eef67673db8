// Operations between a tensor and a number. tch has them, too, but what fails there ends in a panic.
#include "common.h"

using namespace te;

namespace {

// Mirrors `Border` in src/scalar.rs.
struct Number {
  int64_t whole;
  double real;
  bool is_whole;
};
at::Scalar scalar(Number number) { return number.is_whole ? at::Scalar(number.whole) : at::Scalar(number.real); }

} // namespace

extern "C" {
int32_t te_scalar_add(void *self, Number value, void **out) {
  return guard([&] { *out = hand_over(tensor(self).add(scalar(value))); });
}
int32_t te_scalar_mul(void *self, Number value, void **out) {
  return guard([&] { *out = hand_over(tensor(self).mul(scalar(value))); });
}
int32_t te_scalar_pow(void *self, Number exponent, void **out) {
  return guard([&] { *out = hand_over(tensor(self).pow(scalar(exponent))); });
}
int32_t te_scalar_eq(void *self, Number value, void **out) {
  return guard([&] { *out = hand_over(tensor(self).eq(scalar(value))); });
}
int32_t te_scalar_ne(void *self, Number value, void **out) {
  return guard([&] { *out = hand_over(tensor(self).ne(scalar(value))); });
}
int32_t te_scalar_ge(void *self, Number value, void **out) {
  return guard([&] { *out = hand_over(tensor(self).ge(scalar(value))); });
}
int32_t te_scalar_lt(void *self, Number value, void **out) {
  return guard([&] { *out = hand_over(tensor(self).lt(scalar(value))); });
}
int32_t te_scalar_clamp_min(void *self, Number min, void **out) {
  return guard([&] { *out = hand_over(tensor(self).clamp_min(scalar(min))); });
}
int32_t te_scalar_clamp_max(void *self, Number max, void **out) {
  return guard([&] { *out = hand_over(tensor(self).clamp_max(scalar(max))); });
}
int32_t te_scalar_masked_fill(void *self, void *mask, Number value, void **out) {
  return guard([&] { *out = hand_over(tensor(self).masked_fill(tensor(mask), scalar(value))); });
}
int32_t te_scalar_norm(void *self, Number p, int64_t dim, bool keepdim, void **out) {
  return guard([&] { *out = hand_over(tensor(self).norm(scalar(p), at::IntArrayRef(&dim, 1), keepdim)); });
}

int32_t te_scalar_add_(void *self, Number value) {
  return guard([&] { tensor(self).add_(scalar(value)); });
}
int32_t te_scalar_mul_(void *self, Number value) {
  return guard([&] { tensor(self).mul_(scalar(value)); });
}
int32_t te_scalar_div_(void *self, Number value) {
  return guard([&] { tensor(self).div_(scalar(value)); });
}
int32_t te_scalar_fill_(void *self, Number value) {
  return guard([&] { tensor(self).fill_(scalar(value)); });
}
int32_t te_scalar_clamp_(void *self, Number min, Number max) {
  return guard([&] { tensor(self).clamp_(scalar(min), scalar(max)); });
}
int32_t te_scalar_clamp_min_(void *self, Number min) {
  return guard([&] { tensor(self).clamp_min_(scalar(min)); });
}
int32_t te_scalar_lerp_(void *self, void *end, Number weight) {
  return guard([&] { tensor(self).lerp_(tensor(end), scalar(weight)); });
}
}
