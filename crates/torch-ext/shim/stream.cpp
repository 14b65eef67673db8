// Streams of CUDA devices, by the guards that a device's library registers: no function of CUDA is named here, so a build
// without it has them too, and refuses where there is no device.
#include "common.h"
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

using namespace te;

namespace {

c10::Device device_of(int32_t index) { return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index)); }

c10::Stream stream_of(int32_t index, int64_t id) { return c10::Stream(c10::Stream::UNSAFE, device_of(index), id); }

c10::impl::VirtualGuardImpl guard_of_cuda() { return c10::impl::VirtualGuardImpl(c10::kCUDA); }

} // namespace

extern "C" {
int32_t te_stream_current(int32_t index, int64_t *id) {
  return guard([&] { *id = guard_of_cuda().getStream(device_of(index)).id(); });
}

int32_t te_stream_default(int32_t index, int64_t *id) {
  return guard([&] { *id = guard_of_cuda().getDefaultStream(device_of(index)).id(); });
}

int32_t te_stream_from_pool(int32_t index, int64_t *id) {
  return guard([&] { *id = guard_of_cuda().getStreamFromGlobalPool(device_of(index)).id(); });
}

// Makes the stream its device's current one on this thread, and the device the current one.
int32_t te_stream_enter(int32_t index, int64_t id, int32_t *previous_device, int64_t *previous_id) {
  return guard([&] {
    const auto cuda = guard_of_cuda();
    *previous_device = cuda.exchangeDevice(device_of(index)).index();
    *previous_id = cuda.exchangeStream(stream_of(index, id)).id();
  });
}

int32_t te_stream_leave(int32_t index, int32_t previous_device, int64_t previous_id) {
  return guard([&] {
    const auto cuda = guard_of_cuda();
    cuda.exchangeStream(stream_of(index, previous_id));
    cuda.setDevice(device_of(previous_device));
  });
}

// What is asked of stream `id` from here on begins once stream `other` has done what was asked of it before.
int32_t te_stream_wait(int32_t index, int64_t id, int32_t other_index, int64_t other) {
  return guard([&] {
    c10::Event event(c10::kCUDA);
    event.record(stream_of(other_index, other));
    event.block(stream_of(index, id));
  });
}

int32_t te_stream_synchronize(int32_t index, int64_t id) {
  return guard([&] { guard_of_cuda().synchronizeStream(stream_of(index, id)); });
}

int32_t te_device_synchronize(int32_t index) { return guard([&] { guard_of_cuda().synchronizeDevice(index); }); }

int32_t te_stream_record_use(int32_t index, int64_t id, void *handle) {
  return guard([&] { tensor(handle).record_stream(stream_of(index, id)); });
}
}
