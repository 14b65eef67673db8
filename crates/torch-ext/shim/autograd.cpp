// Backward passes, gradient hooks and custom Functions whose closures live in Rust.
#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include "closure.h"
#include <mutex>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

namespace te {
namespace {
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// As `tensors`, with null handles for undefined tensors.
variable_list optional_tensors(void *const *handles, size_t count) {
  variable_list out(count);
  for (size_t i = 0; i < count; ++i)
    if (handles[i])
      out[i] = tensor(handles[i]);
  return out;
}

// What a hook's call returns beside 0 (ran) and -1 (failed).
constexpr int32_t kRemoved = 1;

using PostAccumulateCall = int32_t (*)(void *data, void *tensor);

// A tensor has one slot for post-accumulate-grad hooks; this list fills it and keeps whatever was there first.
class PostAccumulateHooks : public torch::autograd::PostAccumulateGradHook {
public:
  explicit PostAccumulateHooks(std::unique_ptr<torch::autograd::PostAccumulateGradHook> previous)
      : previous_(std::move(previous)) {}

  void add(Owned data, PostAccumulateCall call) {
    auto hook = std::make_shared<Hook>(Hook{std::move(data), call});
    std::lock_guard<std::mutex> lock(mutex_);
    hooks_.push_back(std::move(hook));
  }

  void operator()(const Variable &variable) override {
    if (previous_)
      (*previous_)(variable);
    // The calls run without the lock, so that a hook may register or remove hooks.
    std::vector<std::shared_ptr<Hook>> hooks;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      hooks = hooks_;
    }
    for (const auto &hook : hooks) {
      int32_t status = hook->call(hook->data.get(), const_cast<Variable *>(&variable));
      if (status == kRemoved)
        remove(hook);
      else if (status != 0)
        throw CallbackFailed();
    }
  }

private:
  struct Hook {
    Owned data;
    PostAccumulateCall call;
  };

  void remove(const std::shared_ptr<Hook> &hook) {
    std::lock_guard<std::mutex> lock(mutex_);
    hooks_.erase(std::remove(hooks_.begin(), hooks_.end(), hook), hooks_.end());
  }

  std::unique_ptr<torch::autograd::PostAccumulateGradHook> previous_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<Hook>> hooks_;
};

using BackwardCall = int32_t (*)(void *data, void *node, void *const *gradients, size_t num_gradients, void **results,
                                 size_t num_results);

// One graph node for a whole Rust function; its N inputs are the gradients of the function's N outputs.
struct RustFunction : Node {
  std::string name_;
  Owned backward_;
  BackwardCall call_ = nullptr;
  std::vector<SavedVariable> saved_;

  std::string name() const override { return name_; }

  variable_list apply(variable_list &&gradients) override {
    // The closure may change what it captured, so two threads must not run it at once.
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(backward_, "Trying to go backward through `", name_,
                "` a second time, but its backward closure and saved tensors are already freed. Pass "
                "retain_graph = true to the first backward pass.");
    std::vector<void *> in(gradients.size(), nullptr);
    // Handed over, so that the closure can free each gradient as soon as it is used.
    for (size_t i = 0; i < gradients.size(); ++i)
      if (gradients[i].defined())
        in[i] = hand_over(std::move(gradients[i]));
    std::vector<void *> out(num_outputs(), nullptr);
    int32_t status = call_(backward_.get(), this, in.data(), in.size(), out.data(), out.size());
    variable_list results;
    results.reserve(out.size());
    for (void *handle : out)
      results.push_back(take(handle));
    if (status != 0)
      throw CallbackFailed();
    return results;
  }

  void release_variables() override {
    Owned dropped;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      saved_.clear();
      dropped = std::move(backward_);
    }
    // Dropped outside the lock: the closure's captures may own graphs of their own.
  }
};

// Two names of one tensor. It saves nothing, so any number of passes may run it.
class TwoUses : public Node {
public:
  variable_list apply(variable_list &&gradients) override {
    auto &first = gradients[0], &second = gradients[1];
    if (!second.defined())
      return {std::move(first)};
    if (!first.defined())
      return {second.layout() == at::kStrided ? second : second.to_dense()};
    // As the engine decides it for gradients that meet, but for sparse ones, which it never adds in place.
    bool alone = first.layout() == at::kStrided && first.use_count() == 1 && first.storage().use_count() == 1;
    if (at::GradMode::is_enabled() || !alone)
      return {first.add(second)};
    first.add_(second);
    return {std::move(first)};
  }

  std::string name() const override { return "TwoUses"; }
};

// A function between the collection of its edges and the wrapping of its outputs.
struct PendingFunction {
  std::shared_ptr<RustFunction> node; // null when nothing has to be differentiated
  variable_list inputs;
};

} // namespace
} // namespace te

