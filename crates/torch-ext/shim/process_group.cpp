// Process groups over Gloo, their collectives, and the work objects these return.
#include "common.h"
#include "handles.h"
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

using namespace te;

namespace {
std::chrono::milliseconds deadline(int64_t timeout_ms) {
  return timeout_ms > 0 ? std::chrono::milliseconds(timeout_ms) : c10d::kUnsetTimeout;
}

c10d::ReduceOp reduce_op(int32_t code) { return c10d::ReduceOp(static_cast<c10d::ReduceOp::RedOpType>(code)); }

template <typename Options> Options timed(int64_t timeout_ms) {
  Options options;
  options.timeout = deadline(timeout_ms);
  return options;
}

// Gloo hands the addresses of these two to the kernel as they are.
void check_sent(void *handle, const at::Tensor &value) {
  TORCH_CHECK_VALUE(value.is_cpu() || group(handle)->getBackendType() != c10d::ProcessGroup::BackendType::GLOO,
                    "Gloo sends and receives tensors of the CPU, and this one is on ", value.device(), "; copy it there first");
}

void give(void **out, WorkPtr work) { *out = new WorkPtr(std::move(work)); }

// A group that the flight recorder knows by the number of all groups of the process.
//
// The recorder looks the number up in a map of the process without holding its lock, and inserts the ones it does not know
// (libtorch 2.11.0, `FlightRecorder::recordWithResetEnabled`). So the first operation of one group raced with those of all
// others, wherever ranks are threads. With one number for all there is one insertion, which `make_known` does for everybody.
class SharedNumberGloo : public c10d::ProcessGroupGloo {
public:
  SharedNumberGloo(c10::intrusive_ptr<c10d::Store> store, int rank, int size, c10::intrusive_ptr<Options> options)
      : ProcessGroupGloo(std::move(store), rank, size, std::move(options)) {
    local_id_ = 0;
  }

  // Inserts the number, by an operation of a group of one rank, before the first real group can have an operation.
  static void make_known() {
    static const bool once = [] {
      auto options = Options::create(std::chrono::seconds(60));
      options->threads = 1;
      options->devices.push_back(createDeviceForHostname("127.0.0.1", false));
      SharedNumberGloo group(c10::make_intrusive<c10d::HashStore>(), 0, 1, options);
      std::vector<at::Tensor> values{at::zeros({1})};
      group.allreduce(values, {})->wait();
      return true;
    }();
    (void)once;
  }
};
} // namespace

extern "C" {
// `interface` and `host` may be null; with both null Gloo resolves this machine's host name.
int32_t te_pg_gloo(void *store_handle, int32_t rank, int32_t size, int64_t timeout_ms, const char *interface, const char *host,
                   int32_t threads, void **out) {
  return guard([&] {
    auto options = c10d::ProcessGroupGloo::Options::create(std::chrono::milliseconds(timeout_ms));
    options->threads = threads;
    if (interface != nullptr)
      options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForInterface(interface, false));
    else if (host != nullptr)
      options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(host, false));
    else
      options->devices.push_back(c10d::ProcessGroupGloo::createDefaultDevice(false));
    SharedNumberGloo::make_known();
    auto backend = c10::make_intrusive<SharedNumberGloo>(store(store_handle), rank, size, options);
    auto group = c10::make_intrusive<c10d::ProcessGroup>(store(store_handle), rank, size);
    group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::GLOO, backend);
    // Tensors of a GPU go by way of the host.
    group->setBackend(c10::DeviceType::CUDA, c10d::ProcessGroup::BackendType::GLOO, backend);
    group->setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
    *out = new GroupPtr(std::move(group));
  });
}

void te_pg_free(void *handle) {
  // Destructors of groups join threads and may throw when a peer is gone; there is nobody left to tell.
  guard([&] { delete static_cast<GroupPtr *>(handle); });
}

