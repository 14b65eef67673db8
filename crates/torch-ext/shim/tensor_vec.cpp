// Lists of tensors that Rust keeps over many calls.
#include "common.h"
#include <torch/csrc/autograd/variable.h>

using namespace te;

namespace te {
namespace {

// The gradient of a tensor, undefined where there is none. Reading through the meta data spares the warning that
// `.grad()` of a non-leaf prints.
const at::Tensor &gradient_of(const at::Tensor &t) {
  static const at::Tensor none;
  return t.defined() && torch::autograd::impl::get_autograd_meta(t) ? t.unsafeGetTensorImpl()->grad() : none;
}

} // namespace
} // namespace te

extern "C" {
void *te_tensor_vec_new(size_t capacity) noexcept {
  auto *list = new std::vector<at::Tensor>();
  list->reserve(capacity);
  return list;
}
void te_tensor_vec_free(void *list) { delete &tensor_vec(list); }
size_t te_tensor_vec_len(void *list) { return tensor_vec(list).size(); }
void te_tensor_vec_push(void *list, void *handle) noexcept { tensor_vec(list).push_back(tensor(handle)); }
int32_t te_tensor_vec_get(void *list, size_t index, void **result) {
  return guard([&] { *result = hand_over(tensor_vec(list).at(index)); });
}
// Gives the tensors up and keeps the room for as many.
void te_tensor_vec_clear(void *list) { tensor_vec(list).clear(); }

// ---- gradients of a whole list ----
bool te_tensor_vec_gradients(void *list, void *gradients) noexcept {
  auto &found = tensor_vec(gradients);
  found.clear();
  for (const at::Tensor &leaf : tensor_vec(list)) {
    const at::Tensor &gradient = gradient_of(leaf);
    if (gradient.defined())
      found.push_back(gradient);
  }
  return found.size() == tensor_vec(list).size();
}
bool te_tensor_vec_has_gradient(void *list) {
  for (const at::Tensor &leaf : tensor_vec(list))
    if (gradient_of(leaf).defined())
      return true;
  return false;
}
int32_t te_tensor_vec_drop_gradients(void *list) {
  return guard([&] {
    for (at::Tensor &leaf : tensor_vec(list))
      if (gradient_of(leaf).defined())
        leaf.mutable_grad().reset();
  });
}
}
