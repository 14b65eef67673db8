// Kernels of our own for CUDA devices (the folder `cuda`): compiled for a device when they are first asked for, and launched. For the cargo
// feature `cuda`.
#pragma once
#include "common.h"
#include <ATen/core/Tensor.h>
#include <algorithm>

namespace te {

struct Launch {
  unsigned blocks;
  unsigned threads;
  unsigned blocks_down = 1;
};

// On the device and the current stream of a tensor, whose kernels have to be loaded.
void launch(const at::Tensor &on, const std::string &name, Launch size, void **arguments);

template <typename... Arguments> void run(const at::Tensor &on, const std::string &name, Launch size, Arguments... arguments) {
  void *places[] = {static_cast<void *>(&arguments)...};
  launch(on, name, size, places);
}

// As kernels are called after it.
const char *type_of(const at::Tensor &t);

// So many blocks that each of `count` pieces has a thread, or that the device is full.
inline unsigned blocks_for(int64_t count, unsigned threads) {
  return static_cast<unsigned>(std::min<int64_t>((count + threads - 1) / threads, 1 << 20));
}

template <typename T> T *data(const at::Tensor &t) { return static_cast<T *>(t.data_ptr()); }

} // namespace te