using namespace te;

extern "C" {
int32_t te_backward(void *const *outputs, size_t num_outputs, void *const *gradients, void *const *inputs,
                    size_t num_inputs, bool retain_graph, bool create_graph) {
  return guard([&] {
    variable_list grads;
    if (gradients)
      grads = optional_tensors(gradients, num_outputs);
    torch::autograd::backward(tensors(outputs, num_outputs), grads, retain_graph, create_graph,
                              tensors(inputs, num_inputs));
  });
}

int32_t te_grad(void *const *outputs, size_t num_outputs, void *const *gradients, void *const *inputs,
                size_t num_inputs, bool retain_graph, bool create_graph, bool allow_unused, void **results) {
  return guard([&] {
    variable_list grads;
    if (gradients)
      grads = optional_tensors(gradients, num_outputs);
    auto out = torch::autograd::grad(tensors(outputs, num_outputs), tensors(inputs, num_inputs), grads, retain_graph,
                                     create_graph, allow_unused);
    for (size_t i = 0; i < out.size(); ++i)
      results[i] = hand_over_if_defined(out[i]);
  });
}

int32_t te_gradient_of(void *handle, void **result) {
  return guard([&] {
    const auto &t = tensor(handle);
    // Reading through the meta data spares the warning that `.grad()` of a non-leaf prints.
    *result = t.defined() && torch::autograd::impl::get_autograd_meta(t) ? hand_over_if_defined(t.unsafeGetTensorImpl()->grad())
                                                                         : nullptr;
  });
}

int32_t te_set_gradient(void *handle, void *gradient) {
  return guard([&] {
    auto &t = tensor(handle);
    if (!gradient) {
      if (torch::autograd::impl::get_autograd_meta(t))
        t.mutable_grad().reset();
      return;
    }
    const auto &g = tensor(gradient);
    TORCH_CHECK_VALUE(t.unsafeGetTensorImpl() != g.unsafeGetTensorImpl(), "a tensor cannot be its own gradient");
    TORCH_CHECK_VALUE(g.device() == t.device(), "the gradient is on ", g.device(), ", the tensor on ", t.device());
    TORCH_CHECK_VALUE(g.scalar_type() == t.scalar_type(), "the gradient is ", g.scalar_type(), ", the tensor ",
                      t.scalar_type());
    TORCH_CHECK_VALUE(g.sizes() == t.sizes(), "the gradient has shape ", g.sizes(), ", the tensor ", t.sizes());
    t.mutable_grad() = g;
  });
}

bool te_is_leaf(void *handle) { return tensor(handle).defined() && tensor(handle).is_leaf(); }

int32_t te_set_requires_grad(void *handle, bool requires_grad) {
  return guard([&] { tensor(handle).requires_grad_(requires_grad); });
}

int32_t te_version(void *handle, int64_t *version) {
  return guard([&] { *version = tensor(handle)._version(); });
}

// Takes `data` in every case.
int32_t te_register_post_accumulate_grad_hook(void *handle, void *data, PostAccumulateCall call, DropFn drop) {
  Owned owned(data, drop);
  return guard([&] {
    const auto &t = tensor(handle);
    TORCH_CHECK_VALUE(t.defined() && t.requires_grad(), "the tensor does not require a gradient");
    TORCH_CHECK_VALUE(t.is_leaf(), "the tensor is not a leaf of the graph, so no gradient is accumulated into it");
    auto &slot = torch::autograd::impl::post_acc_grad_hooks(t);
    auto *list = dynamic_cast<PostAccumulateHooks *>(slot.get());
    if (!list) {
      auto fresh = std::make_unique<PostAccumulateHooks>(std::move(slot));
      list = fresh.get();
      torch::autograd::impl::set_post_acc_grad_hooks(t, std::move(fresh));
    }
    list->add(std::move(owned), call);
  });
}

// Takes `data` in every case.
int32_t te_register_hook(void *handle, void *data, int32_t (*call)(void *data, void *gradient, void **replacement),
                         DropFn drop) {
  // std::function wants to be copyable.
  auto owned = std::make_shared<Owned>(data, drop);
  return guard([&] {
    const auto &t = tensor(handle);
    TORCH_CHECK_VALUE(t.defined() && t.requires_grad(), "the tensor does not require a gradient");
    t.register_hook([owned, call](at::Tensor gradient) -> at::Tensor {
      void *replacement = nullptr;
      int32_t status = call(owned->get(), &gradient, &replacement);
      at::Tensor result = take(replacement);
      if (status < 0)
        throw CallbackFailed();
      return result;
    });
  });
}

// Takes `data` in every case.
int32_t te_queue_callback(void *data, int32_t (*call)(void *data), DropFn drop) {
  // std::function wants to be copyable.
  auto owned = std::make_shared<Owned>(data, drop);
  return guard([&] {
    torch::autograd::Engine::get_default_engine().queue_callback([owned, call] {
      if (call(owned->get()) != 0)
        throw CallbackFailed();
    });
  });
}

// Returns what was set before.
bool te_warn_on_stream_mismatch(bool enabled) {
  bool previous = at::globalContext().warnOnAccumulateGradStreamMismatch();
  at::globalContext().setWarnOnAccumulateGradStreamMismatch(enabled);
  return previous;
}

int32_t te_function_begin(const char *name, size_t name_length, void *const *inputs, size_t num_inputs, void **pending) {
  return guard([&] {
    auto out = std::make_unique<PendingFunction>();
    out->inputs = tensors(inputs, num_inputs);
    if (at::GradMode::is_enabled() && torch::autograd::any_variable_requires_grad(out->inputs)) {
      out->node = std::shared_ptr<RustFunction>(new RustFunction(), torch::autograd::deleteNode);
      out->node->name_.assign(name, name_length);
      out->node->set_next_edges(torch::autograd::collect_next_edges(out->inputs));
    }
    *pending = out.release();
  });
}

bool te_function_is_differentiated(void *pending) { return static_cast<PendingFunction *>(pending)->node != nullptr; }

void te_function_free(void *pending) { delete static_cast<PendingFunction *>(pending); }

// Takes `data` in every case. `results` has room for `num_outputs` handles.
int32_t te_function_finish(void *pending_handle, void *const *outputs, size_t num_outputs,
                           void *const *non_differentiable, size_t num_non_differentiable, void *const *to_save,
                           size_t num_to_save, void *data, BackwardCall call, DropFn drop, void **results) {
  Owned owned(data, drop);
  return guard([&] {
    auto &pending = *static_cast<PendingFunction *>(pending_handle);
    auto raw = tensors(outputs, num_outputs);
    std::vector<std::optional<Variable>> optional_outputs(raw.begin(), raw.end());
    std::unordered_set<at::TensorImpl *> marked;
    for (size_t i = 0; i < num_non_differentiable; ++i)
      marked.insert(tensor(non_differentiable[i]).unsafeGetTensorImpl());
    auto forward_mode = [&](const variable_list &, const variable_list &) -> variable_list {
      TORCH_CHECK(false, "custom function has no forward-mode derivative");
    };
    auto view_as_self = [](const at::Tensor &x) { return x.view_as(x); };
    auto wrapped = torch::autograd::_wrap_outputs(pending.inputs, marked, {}, optional_outputs,
                                                  pending.node, forward_mode, {}, view_as_self, /*pure_view=*/false);
    if (pending.node) {
      auto &node = *pending.node;
      node.backward_ = std::move(owned);
      node.call_ = call;
      for (auto &variable : tensors(to_save, num_to_save)) {
        bool is_output = torch::autograd::impl::grad_fn_unsafe(variable) == &node;
        node.saved_.emplace_back(variable, is_output);
      }
    }
    for (size_t i = 0; i < num_outputs; ++i)
      results[i] = hand_over(*wrapped[i]);
  });
}

// `results` has room for two handles.
int32_t te_two_uses(void *handle, void **results) {
  return guard([&] {
    const auto &whole = tensor(handle);
    std::shared_ptr<Node> node(new TwoUses(), torch::autograd::deleteNode);
    node->set_next_edges(torch::autograd::collect_next_edges(whole));
    for (size_t i = 0; i < 2; ++i) {
      auto use = whole.detach();
      torch::autograd::create_gradient_edge(use, node);
      results[i] = hand_over(std::move(use));
    }
  });
}

// Only valid inside the backward call that was given `node`.
size_t te_function_num_saved(void *node) { return static_cast<RustFunction *>(node)->saved_.size(); }

int32_t te_function_saved(void *node_handle, void **results) {
  return guard([&] {
    auto &node = *static_cast<RustFunction *>(node_handle);
    variable_list unpacked;
    for (const auto &saved : node.saved_)
      unpacked.push_back(saved.unpack(node.getptr()));
    for (size_t i = 0; i < unpacked.size(); ++i)
      results[i] = hand_over(std::move(unpacked[i]));
  });
}

bool te_function_needs_input_grad(void *node, size_t index) {
  auto &function = *static_cast<RustFunction *>(node);
  return index < function.num_outputs() && function.task_should_compute_output(index);
}

// Within a backward pass.
bool te_function_keeps_graph() { return torch::autograd::get_current_graph_task_keep_graph(); }

bool te_is_grad_enabled() { return at::GradMode::is_enabled(); }
}
