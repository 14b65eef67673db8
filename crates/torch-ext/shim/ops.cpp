// Operations and states that tch does not bind: autocast, fused and foreach kernels, loss scaling, generators,
// storages, meta tensors.
#include "adam_kernel.h"
#include "common.h"
#include "few_rows_kernel.h"
#include "norm_kernel.h"
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <c10/core/DeviceGuard.h>
#include <algorithm>
#include <c10/core/StorageImpl.h>
#include <mutex>

using namespace te;

namespace te {
namespace {

// The handle of a `TensorVec` (src/tensor_vec.rs): its tensors are used where they lie, so that a call over a list that
// is kept takes no memory.
using List = void *;
const std::vector<at::Tensor> &all(List list) { return tensor_vec(list); }

std::optional<at::Tensor> optional_tensor(void *handle) {
  return handle ? std::optional<at::Tensor>(tensor(handle)) : std::nullopt;
}

// Parameters are leaves that require gradients; an optimizer writes into them behind autograd's back.
template <typename F> int32_t guard_no_grad(F &&body) noexcept {
  return guard([&] {
    at::NoGradGuard no_grad;
    body();
  });
}

// The fused kernels do not count as a change in place by themselves. Without the count, a backward pass over a graph
// from before the step would silently mix old and new parameters.
void count_as_changed(const std::vector<at::Tensor> &params) {
  for (const auto &param : params)
    if (!param.is_inference())
      param.unsafeGetTensorImpl()->bump_version();
}

at::DeviceType device_type(int32_t type) { return static_cast<at::DeviceType>(type); }

// StorageImpl can be told to refuse access to its data, but not to allow it again. Without that flag, reading a freed
// tensor would follow a null pointer. Explicit instantiation may name private members ([temp.spec]/6).
template <bool c10::StorageImpl::*Member> struct StorageFlag {
  friend bool &refuses_access(c10::StorageImpl &storage) { return storage.*Member; }
};
bool &refuses_access(c10::StorageImpl &storage);
template struct StorageFlag<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

// The context of a freed storage's data pointer: remembers how much memory its tensors may address.
struct Freed {
  size_t bytes;
};
void drop_freed(void *context) { delete static_cast<Freed *>(context); }

c10::StorageImpl &storage_of(const at::Tensor &t) {
  TORCH_CHECK_VALUE(t.defined() && t.has_storage(), "the tensor has no storage");
  return *t.storage().unsafeGetStorageImpl();
}

bool is_freed(c10::StorageImpl &storage) { return storage._mutable_data_ptr_no_checks().get_deleter() == &drop_freed; }

void check_owned(c10::StorageImpl &storage) {
  TORCH_CHECK_VALUE(storage.device_type() != at::kMeta, "a meta tensor has no memory");
  TORCH_CHECK_VALUE(storage.resizable() && storage.allocator(),
                    "libtorch does not own this memory (it was lent by a file mapping or another library)");
}

} // namespace
} // namespace te