int32_t te_pg_set_timeout(void *handle, int64_t timeout_ms) {
  return guard([&] { group(handle)->getDefaultBackend()->setTimeout(std::chrono::milliseconds(timeout_ms)); });
}

int32_t te_pg_all_reduce(void *handle, void *const *list, size_t count, int32_t op, int64_t timeout_ms, void **out) {
  return guard([&] {
    auto options = timed<c10d::AllreduceOptions>(timeout_ms);
    options.reduceOp = reduce_op(op);
    auto values = tensors(list, count);
    give(out, group(handle)->allreduce(values, options));
  });
}

int32_t te_pg_all_reduce_coalesced(void *handle, void *const *list, size_t count, int32_t op, int64_t timeout_ms, void **out) {
  return guard([&] {
    auto options = timed<c10d::AllreduceCoalescedOptions>(timeout_ms);
    options.reduceOp = reduce_op(op);
    auto values = tensors(list, count);
    give(out, group(handle)->allreduce_coalesced(values, options));
  });
}

int32_t te_pg_reduce(void *handle, void *value, int32_t root, int32_t op, int64_t timeout_ms, void **out) {
  return guard([&] {
    auto options = timed<c10d::ReduceOptions>(timeout_ms);
    options.rootRank = root;
    options.reduceOp = reduce_op(op);
    std::vector<at::Tensor> values{tensor(value)};
    give(out, group(handle)->reduce(values, options));
  });
}

int32_t te_pg_broadcast(void *handle, void *value, int32_t root, int64_t timeout_ms, void **out) {
  return guard([&] {
    auto options = timed<c10d::BroadcastOptions>(timeout_ms);
    options.rootRank = root;
    std::vector<at::Tensor> values{tensor(value)};
    give(out, group(handle)->broadcast(values, options));
  });
}

int32_t te_pg_all_gather(void *handle, void *const *outputs, size_t count, void *input, int64_t timeout_ms, void **out) {
  return guard([&] {
    auto options = timed<c10d::AllgatherOptions>(timeout_ms);
    std::vector<std::vector<at::Tensor>> lists{tensors(outputs, count)};
    std::vector<at::Tensor> inputs{tensor(input)};
    give(out, group(handle)->allgather(lists, inputs, options));
  });
}

int32_t te_pg_all_gather_into_tensor(void *handle, void *output, void *input, int64_t timeout_ms, void **out) {
  return guard([&] {
    auto options = timed<c10d::AllgatherOptions>(timeout_ms);
    give(out, group(handle)->_allgather_base(tensor(output), tensor(input), options));
  });
}

int32_t te_pg_reduce_scatter(void *handle, void *output, void *const *inputs, size_t count, int32_t op, int64_t timeout_ms, void **out) {
  return guard([&] {
    auto options = timed<c10d::ReduceScatterOptions>(timeout_ms);
    options.reduceOp = reduce_op(op);
    std::vector<at::Tensor> outputs{tensor(output)};
    std::vector<std::vector<at::Tensor>> lists{tensors(inputs, count)};
    give(out, group(handle)->reduce_scatter(outputs, lists, options));
  });
}

int32_t te_pg_reduce_scatter_tensor(void *handle, void *output, void *input, int32_t op, int64_t timeout_ms, void **out) {
  return guard([&] {
    auto options = timed<c10d::ReduceScatterOptions>(timeout_ms);
    options.reduceOp = reduce_op(op);
    give(out, group(handle)->_reduce_scatter_base(tensor(output), tensor(input), options));
  });
}

// `outputs` is read on the root only; elsewhere `count` is 0.
int32_t te_pg_gather(void *handle, void *const *outputs, size_t count, void *input, int32_t root, int64_t timeout_ms, void **out) {
  return guard([&] {
    auto options = timed<c10d::GatherOptions>(timeout_ms);
    options.rootRank = root;
    std::vector<std::vector<at::Tensor>> lists;
    if (count > 0)
      lists.push_back(tensors(outputs, count));
    std::vector<at::Tensor> inputs{tensor(input)};
    give(out, group(handle)->gather(lists, inputs, options));
  });
}

