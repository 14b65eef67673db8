// c10d::Reducer: the bucketed gradient reduction of DistributedDataParallel, overlapped with backward.
#include "common.h"
#include "handles.h"
#include <torch/csrc/distributed/c10d/default_comm_hooks.hpp>
#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

using namespace te;

namespace {
// In the first backward pass of a static graph the reducer does not record the order of gradients, so it is told.
class OrderedReducer : public c10d::Reducer {
 public:
  using c10d::Reducer::Reducer;
  using c10d::Reducer::push_rebuilt_params;

  // The first backward pass of a static graph that reduces says how many gradients of each parameter the later ones wait for. The
  // base class also counts those of micro-batches before it, which do not reduce: it would wait for more than come, and never
  // reduce again (libtorch 2.11.0; pull request 187732 of PyTorch).
  void begin_counting() {
    if (is_counting)
      numGradHooksTriggeredMap_.clear();
  }

  bool is_counting = false;

  // Parameters that have been used since the last reduction, as the base class notes by its hooks.
  void mark_used(const size_t *positions, size_t count) {
    std::lock_guard<std::mutex> guard(mutex_);
    for (size_t i = 0; local_used_map_.defined() && i < count; ++i)
      local_used_map_[static_cast<int64_t>(positions[i])] = 1;
  }
};

// The reducer notes in its logger, without asking whether it has one, that the parameters without gradients have changed.
struct LoggedReducer {
  std::shared_ptr<OrderedReducer> reducer;
  std::shared_ptr<c10d::Logger> logger;
};
OrderedReducer &reducer(void *handle) { return *static_cast<LoggedReducer *>(handle)->reducer; }

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

// Copies what a bucket's future holds into `full`, and hands `full` on.
FuturePtr copied_into(at::Tensor full, const FuturePtr &future) {
  return future->then(
      [full](c10::ivalue::Future &done) {
        if (done.hasError())
          std::rethrow_exception(done.exception_ptr());
        full.copy_(c10d::detail::parseCppCommHookResult(done.value()));
        return c10::IValue(full);
      },
      c10::TensorType::get());
}

// The mean over ranks, while the backward pass goes on. The division comes first, so that a sum of large
// half-precision gradients does not overflow. With `wire`, the bucket travels in that dtype.
class MeanHook : public c10d::CommHookInterface {
 public:
  MeanHook(GroupPtr group, std::optional<at::ScalarType> wire) : group_(std::move(group)), wire_(wire) {}

  FuturePtr runHook(c10d::GradBucket &bucket) final {
    if (!wire_)
      return reduce(bucket);
    at::Tensor full = bucket.getBuffer();
    at::Tensor narrow = full.to(*wire_);
    bucket.setBuffer(narrow);
    return copied_into(full, reduce(bucket));
  }

  at::Tensor parseHookResult(const c10::IValue &result) final { return c10d::detail::parseCppCommHookResult(result); }

 protected:
  virtual FuturePtr reduce(c10d::GradBucket &bucket) {
    std::vector<at::Tensor> buffer{bucket.getBufferRef().div_(group_->getSize())};
    return group_->allreduce(buffer)->getFuture();
  }

 private:
  GroupPtr group_;
  std::optional<at::ScalarType> wire_;
};

// A hook written in Rust. It runs on the thread of the backward pass.
struct RustHookTable {
  void *context;
  // Returns 0 and a fresh tensor, or 0 and null for the plain mean, or -1.
  int32_t (*call)(void *context, void *buffer, void *const *gradients, size_t count, size_t index, bool is_last, void **result);
  void (*drop)(void *context);
};

class RustHook : public MeanHook {
 public:
  RustHook(GroupPtr group, std::optional<at::ScalarType> wire, RustHookTable table)
      : MeanHook(std::move(group), wire), table_(table) {}
  ~RustHook() override { table_.drop(table_.context); }

 protected:
  FuturePtr reduce(c10d::GradBucket &bucket) override {
    at::Tensor buffer = bucket.getBuffer();
    std::vector<at::Tensor> gradients = bucket.getGradients();
    std::vector<void *> handles;
    for (at::Tensor &gradient : gradients)
      handles.push_back(&gradient);
    void *result = nullptr;
    if (table_.call(table_.context, &buffer, handles.data(), handles.size(), bucket.getIndex(), bucket.isLast(), &result) != 0)
      throw CallbackFailed();
    if (result == nullptr)
      return MeanHook::reduce(bucket);
    std::unique_ptr<at::Tensor> owned(static_cast<at::Tensor *>(result));
    // A future that knows its device makes the reducer's stream wait for the kernels that still write the result.
    std::vector<c10::Device> devices;
    if (owned->is_cuda())
      devices.push_back(owned->device());
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get(), devices);
    future->markCompleted(c10::IValue(*owned));
    return future;
  }