extern "C" {
// ---- autocast ----
int32_t te_autocast_is_enabled(int32_t device, bool *enabled) {
  return guard([&] { *enabled = at::autocast::is_autocast_enabled(device_type(device)); });
}
int32_t te_autocast_set_enabled(int32_t device, bool enabled) {
  return guard([&] { at::autocast::set_autocast_enabled(device_type(device), enabled); });
}
int32_t te_autocast_dtype(int32_t device, int32_t *kind) {
  return guard([&] { *kind = static_cast<int32_t>(at::autocast::get_autocast_dtype(device_type(device))); });
}
int32_t te_autocast_set_dtype(int32_t device, int32_t kind) {
  return guard([&] { at::autocast::set_autocast_dtype(device_type(device), static_cast<at::ScalarType>(kind)); });
}
bool te_autocast_is_cache_enabled() { return at::autocast::is_autocast_cache_enabled(); }
void te_autocast_set_cache_enabled(bool enabled) { at::autocast::set_autocast_cache_enabled(enabled); }
void te_autocast_increment_nesting() { at::autocast::increment_nesting(); }
int32_t te_autocast_decrement_nesting() { return at::autocast::decrement_nesting(); }
int32_t te_autocast_clear_cache() {
  return guard([] { at::autocast::clear_cache(); });
}

// ---- fused optimizers ----
int32_t te_fused_adam(bool decoupled, List params, List grads, List exp_avgs, List exp_avg_sqs, List max_exp_avg_sqs,
                      List state_steps, double lr, double beta1, double beta2, double weight_decay, double eps,
                      bool amsgrad, bool maximize, double grad_factor, void *grad_scale, void *found_inf,
                      bool demote_averages) {
  return guard_no_grad([&] {
    if (!grad_scale && !found_inf) {
      const te::AdamNumbers numbers{lr,      beta1,    beta2,     weight_decay,   eps, grad_factor,
                                    amsgrad, maximize, decoupled, demote_averages};
      if (te::adam_on_cpu(numbers, {all(params), all(grads), all(exp_avgs), all(exp_avg_sqs), all(max_exp_avg_sqs),
                                    all(state_steps)})) {
        count_as_changed(all(params));
        return;
      }
    }
    std::vector<at::Tensor> scaled =
        grad_factor == 1 ? all(grads) : at::_foreach_mul(all(grads), at::Scalar(grad_factor));
    auto run = [&](auto op) {
      op(all(params), scaled, all(exp_avgs), all(exp_avg_sqs), all(max_exp_avg_sqs), all(state_steps), lr,
         beta1, beta2, weight_decay, eps, amsgrad, maximize, optional_tensor(grad_scale), optional_tensor(found_inf));
    };
    if (decoupled)
      run([](auto &&...args) { at::_fused_adamw_(args...); });
    else
      run([](auto &&...args) { at::_fused_adam_(args...); });
    count_as_changed(all(params));
  });
}

int32_t te_fused_sgd(List params, List grads, List momentum_buffers, double weight_decay, double momentum, double lr,
                     double dampening, bool nesterov, bool maximize, bool is_first_step, void *grad_scale,
                     void *found_inf) {
  return guard_no_grad([&] {
    at::_fused_sgd_(all(params), all(grads), all(momentum_buffers), weight_decay, momentum, lr, dampening, nesterov,
                    maximize, is_first_step, optional_tensor(grad_scale), optional_tensor(found_inf));
    count_as_changed(all(params));
  });
}

int32_t te_fused_adagrad(List params, List grads, List state_sums, List state_steps, double lr, double lr_decay,
                         double weight_decay, double eps, bool maximize, void *grad_scale, void *found_inf) {
  return guard_no_grad([&] {
    at::_fused_adagrad_(all(params), all(grads), all(state_sums), all(state_steps), lr, lr_decay, weight_decay, eps,
                        maximize, optional_tensor(grad_scale), optional_tensor(found_inf));
    count_as_changed(all(params));
  });
}

// ---- foreach ----
int32_t te_sum_of_squares(List self, bool *is_known, double *sum) {
  return guard_no_grad([&] {
    const std::optional<double> found = sum_of_squares_on_cpu(all(self));
    *is_known = found.has_value();
    *sum = found.value_or(0);
  });
}
int32_t te_foreach_add_scalar(List self, double value) {
  return guard_no_grad([&] {
    const auto &tensors = all(self);
    // Counts of steps: for a single number, entering libtorch takes a hundred times as long as the addition.
    const auto is_number = [](const at::Tensor &tensor) {
      return tensor.device().is_cpu() && tensor.scalar_type() == at::kFloat && tensor.numel() == 1;
    };
    if (!std::all_of(tensors.begin(), tensors.end(), is_number))
      return at::_foreach_add_(tensors, at::Scalar(value));
    for (const at::Tensor &tensor : tensors)
      *tensor.data_ptr<float>() += float(value);
    count_as_changed(tensors);
  });
}
int32_t te_foreach_add(List self, List other, double alpha) {
  return guard_no_grad([&] { at::_foreach_add_(all(self), all(other), at::Scalar(alpha)); });
}
int32_t te_foreach_mul_scalar(List self, double value) {
  return guard_no_grad([&] { at::_foreach_mul_(all(self), at::Scalar(value)); });
}
int32_t te_foreach_mul_tensor(List self, void *value) {
  return guard_no_grad([&] { at::_foreach_mul_(all(self), tensor(value)); });
}
int32_t te_foreach_mul(List self, List other) {
  return guard_no_grad([&] { at::_foreach_mul_(all(self), all(other)); });
}
int32_t te_foreach_div_scalar(List self, double value) {
  return guard_no_grad([&] { at::_foreach_div_(all(self), at::Scalar(value)); });
}
int32_t te_foreach_div(List self, List other) {
  return guard_no_grad([&] { at::_foreach_div_(all(self), all(other)); });
}
int32_t te_foreach_sqrt(List self) {
  return guard_no_grad([&] { at::_foreach_sqrt_(all(self)); });
}
int32_t te_foreach_sign(List self) {
  return guard_no_grad([&] { at::_foreach_sign_(all(self)); });
}
int32_t te_foreach_zero(List self) {
  return guard_no_grad([&] { at::_foreach_zero_(all(self)); });
}
int32_t te_foreach_copy(List self, List source, bool non_blocking) {
  return guard_no_grad([&] { at::_foreach_copy_(all(self), all(source), non_blocking); });
}
int32_t te_foreach_lerp(List self, List end, double weight) {
  return guard_no_grad([&] { at::_foreach_lerp_(all(self), all(end), at::Scalar(weight)); });
}
int32_t te_foreach_addcmul(List self, List left, List right, double value) {
  return guard_no_grad([&] { at::_foreach_addcmul_(all(self), all(left), all(right), at::Scalar(value)); });
}
int32_t te_foreach_addcdiv(List self, List numerator, List denominator, double value) {
  return guard_no_grad([&] { at::_foreach_addcdiv_(all(self), all(numerator), all(denominator), at::Scalar(value)); });
}
int32_t te_few_rows_product(void *input, void *weight, void *bias, bool is_transposed, void **out) {
  return guard([&] {
    const at::Tensor none;
    auto product = few_rows_product(tensor(input), tensor(weight), bias ? tensor(bias) : none, is_transposed);
    if (product)
      *out = hand_over(std::move(*product));
  });
}
int32_t te_foreach_norm(List self, double ord, List norms) {
  return guard_no_grad([&] { tensor_vec(norms) = at::_foreach_norm(all(self), at::Scalar(ord)); });
}
int32_t te_foreach_empty_like(List self, List empty) {
  return guard_no_grad([&] {
    for (const at::Tensor &tensor : all(self))
      tensor_vec(empty).push_back(at::empty_like(tensor));
  });
}

// ---- loss scaling ----
int32_t te_amp_unscale(List grads, void *found_inf, void *inv_scale) {
  return guard_no_grad(
      [&] { at::_amp_foreach_non_finite_check_and_unscale_(all(grads), tensor(found_inf), tensor(inv_scale)); });
}
int32_t te_amp_update_scale(void *scale, void *growth_tracker, void *found_inf, double growth_factor,
                            double backoff_factor, int64_t growth_interval) {
  return guard_no_grad([&] {
    at::_amp_update_scale_(tensor(scale), tensor(growth_tracker), tensor(found_inf), growth_factor, backoff_factor,
                           growth_interval);
  });
}

// ---- determinism ----
int32_t te_set_deterministic_algorithms(bool enabled, bool warn_only) {
  return guard([&] { at::globalContext().setDeterministicAlgorithms(enabled, warn_only); });
}
int32_t te_deterministic_algorithms(bool *enabled) {
  return guard([&] { *enabled = at::globalContext().deterministicAlgorithms(); });
}

// ---- generators ----
int32_t te_generator_default(int32_t device, int32_t index, void **result) {
  return guard([&] {
    at::Device wanted(device_type(device), static_cast<at::DeviceIndex>(index));
    if (wanted.is_cuda())
      TORCH_CHECK_VALUE(at::globalContext().hasCUDA(),
                        "no CUDA is available: the CUDA library of libtorch is not loaded or there is no device");
    *result = new at::Generator(at::globalContext().defaultGenerator(wanted));
  });
}
int32_t te_generator_new_cpu(uint64_t seed, void **result) {
  return guard([&] { *result = new at::Generator(at::detail::createCPUGenerator(seed)); });
}
void te_generator_free(void *generator) { delete static_cast<at::Generator *>(generator); }

static at::Generator &generator(void *handle) { return *static_cast<at::Generator *>(handle); }

int32_t te_generator_manual_seed(void *handle, uint64_t seed) {
  return guard([&] {
    std::lock_guard<std::mutex> lock(generator(handle).mutex());
    generator(handle).set_current_seed(seed);
  });
}
int32_t te_generator_initial_seed(void *handle, uint64_t *seed) {
  return guard([&] {
    std::lock_guard<std::mutex> lock(generator(handle).mutex());
    *seed = generator(handle).current_seed();
  });
}
int32_t te_generator_state(void *handle, void **state) {
  return guard([&] {
    std::lock_guard<std::mutex> lock(generator(handle).mutex());
    *state = hand_over(generator(handle).get_state());
  });
}
int32_t te_generator_set_state(void *handle, void *state) {
  return guard([&] {
    TORCH_CHECK_VALUE(tensor(state).defined(), "the state is an undefined tensor");
    std::lock_guard<std::mutex> lock(generator(handle).mutex());
    // libtorch reads from the beginning of the storage, wherever in it the tensor begins.
    generator(handle).set_state(tensor(state).clone());
  });
}
int32_t te_generator_randperm(void *handle, int64_t n, void **result) {
  return guard([&] {
    auto options = at::TensorOptions().dtype(at::kLong).device(generator(handle).device());
    *result = hand_over(at::randperm(n, generator(handle), options));
  });
}
int32_t te_generator_multinomial(void *handle, void *weights, int64_t num_samples, void **result) {
  return guard_no_grad([&] {
    *result = hand_over(at::multinomial(tensor(weights), num_samples, /*replacement=*/true, generator(handle)));
  });
}
int32_t te_generator_uniform(void *handle, void *target, double from, double to) {
  return guard_no_grad([&] { tensor(target).uniform_(from, to, generator(handle)); });
}
int32_t te_generator_normal(void *handle, void *target, double mean, double std) {
  return guard_no_grad([&] { tensor(target).normal_(mean, std, generator(handle)); });
}
int32_t te_generator_random(void *handle, int64_t *value) {
  return guard_no_grad([&] {
    std::optional<at::Generator> source;
    if (handle)
      source = generator(handle);
    *value = at::empty({}, at::kLong).random_(source).item<int64_t>();
  });
}

// ---- storages ----
size_t te_storage_id(void *handle) {
  const auto &t = tensor(handle);
  return t.defined() && t.has_storage() ? reinterpret_cast<size_t>(t.storage().unsafeGetStorageImpl()) : 0;
}
size_t te_tensor_id(void *handle) {
  const auto &t = tensor(handle);
  return t.defined() ? reinterpret_cast<size_t>(t.unsafeGetTensorImpl()) : 0;
}
size_t te_storage_use_count(void *handle) {
  const auto &t = tensor(handle);
  return t.defined() && t.has_storage() ? t.storage().use_count() : 0;
}
int32_t te_storage_bytes(void *handle, size_t *bytes) {
  return guard([&] { *bytes = storage_of(tensor(handle)).nbytes(); });
}
int64_t te_storage_offset(void *handle) {
  const auto &t = tensor(handle);
  return t.defined() && t.has_storage() ? t.storage_offset() : 0;
}
int32_t te_storage_free(void *handle) {
  return guard([&] {
    auto &storage = storage_of(tensor(handle));
    check_owned(storage);
    if (is_freed(storage))
      return;
    auto freed = std::make_unique<Freed>(Freed{storage.nbytes()});
    auto device = storage.device();
    storage.set_data_ptr_noswap(at::DataPtr(nullptr, freed.release(), &drop_freed, device));
    storage.set_nbytes(size_t(0));
    storage.release_data_and_set_meta_custom_data_ptr_error_msg_(
        "the storage of this tensor was freed by free_storage; call allocate_storage before its data is used");
  });
}
int32_t te_storage_allocate(void *handle, size_t bytes) {
  return guard([&] {
    auto &storage = storage_of(tensor(handle));
    check_owned(storage);
    TORCH_CHECK_VALUE(is_freed(storage), "the storage still holds ", storage.nbytes(),
                      " bytes; call free_storage first");
    size_t wanted = static_cast<Freed *>(storage._mutable_data_ptr_no_checks().get_context())->bytes;
    TORCH_CHECK_VALUE(bytes >= wanted, bytes, " bytes are too few: the tensors over this storage address ", wanted,
                      " bytes");
    c10::OptionalDeviceGuard device(storage.device());
    auto data = storage.allocator()->allocate(bytes);
    refuses_access(storage) = false;
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(bytes);
  });
}
bool te_storage_is_allocated(void *handle) {
  const auto &t = tensor(handle);
  if (!t.defined() || !t.has_storage() || t.is_meta())
    return false;
  return !is_freed(*t.storage().unsafeGetStorageImpl());
}
void *te_storage_downgrade(void *handle) {
  const auto &t = tensor(handle);
  if (!t.defined() || !t.has_storage())
    return nullptr;
  return new c10::weak_intrusive_ptr<c10::StorageImpl>(t.storage().getWeakStorageImpl());
}
bool te_weak_storage_expired(void *weak) {
  return static_cast<c10::weak_intrusive_ptr<c10::StorageImpl> *>(weak)->expired();
}
void te_weak_storage_free(void *weak) { delete static_cast<c10::weak_intrusive_ptr<c10::StorageImpl> *>(weak); }

// Gives memory that no tensor uses back to the device. Nothing on the CPU, whose allocator keeps none.
int32_t te_empty_cache() {
  return guard([] {
    auto type = at::getAccelerator(false);
    if (!type)
      return;
    auto *allocator = dynamic_cast<c10::DeviceAllocator *>(c10::GetAllocator(*type));
    if (allocator != nullptr && allocator->initialized())
      allocator->emptyCache();
  });
}

// ---- meta tensors ----
int32_t te_meta_empty(const int64_t *shape, size_t num_dims, int32_t kind, void **result) {
  return guard([&] {
    auto options = at::TensorOptions().dtype(static_cast<at::ScalarType>(kind)).device(at::kMeta);
    *result = hand_over(at::empty(at::IntArrayRef(shape, num_dims), options));
  });
}
int32_t te_meta_like(void *handle, void **result) {
  return guard_no_grad([&] {
    const auto &t = tensor(handle);
    *result = hand_over(at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta)));
  });
}
bool te_is_meta(void *handle) { return tensor(handle).defined() && tensor(handle).is_meta(); }
}
