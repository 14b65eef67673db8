// libtorch's profiler (kineto): recording, the recorded events, and the trace file.
#include "common.h"
#include <ATen/record_function.h>
#include <torch/csrc/autograd/profiler_kineto.h>

namespace torch::autograd::profiler {
// Declared in kineto_shim.h, which includes a header of kineto that libtorch does not ship.
TORCH_API void addMetadataJson(const std::string &key, const std::string &value);
} // namespace torch::autograd::profiler

namespace te {
namespace {
using torch::autograd::profiler::ProfilerResult;
using torch::profiler::impl::ActivityType;
using torch::profiler::impl::ProfilerConfig;
using torch::profiler::impl::ProfilerState;

// Mirrors `Options` in src/profiler.rs.
struct ProfilerOptions {
  bool cpu;
  bool cuda;
  bool record_shapes;
  bool profile_memory;
  bool with_stack;
  bool with_flops;
  bool with_modules;
};

ProfilerConfig config_of(const ProfilerOptions &options) {
  return ProfilerConfig(ProfilerState::KINETO, options.record_shapes, options.profile_memory, options.with_stack,
                        options.with_flops, options.with_modules);
}

std::set<ActivityType> activities_of(const ProfilerOptions &options) {
  std::set<ActivityType> activities;
  if (options.cpu)
    activities.insert(ActivityType::CPU);
  if (options.cuda)
    activities.insert(ActivityType::CUDA);
  return activities;
}

// A recording with room for the parts of one event that Rust is looking at.
struct Trace {
  std::unique_ptr<ProfilerResult> result;
  std::string name;
  std::string stack;
  std::string modules;
  std::vector<int64_t> dims;
  std::vector<int64_t> ranks;
};

// Mirrors `RawEvent` in src/profiler.rs; pointers hold until the next event of the same trace is read.
struct Event {
  const char *name;
  size_t name_length;
  const char *stack;
  size_t stack_length;
  const char *modules;
  size_t modules_length;
  const int64_t *dims;
  const int64_t *ranks;
  size_t num_inputs;
  uint64_t start_ns;
  uint64_t end_ns;
  uint64_t thread;
  uint64_t correlation_id;
  uint64_t linked_correlation_id;
  uint64_t flops;
  int64_t num_bytes;
  int32_t device_type;
  int32_t device_index;
  bool is_async;
  bool is_hidden;
  bool is_user_scope;
};

// A named range; the record only borrows its name.
struct Range {
  explicit Range(std::string_view text) : name(text), record(at::RecordScope::USER_SCOPE) {
    if (record.isActive())
      record.before(std::string_view(name));
  }
  std::string name;
  at::RecordFunction record;
};

std::string joined(c10::ArrayRef<std::string> lines) {
  std::string text;
  for (const auto &line : lines) {
    if (!text.empty())
      text += '\n';
    text += line;
  }
  return text;
}

} // namespace
} // namespace te

using namespace te;

extern "C" {
int32_t te_profiler_prepare(const ProfilerOptions *options) {
  return guard([&] { torch::autograd::profiler::prepareProfiler(config_of(*options), activities_of(*options)); });
}

int32_t te_profiler_start(const ProfilerOptions *options) {
  return guard([&] { torch::autograd::profiler::enableProfiler(config_of(*options), activities_of(*options)); });
}

// Ends the recording of this thread. `trace` may be null: the recording is thrown away.
int32_t te_profiler_stop(void **trace) {
  return guard([&] {
    auto result = torch::autograd::profiler::disableProfiler();
    TORCH_CHECK(result, "the profiler returned no result");
    if (trace)
      *trace = new Trace{std::move(result), {}, {}, {}, {}, {}};
  });
}

int32_t te_profiler_add_metadata(const char *key, size_t key_length, const char *value, size_t value_length) {
  return guard([&] {
    torch::autograd::profiler::addMetadataJson(std::string(key, key_length), std::string(value, value_length));
  });
}

void te_trace_free(void *trace) { delete static_cast<Trace *>(trace); }

size_t te_trace_num_events(void *trace) { return static_cast<Trace *>(trace)->result->events().size(); }

int32_t te_trace_event(void *handle, size_t index, Event *out) {
  return guard([&] {
    auto &trace = *static_cast<Trace *>(handle);
    const auto &event = trace.result->events().at(index);
    trace.name = event.name();
    trace.stack = event.hasStack() ? joined(event.stack()) : std::string();
    trace.modules = event.hasModuleHierarchy() ? joined(event.moduleHierarchy()) : std::string();
    trace.dims.clear();
    trace.ranks.clear();
    if (event.hasShapes())
      for (const auto &shape : event.shapes()) {
        trace.ranks.push_back(static_cast<int64_t>(shape.size()));
        trace.dims.insert(trace.dims.end(), shape.begin(), shape.end());
      }
    *out = Event{trace.name.data(),
                 trace.name.size(),
                 trace.stack.data(),
                 trace.stack.size(),
                 trace.modules.data(),
                 trace.modules.size(),
                 trace.dims.data(),
                 trace.ranks.data(),
                 trace.ranks.size(),
                 event.startNs(),
                 event.endNs(),
                 event.startThreadId(),
                 event.correlationId(),
                 event.linkedCorrelationId(),
                 event.flops(),
                 event.nBytes(),
                 static_cast<int32_t>(event.deviceType()),
                 event.deviceIndex(),
                 event.isAsync(),
                 event.isHiddenEvent(),
                 event.scope() == static_cast<uint8_t>(at::RecordScope::USER_SCOPE)};
  });
}

int32_t te_trace_save(void *trace, const char *path, size_t length) {
  return guard([&] { static_cast<Trace *>(trace)->result->save(std::string(path, length)); });
}

int32_t te_record_function_enter(const char *name, size_t length, void **record) {
  return guard([&] { *record = new Range(std::string_view(name, length)); });
}

void te_record_function_exit(void *record) { delete static_cast<Range *>(record); }
} // extern "C"
