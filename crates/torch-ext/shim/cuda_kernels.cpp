// Kernels of our own for CUDA devices: their compiler, and the driver that launches them.
//
// The compiler (NVRTC) and the driver come with libtorch, which loads both through its library `libcaffe2_nvrtc`.
#include "cuda_kernels.h"
#include <ATen/cuda/CUDAContext.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAFunctions.h>
#include <cuda.h>
#include <dlfcn.h>
#include <map>
#include <mutex>

using namespace te;

namespace {
// Their header is in a package of its own, for these few lines.
struct NvrtcProgram;
using NvrtcStatus = int;

template <typename F> F *function(void *library, const char *name) {
  void *found = dlsym(library, name);
  TORCH_CHECK(found, "libcaffe2_nvrtc has no ", name);
  return reinterpret_cast<F *>(found);
}

std::string folder_of(const void *address) {
  Dl_info info{};
  TORCH_CHECK(dladdr(address, &info) != 0 && info.dli_fname, "the folder of libtorch is not known");
  const std::string path = info.dli_fname;
  const auto slash = path.rfind('/');
  return slash == std::string::npos ? std::string() : path.substr(0, slash + 1);
}

struct Api {
  void *library;
  decltype(&cuModuleLoadData) load_module;
  decltype(&cuModuleGetFunction) get_function;
  decltype(&cuLaunchKernel) launch;
  decltype(&cuGetErrorString) error_string;
  decltype(&cuThreadExchangeStreamCaptureMode) exchange_capture_mode;

  static const Api &get() {
    static const Api api;
    return api;
  }

  void check(CUresult status, const char *what) const {
    if (status == CUDA_SUCCESS)
      return;
    const char *text = nullptr;
    error_string(status, &text);
    TORCH_CHECK(false, what, ": ", text ? text : "an unknown error", " (", static_cast<int>(status), ")");
  }

private:
  Api() {
    const std::string folder = folder_of(reinterpret_cast<const void *>(&c10::cuda::device_count));
    library = dlopen((folder + "libcaffe2_nvrtc.so").c_str(), RTLD_LAZY | RTLD_LOCAL);
    if (!library)
      library = dlopen("libcaffe2_nvrtc.so", RTLD_LAZY | RTLD_LOCAL);
    TORCH_CHECK(library, dlerror());
    load_module = function<decltype(cuModuleLoadData)>(library, "cuModuleLoadData");
    get_function = function<decltype(cuModuleGetFunction)>(library, "cuModuleGetFunction");
    launch = function<decltype(cuLaunchKernel)>(library, "cuLaunchKernel");
    error_string = function<decltype(cuGetErrorString)>(library, "cuGetErrorString");
    exchange_capture_mode =
        function<decltype(cuThreadExchangeStreamCaptureMode)>(library, "cuThreadExchangeStreamCaptureMode");
  }
};

// Machine code for one architecture.
std::vector<char> compiled(const std::string &source, const std::string &architecture) {
  void *library = Api::get().library;
  auto *create = function<NvrtcStatus(NvrtcProgram **, const char *, const char *, int, const char *const *, const char *const *)>(
      library, "nvrtcCreateProgram");
  auto *compile = function<NvrtcStatus(NvrtcProgram *, int, const char *const *)>(library, "nvrtcCompileProgram");
  auto *destroy = function<NvrtcStatus(NvrtcProgram **)>(library, "nvrtcDestroyProgram");
  auto *log_size = function<NvrtcStatus(NvrtcProgram *, size_t *)>(library, "nvrtcGetProgramLogSize");
  auto *log = function<NvrtcStatus(NvrtcProgram *, char *)>(library, "nvrtcGetProgramLog");
  auto *code_size = function<NvrtcStatus(NvrtcProgram *, size_t *)>(library, "nvrtcGetCUBINSize");
  auto *code = function<NvrtcStatus(NvrtcProgram *, char *)>(library, "nvrtcGetCUBIN");
  auto *version = function<NvrtcStatus(int *, int *)>(library, "nvrtcVersion");

  // The compiler looks for its second half by name, and need not find it beside itself unless it is there already.
  int major = 0, minor = 0;
  version(&major, &minor);
  const std::string builtins = "libnvrtc-builtins.so." + std::to_string(major) + "." + std::to_string(minor);
  dlopen((folder_of(reinterpret_cast<const void *>(create)) + builtins).c_str(), RTLD_LAZY | RTLD_LOCAL);

  NvrtcProgram *raw = nullptr;
  TORCH_CHECK(create(&raw, source.c_str(), "kernels.cu", 0, nullptr, nullptr) == 0, "NVRTC takes no program");
  struct Owner {
    NvrtcProgram *program;
    decltype(destroy) drop;
    ~Owner() { drop(&program); }
  } program{raw, destroy};
  const std::string target = "--gpu-architecture=" + architecture;
  const char *options[] = {target.c_str(), "--fmad=false", "--std=c++17"};
  if (compile(program.program, 3, options) != 0) {
    size_t size = 0;
    log_size(program.program, &size);
    std::string text(size, '\0');
    log(program.program, text.data());
    TORCH_CHECK(false, "NVRTC cannot compile the kernels for ", architecture, ": ", text.c_str());
  }
  size_t size = 0;
  TORCH_CHECK(code_size(program.program, &size) == 0 && size > 0, "NVRTC made no code for ", architecture);
  std::vector<char> result(size);
  TORCH_CHECK(code(program.program, result.data()) == 0, "NVRTC gives no code for ", architecture);
  return result;
}

// The kernels of one device, or why there are none.
struct Kernels {
  std::vector<char> code;
  CUmodule module = nullptr;
  std::string failure;
  std::map<std::string, CUfunction> functions;
};

std::mutex mutex;
std::map<int, Kernels> kernels_by_device;

// The device's context is the current one of this thread, also where nobody has used the device on it yet.
void make_current(int device) {
  TORCH_CHECK(c10::cuda::SetDevice(static_cast<c10::DeviceIndex>(device), /*force=*/true) == cudaSuccess,
              "CUDA device ", device, " cannot be used");
}

// A stream of another thread, or of this one, may be recording a graph meanwhile, which loading does not belong to.
struct Unrecorded {
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  Unrecorded() { Api::get().exchange_capture_mode(&mode); }
  ~Unrecorded() { Api::get().exchange_capture_mode(&mode); }
};

void load(Kernels &kernels, const std::string &source, int device) {
  if (kernels.code.empty()) {
    const auto *properties = at::cuda::getDeviceProperties(static_cast<c10::DeviceIndex>(device));
    const std::string architecture = "sm_" + std::to_string(properties->major) + std::to_string(properties->minor);
    // That it cannot be compiled stays so; that it cannot be loaded, for lack of memory, need not.
    try {
      kernels.code = compiled(source, architecture);
    } catch (const c10::Error &e) {
      kernels.failure = e.what_without_backtrace();
      throw;
    } catch (const std::exception &e) {
      kernels.failure = e.what();
      throw;
    }
  }
  c10::DeviceGuard guard(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device)));
  make_current(device);
  const Unrecorded unrecorded;
  const Api &api = Api::get();
  api.check(api.load_module(&kernels.module, kernels.code.data()), "the kernels cannot be loaded");
}
} // namespace

