#include "common.h"
#include <torch/csrc/distributed/c10d/exception.h>

namespace te {
namespace {
struct LastError {
  int32_t kind = kTorch;
  std::string message;
  std::shared_ptr<Failure> failure;
};
thread_local LastError last_error;

// Of the last callback that failed on this thread. Stays here too once it is thrown: who catches the exception need not be us.
thread_local std::shared_ptr<Failure> left_behind;

bool contains(const std::string &text, const char *needle) { return text.find(needle) != std::string::npos; }

// Gloo reports dead peers and deadlines as plain runtime errors, so their texts have to be read; it also passes the texts of
// stores on in errors of its own.
int32_t classify(const std::string &text) {
  if (contains(text, "imed out") || contains(text, "imeout"))
    return kTimeout;
  if (contains(text, "onnection closed by peer") || contains(text, "onnection reset") || contains(text, "onnection refused") ||
      contains(text, "roken pipe") || contains(text, "ead end of pipe") || contains(text, "onnect() ") ||
      contains(text, "connectFullMesh failed") || contains(text, "the store of the run"))
    return kConnection;
  return kTorch;
}
} // namespace

CallbackFailed::CallbackFailed() : failure(left_behind) {}

void set_error(int32_t kind, const char *message) noexcept {
  try {
    last_error.kind = kind;
    last_error.failure = nullptr;
    last_error.message = message;
  } catch (...) {
    // Out of memory while reporting an error: the kind alone has to do.
  }
}

void set_error_from_current_exception() noexcept {
  try {
    throw;
  } catch (const CallbackFailed &e) {
    set_error(kCallback, e.what());
    last_error.failure = e.failure;
  } catch (const StoreFailed &e) {
    set_error(e.kind, e.what());
  } catch (const c10::DistBackendError &e) {
    set_error(classify(e.what_without_backtrace()), e.what_without_backtrace());
  } catch (const c10::DistStoreError &e) {
    int32_t kind = classify(e.what_without_backtrace());
    set_error(kind == kTorch ? kConnection : kind, e.what_without_backtrace());
  } catch (const c10::DistNetworkError &e) {
    int32_t kind = classify(e.what_without_backtrace());
    set_error(kind == kTorch ? kConnection : kind, e.what_without_backtrace());
  } catch (const c10::DistError &e) {
    set_error(classify(e.what_without_backtrace()), e.what_without_backtrace());
  } catch (const c10::ValueError &e) {
    set_error(kInvalid, e.what_without_backtrace());
  } catch (const c10::Error &e) {
    set_error(classify(e.what_without_backtrace()), e.what_without_backtrace());
  } catch (const std::exception &e) {
    set_error(classify(e.what()), e.what());
  } catch (...) {
    set_error(kTorch, "an exception of unknown type");
  }
}
} // namespace te

extern "C" {
// The message stays valid until this thread's next failing call.
int32_t te_last_error(const char **message, size_t *length) {
  *message = te::last_error.message.data();
  *length = te::last_error.message.size();
  return te::last_error.kind;
}

// Takes `data` in every case. What the callback before left behind goes.
void te_keep_callback_failure(void *data, te::DropFn drop) {
  try {
    te::left_behind = std::make_shared<te::Failure>(data, drop);
  } catch (...) {
    // Out of memory: that a callback failed is said all the same.
    te::left_behind = nullptr;
    drop(data);
  }
}

// What the callback failed with that ended this thread's last failing call, or null if that is unknown or taken already.
void *te_take_failure_of_last_error() { return te::last_error.failure ? te::last_error.failure->take() : nullptr; }

// What the last callback of this thread failed with, or null if it is taken already.
void *te_take_callback_failure() { return te::left_behind ? te::left_behind->take() : nullptr; }
}
