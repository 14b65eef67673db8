// TorchScript modules whose parameters Rust registers and trains.
#include "push.h"
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/import.h>

namespace te {
namespace {
using torch::jit::script::Module;

// The tensors of a result, from left to right.
void flatten(const c10::IValue &value, std::vector<at::Tensor> &out) {
  if (value.isTensor()) {
    out.push_back(value.toTensor());
  } else if (value.isTuple()) {
    for (const auto &element : value.toTupleRef().elements())
      flatten(element, out);
  } else if (value.isTensorList()) {
    for (const at::Tensor &element : value.toTensorVector())
      out.push_back(element);
  } else if (value.isList()) {
    for (const c10::IValue &element : value.toListRef())
      flatten(element, out);
  } else {
    TORCH_CHECK_VALUE(false, "the forward method returned a value of type ", value.type()->repr_str(),
                      "; wanted a tensor, or tuples and lists of tensors");
  }
}

// A file keeps that two parameters share memory, but not that they are one: each would get a part of the gradient. Makes
// them one again.
void tie(Module &module) {
  std::vector<at::Tensor> firsts;
  for (const auto &entry : module.named_parameters(true)) {
    auto same = [&](const at::Tensor &first) {
      return first.data_ptr() == entry.value.data_ptr() && first.numel() > 0 && first.sizes() == entry.value.sizes() &&
             first.strides() == entry.value.strides() && first.scalar_type() == entry.value.scalar_type();
    };
    auto first = std::find_if(firsts.begin(), firsts.end(), same);
    if (first == firsts.end()) {
      firsts.push_back(entry.value);
      continue;
    }
    auto owner = module;
    size_t begin = 0;
    for (size_t dot; (dot = entry.name.find('.', begin)) != std::string::npos; begin = dot + 1)
      owner = owner.attr(entry.name.substr(begin, dot - begin)).toModule();
    owner.setattr(entry.name.substr(begin), *first);
  }
}

} // namespace
} // namespace te

using namespace te;

extern "C" {
// `device_index` is -1 for the CPU.
int32_t te_script_load(const char *path, size_t length, int32_t device_index, void **out) {
  return guard([&] {
    at::Device device = device_index < 0 ? at::Device(at::kCPU)
                                         : at::Device(at::kCUDA, static_cast<at::DeviceIndex>(device_index));
    auto module = torch::jit::load(std::string(path, length), device);
    tie(module);
    *out = new Module(std::move(module));
  });
}

void te_script_free(void *module) { delete static_cast<Module *>(module); }

// Parameters, then buffers, in the order of their registration.
int32_t te_script_tensors(void *handle, PushNamed push, void *list) {
  return guard([&] {
    const auto &module = *static_cast<Module *>(handle);
    for (const auto &entry : module.named_parameters(true))
      push(list, entry.name.data(), entry.name.size(), hand_over(entry.value), false);
    for (const auto &entry : module.named_buffers(true))
      push(list, entry.name.data(), entry.name.size(), hand_over(entry.value), true);
  });
}

int32_t te_script_set_training(void *module, bool training) {
  return guard([&] { static_cast<Module *>(module)->train(training); });
}

int32_t te_script_forward(void *module, void *const *inputs, size_t count, PushTensor push, void *list) {
  return guard([&] {
    std::vector<c10::IValue> arguments;
    for (size_t i = 0; i < count; ++i)
      arguments.emplace_back(tensor(inputs[i]));
    std::vector<at::Tensor> out;
    flatten(static_cast<Module *>(module)->forward(std::move(arguments)), out);
    for (auto &result : out)
      push(list, hand_over(std::move(result)));
  });
}
} // extern "C"