namespace te {
void launch(const at::Tensor &on, const std::string &name, Launch size, void **arguments) {
  if (size.blocks == 0 || size.blocks_down == 0)
    return;
  c10::DeviceGuard guard(on.device());
  make_current(on.get_device());
  const Api &api = Api::get();
  CUfunction function = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = kernels_by_device.find(on.get_device());
    TORCH_CHECK(found != kernels_by_device.end() && found->second.module, "the kernels of this device are not loaded");
    CUfunction &known = found->second.functions[name];
    if (!known)
      api.check(api.get_function(&known, found->second.module, name.c_str()), name.c_str());
    function = known;
  }
  CUstream stream = at::cuda::getCurrentCUDAStream(on.get_device()).stream();
  api.check(api.launch(function, size.blocks, size.blocks_down, 1, size.threads, 1, 1, 0, stream, arguments, nullptr),
            name.c_str());
}

const char *type_of(const at::Tensor &t) {
  switch (t.scalar_type()) {
  case at::kFloat:
    return "float32";
  case at::kBFloat16:
    return "bfloat16";
  default:
    return "float16";
  }
}
} // namespace te

extern "C" {
// Compiles the kernels for a device, once, and says of which compute capability it is: 10 times the first number and the second. Fails again
// at once where the compiler has failed before.
int32_t te_cuda_kernels_load(const char *source, size_t length, int32_t device, int32_t *capability) {
  return guard([&] {
    TORCH_CHECK_VALUE(device >= 0 && device < c10::cuda::device_count(), "there is no CUDA device ", device);
    const auto *properties = at::cuda::getDeviceProperties(static_cast<c10::DeviceIndex>(device));
    *capability = 10 * properties->major + properties->minor;
    std::lock_guard<std::mutex> lock(mutex);
    Kernels &kernels = kernels_by_device[device];
    TORCH_CHECK(kernels.failure.empty(), kernels.failure);
    if (!kernels.module)
      load(kernels, std::string(source, length), device);
  });
}
}
