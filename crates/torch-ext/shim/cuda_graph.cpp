// Graphs of CUDA: work of a device that is recorded once and done again. For the cargo feature `cuda`.
#include "common.h"
#include <ATen/core/Generator.h>
#include <ATen/cuda/CUDAGraph.h>

using namespace te;

namespace {
at::cuda::CUDAGraph &graph(void *handle) { return *static_cast<at::cuda::CUDAGraph *>(handle); }
} // namespace

extern "C" {
int32_t te_cuda_graph_new(void **out) {
  return guard([&] { *out = new at::cuda::CUDAGraph(); });
}

void te_cuda_graph_free(void *handle) { delete static_cast<at::cuda::CUDAGraph *>(handle); }

int32_t te_cuda_graph_pool(uint64_t *first, uint64_t *second) {
  return guard([&] {
    const auto pool = at::cuda::graph_pool_handle();
    *first = pool.first;
    *second = pool.second;
  });
}

int32_t te_cuda_graph_register_generator(void *handle, void *generator) {
  return guard([&] { graph(handle).register_generator_state(*static_cast<at::Generator *>(generator)); });
}

// On the current stream, which must not be the default one.
int32_t te_cuda_graph_begin(void *handle, uint64_t first, uint64_t second) {
  return guard([&] { graph(handle).capture_begin({first, second}); });
}

int32_t te_cuda_graph_end(void *handle) {
  return guard([&] { graph(handle).capture_end(); });
}

int32_t te_cuda_graph_replay(void *handle) {
  return guard([&] { graph(handle).replay(); });
}
}
