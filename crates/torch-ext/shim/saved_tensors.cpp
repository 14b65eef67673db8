// Default saved-tensor hooks without Python: the default engine is replaced by one that asks Rust what to keep.
#include "closure.h"
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>
#include <torch/csrc/autograd/variable.h>

namespace te {
namespace {
// Asks the thread's innermost hooks; a null token means that the tensor itself is kept.
using PackCall = int32_t (*)(void *tensor, void **token);
using UnpackCall = int32_t (*)(void *token, void **tensor);

PackCall pack_call = nullptr;
UnpackCall unpack_call = nullptr;
DropFn drop_call = nullptr;

// How many hooks this thread has pushed, and how many of them are busy packing right now: what these compute must
// not come back to them. The two numbers are all that is looked at for every tensor that any operation saves.
struct Height {
  size_t pushed = 0;
  size_t busy = 0;
};
thread_local Height height;

struct Busy {
  size_t previous = std::exchange(height.busy, height.pushed);
  ~Busy() { height.busy = previous; }
};

struct RustSavedTensor : torch::autograd::SavedVariableHooks {
  at::Tensor kept;
  int64_t kept_version = 0;
  Owned token;
  at::DimVector sizes;
  at::ScalarType scalar_type = at::kFloat;

  void call_pack_hook(const at::Tensor &saved) override {
    void *raw = nullptr;
    {
      Busy busy;
      if (pack_call(const_cast<at::Tensor *>(&saved), &raw) != 0)
        throw CallbackFailed();
    }
    if (raw) {
      token = Owned(raw, drop_call);
      sizes = saved.sizes();
      scalar_type = saved.scalar_type();
      return;
    }
    // Saved outputs arrive with the node that saves them as their history: keeping them whole would be a cycle.
    // The data alone still shares the version counter.
    kept = saved.tensor_data();
    kept_version = kept._version();
  }

  at::Tensor call_unpack_hook() override {
    if (!token) {
      TORCH_CHECK(kept._version() == kept_version,
                  "one of the variables needed for gradient computation has been modified by an inplace operation: [",
                  kept.toString(), " ", kept.sizes(), "] is at version ", kept._version(), "; expected version ",
                  kept_version, " instead.");
      return kept;
    }
    void *raw = nullptr;
    int32_t status = unpack_call(token.get(), &raw);
    at::Tensor unpacked = take(raw);
    if (status != 0)
      throw CallbackFailed();
    // Kernels of the backward pass trust these; a wrong tensor would be read out of bounds.
    TORCH_CHECK_VALUE(unpacked.defined() && unpacked.sizes() == sizes && unpacked.scalar_type() == scalar_type,
                      "a saved-tensor token stands for ", scalar_type, " ", at::IntArrayRef(sizes),
                      ", but unpacking it gave ",
                      unpacked.defined() ? c10::str(unpacked.scalar_type(), " ", unpacked.sizes()) : "nothing");
    return unpacked;
  }
};

// Makes the hooks, and has libtorch's own engine do all work: threads for devices belong to the first engine of a process, which may have
// done a backward pass before this one came.
struct HookedEngine : torch::autograd::Engine {
  torch::autograd::variable_list execute(const torch::autograd::edge_list &roots,
                                         const torch::autograd::variable_list &inputs, bool keep_graph,
                                         bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list &outputs) override {
    return get_base_engine().execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }

  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<torch::autograd::GraphTask> &graph_task, std::shared_ptr<torch::autograd::Node> graph_root,
      torch::autograd::InputBuffer &&input_buffer) override {
    return get_base_engine().execute_with_graph_task(graph_task, std::move(graph_root), std::move(input_buffer));
  }

  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    if (height.pushed <= height.busy)
      return nullptr;
    return std::make_unique<RustSavedTensor>();
  }
};

torch::autograd::Engine &hooked_engine() {
  // Never destroyed: threads may ask it for hooks later than statics go.
  static auto *engine = new HookedEngine();
  return *engine;
}
} // namespace
} // namespace te

using namespace te;

extern "C" {
// Called once, before the first push.
int32_t te_saved_tensors_install(PackCall pack, UnpackCall unpack, DropFn drop) {
  return guard([&] {
    pack_call = pack;
    unpack_call = unpack;
    drop_call = drop;
    torch::autograd::set_default_engine_stub(&hooked_engine);
  });
}

void te_saved_tensors_set_pushed(size_t pushed) { height.pushed = pushed; }
}
