// Process groups over NCCL, for the cargo feature `cuda`.
#define USE_C10D_NCCL 1
#include "common.h"
#include "handles.h"
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

using namespace te;

extern "C" {
// CUDA tensors travel by NCCL. With `gloo_handle` (a group made by te_pg_gloo over the same ranks) CPU tensors
// travel by Gloo in the same group, as `cuda:nccl,cpu:gloo` does in PyTorch.
int32_t te_pg_nccl(void *store_handle, int32_t rank, int32_t size, int64_t timeout_ms, int32_t device_index, void *gloo_handle, void **out) {
  return guard([&] {
    auto options = c10d::ProcessGroupNCCL::Options::create();
    options->timeout = std::chrono::milliseconds(timeout_ms);
    auto backend = c10::make_intrusive<c10d::ProcessGroupNCCL>(store(store_handle), rank, size, options);
    backend->setBoundDeviceId(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device_index)));
    auto result = c10::make_intrusive<c10d::ProcessGroup>(store(store_handle), rank, size);
    result->setBackend(c10::DeviceType::CUDA, c10d::ProcessGroup::BackendType::NCCL, backend);
    if (gloo_handle != nullptr)
      result->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::GLOO,
                         group(gloo_handle)->getBackend(c10::DeviceType::CPU));
    result->setDefaultBackend(c10d::ProcessGroup::BackendType::NCCL);
    *out = new GroupPtr(std::move(result));
  });
}
}