// `inputs` is read on the root only; elsewhere `count` is 0.
int32_t te_pg_scatter(void *handle, void *output, void *const *inputs, size_t count, int32_t root, int64_t timeout_ms, void **out) {
  return guard([&] {
    auto options = timed<c10d::ScatterOptions>(timeout_ms);
    options.rootRank = root;
    std::vector<at::Tensor> outputs{tensor(output)};
    std::vector<std::vector<at::Tensor>> lists;
    if (count > 0)
      lists.push_back(tensors(inputs, count));
    give(out, group(handle)->scatter(outputs, lists, options));
  });
}

int32_t te_pg_all_to_all_single(void *handle, void *output, void *input, const int64_t *output_splits, size_t num_output_splits,
                                const int64_t *input_splits, size_t num_input_splits, int64_t timeout_ms, void **out) {
  return guard([&] {
    auto options = timed<c10d::AllToAllOptions>(timeout_ms);
    std::vector<int64_t> out_sizes(output_splits, output_splits + num_output_splits);
    std::vector<int64_t> in_sizes(input_splits, input_splits + num_input_splits);
    give(out, group(handle)->alltoall_base(tensor(output), tensor(input), out_sizes, in_sizes, options));
  });
}

int32_t te_pg_send(void *handle, void *value, int32_t destination, int32_t tag, void **out) {
  return guard([&] {
    std::vector<at::Tensor> values{tensor(value)};
    check_sent(handle, values[0]);
    give(out, group(handle)->send(values, destination, tag));
  });
}

int32_t te_pg_recv(void *handle, void *value, int32_t source, int32_t tag, void **out) {
  return guard([&] {
    std::vector<at::Tensor> values{tensor(value)};
    check_sent(handle, values[0]);
    give(out, source < 0 ? group(handle)->recvAnysource(values, tag) : group(handle)->recv(values, source, tag));
  });
}

int32_t te_pg_barrier(void *handle, int64_t timeout_ms, void **out) {
  // The group's own barrier first puts a tensor into a static variable, to choose the backend by its device. Two threads may
  // not do that at once, and ranks may be threads, so the backend is asked directly.
  return guard(
      [&] { give(out, group(handle)->getDefaultBackend()->barrier(timed<c10d::BarrierOptions>(timeout_ms))); });
}

int32_t te_pg_monitored_barrier(void *handle, int64_t timeout_ms, bool wait_all_ranks) {
  return guard([&] { group(handle)->monitoredBarrier(timed<c10d::BarrierOptions>(timeout_ms), wait_all_ranks); });
}

int32_t te_pg_broadcast_coalesced(void *handle, void *const *list, size_t count, size_t buffer_bytes, int32_t root) {
  return guard([&] {
    auto values = tensors(list, count);
    c10d::broadcast_coalesced(group(handle), values, buffer_bytes, root);
  });
}

int32_t te_pg_verify_params(void *handle, void *const *list, size_t count) {
  return guard([&] { c10d::verify_params_across_processes(group(handle), tensors(list, count), std::nullopt); });
}

int32_t te_work_wait(void *handle, int64_t timeout_ms) {
  return guard([&] {
    // Zero means that the operation's own deadline is the only one.
    auto limit = std::chrono::milliseconds(timeout_ms > 0 ? timeout_ms : 0);
    if (!work(handle)->wait(limit))
      throw std::runtime_error("the operation was aborted");
  });
}

int32_t te_work_is_completed(void *handle, bool *out) {
  return guard([&] { *out = work(handle)->isCompleted(); });
}

int32_t te_work_source_rank(void *handle, int32_t *out) {
  return guard([&] { *out = work(handle)->sourceRank(); });
}

void te_work_free(void *handle) {
  guard([&] { delete static_cast<WorkPtr *>(handle); });
}
}
