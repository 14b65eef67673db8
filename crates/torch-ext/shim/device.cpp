// What libtorch says of its devices.
#include "common.h"
#include <algorithm>
#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

using namespace te;

namespace {

// Mirrored by `DeviceMemory` in src/device.rs.
struct DeviceMemory {
  int64_t allocated, peak_allocated, reserved, free, total;
};

c10::DeviceAllocator *allocator_of(int32_t index) {
  // Its first tensor is what makes a device's allocator ready.
  at::empty({1}, at::TensorOptions().device(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(index))));
  return c10::getDeviceAllocator(at::kCUDA);
}

} // namespace

extern "C" {
int32_t te_set_float32_matmul_precision(const char *precision) {
  return guard([&] { at::globalContext().setFloat32MatmulPrecision(precision); });
}

int32_t te_float32_matmul_precision(int32_t *precision) {
  return guard([&] { *precision = static_cast<int32_t>(at::globalContext().float32MatmulPrecision()); });
}

int32_t te_device_memory(int32_t index, DeviceMemory *figures) {
  return guard([&] {
    auto *allocator = allocator_of(index);
    const auto device = static_cast<c10::DeviceIndex>(index);
    const auto stats = allocator->getDeviceStats(device);
    constexpr auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    const auto [free, total] = allocator->getMemoryInfo(device);
    *figures = {stats.allocated_bytes[all].current, stats.allocated_bytes[all].peak, stats.reserved_bytes[all].current,
                static_cast<int64_t>(free), static_cast<int64_t>(total)};
  });
}

int32_t te_pinned_bytes(int64_t num_bytes, void **bytes) {
  return guard([&] {
    *bytes = hand_over(at::empty({num_bytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(true)));
  });
}

int32_t te_pin_memory(void *source, void **result) {
  return guard([&] { *result = hand_over(tensor(source).pin_memory()); });
}

int32_t te_copy_to_host(void *const *places, void *const *sources, size_t count) {
  return guard([&] {
    at::NoGradGuard no_grad;
    std::vector<at::Device> busy;
    // Also if one of the copies fails: nobody may free the places of the others while they are on their way.
    const auto arrive = [&] {
      for (const at::Device device : busy)
        c10::impl::VirtualGuardImpl(device.type()).getStream(device).synchronize();
    };
    try {
      for (size_t i = 0; i < count; ++i) {
        const at::Tensor &source = tensor(sources[i]);
        const at::Device device = source.device();
        if (device.is_cuda() && std::find(busy.begin(), busy.end(), device) == busy.end())
          busy.push_back(device);
        tensor(places[i]).copy_(source, /*non_blocking=*/true);
      }
    } catch (...) {
      arrive();
      throw;
    }
    arrive();
  });
}

int32_t te_reset_peak_device_memory(int32_t index) {
  return guard([&] { allocator_of(index)->resetPeakStats(static_cast<c10::DeviceIndex>(index)); });
}
}
