// Packages of AOTInductor: models that were compiled to machine code ahead of time.
#include "push.h"
#include <ATen/DynamicLibrary.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

namespace te {
namespace {
using torch::inductor::AOTIModelContainerRunner;
using torch::inductor::AOTIModelPackageLoader;

// The compiled code reads as many inputs as it was exported with, whatever it is given, and its runner does not tell how
// many that is. The library that the runner keeps does.
struct Runner : AOTIModelContainerRunner {
  static size_t num_inputs(AOTIModelContainerRunner &runner) {
    auto &library = runner.*(&Runner::model_so_);
    auto count = reinterpret_cast<decltype(&AOTInductorModelContainerGetNumInputs)>(
        library->sym("AOTInductorModelContainerGetNumInputs"));
    size_t result = 0;
    TORCH_CHECK(count(runner.*(&Runner::container_handle_), &result) == AOTI_RUNTIME_SUCCESS,
                "the package does not tell the number of its inputs");
    return result;
  }
};

} // namespace
} // namespace te

using namespace te;

extern "C" {
// `device_index` is -1 for the CPU.
int32_t te_aoti_load(const char *path, size_t length, const char *program, size_t program_length, int32_t device_index,
                     void **out) {
  return guard([&] {
    *out = new AOTIModelPackageLoader(std::string(path, length), std::string(program, program_length), false, 1,
                                      static_cast<c10::DeviceIndex>(device_index));
  });
}

void te_aoti_free(void *model) { delete static_cast<AOTIModelPackageLoader *>(model); }

int32_t te_aoti_num_inputs(void *model, size_t *count) {
  return guard([&] { *count = Runner::num_inputs(*static_cast<AOTIModelPackageLoader *>(model)->get_runner()); });
}

// Read without loading the machine code.
int32_t te_aoti_metadata(const char *path, size_t length, const char *program, size_t program_length, PushText push,
                         void *list) {
  return guard([&] {
    for (const auto &[key, value] :
         AOTIModelPackageLoader::load_metadata_from_package(std::string(path, length),
                                                            std::string(program, program_length)))
      push(list, key.data(), key.size(), value.data(), value.size());
  });
}

int32_t te_aoti_run(void *model, void *const *inputs, size_t count, PushTensor push, void *list) {
  return guard([&] {
    for (auto &result : static_cast<AOTIModelPackageLoader *>(model)->run(tensors(inputs, count)))
      push(list, hand_over(std::move(result)));
  });
}
} // extern "C"