 private:
  RustHookTable table_;
};

std::optional<at::ScalarType> wire_type(int32_t scalar_type) {
  return scalar_type < 0 ? std::nullopt : std::optional(static_cast<at::ScalarType>(scalar_type));
}
} // namespace

extern "C" {
// Buckets as torch assigns them: `limits` in bytes, the first for the first bucket. `assignment[i]` is the bucket of parameter i.
int32_t te_bucket_assignment(void *const *params, size_t count, const size_t *limits, size_t num_limits, size_t *assignment,
                             size_t *num_buckets) {
  return guard([&] {
    std::vector<size_t> caps(limits, limits + num_limits);
    auto [buckets, sizes] = c10d::compute_bucket_assignment_by_size(tensors(params, count), caps);
    for (size_t bucket = 0; bucket < buckets.size(); ++bucket)
      for (size_t index : buckets[bucket])
        assignment[index] = bucket;
    *num_buckets = buckets.size();
  });
}

int32_t te_reducer_new(void *const *params, size_t count, const char *const *names, const size_t *name_lengths, void *group_handle,
                       int64_t first_bucket_bytes, int64_t bucket_bytes, bool find_unused_parameters, bool gradient_as_bucket_view,
                       bool static_graph, const size_t *order, size_t order_count, void **out) {
  return guard([&] {
    auto values = tensors(params, count);
    // While the order in which gradients arrive is unknown, everything waits in one bucket; the
    // first backward pass teaches the order and the buckets are rebuilt to the caps.
    std::vector<size_t> caps;
    if (static_graph || !find_unused_parameters)
      caps = {std::numeric_limits<int64_t>::max()};
    else
      caps = {static_cast<size_t>(first_bucket_bytes), static_cast<size_t>(bucket_bytes)};
    std::vector<std::vector<size_t>> buckets;
    if (order_count == 0) {
      buckets = std::get<0>(c10d::compute_bucket_assignment_by_size(values, caps));
      std::reverse(buckets.begin(), buckets.end());
    } else {
      // As the reducer itself rebuilds them, once it knows the order.
      std::vector<at::Tensor> ordered;
      std::vector<int64_t> indices;
      for (size_t i = 0; i < order_count; ++i) {
        ordered.push_back(values.at(order[i]));
        indices.push_back(static_cast<int64_t>(order[i]));
      }
      caps = {static_cast<size_t>(first_bucket_bytes), static_cast<size_t>(bucket_bytes)};
      buckets = std::get<0>(c10d::compute_bucket_assignment_by_size(ordered, caps, std::vector<bool>(order_count, false), indices));
    }
    std::unordered_map<size_t, std::string> param_names;
    for (size_t i = 0; i < count; ++i)
      param_names.emplace(i, std::string(names[i], name_lengths[i]));
    auto reducer = std::make_shared<OrderedReducer>(values, std::move(buckets), group(group_handle), std::vector<bool>(count, false),
                                                   bucket_bytes, find_unused_parameters, gradient_as_bucket_view, std::move(param_names),
                                                   first_bucket_bytes, /*skip_all_reduce_unused_params=*/false,
                                                   /*use_python_reducer=*/false, std::vector<int64_t>{});
    if (static_graph)
      reducer->set_static_graph();
    reducer->is_counting = static_graph;
    auto logger = std::make_shared<c10d::Logger>(reducer);
    reducer->set_logger(logger);
    *out = new LoggedReducer{std::move(reducer), std::move(logger)};
  });
}

void te_reducer_free(void *handle) {
  guard([&] {
    auto *owner = static_cast<LoggedReducer *>(handle);
    // Autograd keeps the hooks alive with the parameters; without this they would point into freed memory.
    owner->reducer->remove_autograd_hooks();
    delete owner;
  });
}

int32_t te_reducer_prepare_for_forward(void *handle) {
  return guard([&] { reducer(handle).prepare_for_forward(); });
}

int32_t te_reducer_rebuild_buckets(void *handle, bool *out) {
  return guard([&] { *out = reducer(handle).rebuild_buckets(); });
}

int32_t te_reducer_prepare_for_backward(void *handle, void *const *outputs, size_t count) {
  return guard([&] {
    reducer(handle).begin_counting();
    reducer(handle).prepare_for_backward(tensors(outputs, count));
  });
}

int32_t te_reducer_mark_used(void *handle, const size_t *positions, size_t count) {
  return guard([&] { reducer(handle).mark_used(positions, count); });
}

int32_t te_reducer_check_finalized(void *handle) {
  return guard([&] { reducer(handle).check_finalized(); });
}

int32_t te_reducer_delay_all_reduce(void *handle, const size_t *order, size_t order_count) {
  return guard([&] {
    OrderedReducer &self = reducer(handle);
    self.delay_all_reduce();
    for (size_t i = 0; self.should_rebuild_buckets() && i < order_count; ++i)
      self.push_rebuilt_params(order[i]);
    self.is_counting = false;
  });
}

// What a rank without data does while the others run a backward pass: the same reductions in the same order
// (`_DDPJoinHook.main_hook` of torch). With `contribution` 0 it adds zeros; otherwise its own gradients, multiplied by it.
// Afterwards its gradients are the reduced ones, with `keep`, or else gone if it contributed them.
int32_t te_reducer_shadow_backward(void *handle, void *group_handle, void *const *params, size_t count, bool find_unused_parameters,
                                   double contribution, bool keep) {
  return guard([&] {
    at::NoGradGuard no_grad;
    c10d::Reducer &self = reducer(handle);
    std::vector<c10d::GradBucket> buckets = self.get_grad_buckets(/*return_zero_tensors=*/true);
    std::vector<FuturePtr> pending;
    for (c10d::GradBucket &bucket : buckets) {
      std::vector<at::Tensor> gradients = bucket.getGradients();
      std::vector<at::Tensor> owners = bucket.getParameters();
      for (size_t i = 0; contribution != 0 && i < owners.size(); ++i)
        if (owners[i].grad().defined())
          gradients[i].copy_(owners[i].grad()).mul_(contribution);
      pending.push_back(self.run_comm_hook(bucket));
    }
    if (find_unused_parameters) {
      at::Tensor used = at::zeros_like(self.get_local_used_map_on_device());
      for (size_t i = 0; contribution != 0 && i < count; ++i)
        if (tensor(params[i]).grad().defined())
          used[static_cast<int64_t>(i)] = 1;
      std::vector<at::Tensor> maps{used};
      group(group_handle)->allreduce(maps)->wait();
    }
    for (size_t at = 0; at < pending.size(); ++at) {
      pending[at]->waitAndThrow();
      if (!keep)
        continue;
      at::Tensor reduced = c10d::detail::parseCppCommHookResult(pending[at]->value());
      int64_t start = 0;
      for (const at::Tensor &owner : buckets[at].getParameters()) {
        at::Tensor gradient = at::empty_like(owner);
        gradient.copy_(reduced.narrow(0, start, owner.numel()).view(owner.sizes()));
        at::Tensor(owner).mutable_grad() = gradient;
        start += owner.numel();
      }
    }
    for (size_t i = 0; !keep && contribution != 0 && i < count; ++i)
      tensor(params[i]).mutable_grad().reset();
    self.push_rebuilt_params_for_all_indices();
  });
}

// The positions of the parameters in the order in which they lie in the buckets.
int32_t te_reducer_order(void *handle, void *const *params, size_t count, size_t *order) {
  return guard([&] {
    std::unordered_map<const void *, size_t> positions;
    for (size_t i = 0; i < count; ++i)
      positions.emplace(tensor(params[i]).unsafeGetTensorImpl(), i);
    size_t at = 0;
    for (const c10d::GradBucket &bucket : reducer(handle).get_grad_buckets(/*return_zero_tensors=*/false))
      for (const at::Tensor &owner : bucket.getParameters())
        if (at < count)
          order[at++] = positions.at(owner.unsafeGetTensorImpl());
    TORCH_CHECK(at == count, "the buckets hold ", at, " of ", count, " parameters");
  });
}

int32_t te_reducer_num_buckets(void *handle, size_t *out) {
  return guard([&] { *out = reducer(handle).get_grad_buckets(true).size(); });
}

// `scalar_type` is the dtype on the wire, or -1 for the gradients' own.
int32_t te_reducer_compress(void *handle, void *group_handle, int32_t scalar_type) {
  return guard([&] {
    reducer(handle).register_comm_hook(std::make_unique<MeanHook>(group(group_handle), wire_type(scalar_type)));
  });
}

int32_t te_reducer_register_hook(void *handle, void *group_handle, int32_t scalar_type, RustHookTable table) {
  return guard([&] {
    // Owns the table from the first line on, so that a failure below drops the closure.
    auto hook = std::make_unique<RustHook>(group(group_handle), wire_type(scalar_type), table);
    reducer(handle).register_comm_hook(std::move(hook));
  });
}
}
