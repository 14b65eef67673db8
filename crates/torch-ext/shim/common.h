// What every file of the shim shares: the error channel and the handle rules.
//
// Border rules:
//  * every function returns 0 on success and -1 on failure; results travel through out-parameters;
//  * no C++ exception leaves a function: bodies run inside `guard`;
//  * an object handed to Rust is a heap-allocated owner (`new intrusive_ptr<T>(...)`), released by its `te_*_free`;
//  * tensors arrive as borrowed `at::Tensor*` (tch's handle) and leave as fresh `new at::Tensor` that tch then owns.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace te {

// Mirrors `ErrorKind` in src/error.rs; the numbers are part of the border.
enum ErrorKind : int32_t {
  kTorch = 0,       // any other libtorch error
  kTimeout = 1,     // a deadline passed
  kConnection = 2,  // a peer or the store could not be reached, or went away
  kInvalid = 3,     // arguments refused
  kCallback = 4,    // a Rust callback failed; the Rust side holds the details
  kNotCompiled = 5, // the feature is not part of this build
};

using DropFn = void (*)(void *data);

// What a Rust callback failed with: an error or a panic. The thread that ran the callback throws it. Whoever made the outermost call
// takes it, on a GPU from another thread.
struct Failure {
  Failure(void *data, DropFn drop) : data_(data), drop_(drop) {}
  Failure(const Failure &) = delete;
  Failure &operator=(const Failure &) = delete;
  ~Failure() {
    if (void *data = take())
      drop_(data);
  }

  // Null for everybody but the first.
  void *take() noexcept { return data_.exchange(nullptr); }

private:
  std::atomic<void *> data_;
  DropFn drop_;
};

// Thrown by trampolines after a Rust callback reported failure, with what this thread's last callback left behind.
struct CallbackFailed : std::exception {
  CallbackFailed();
  const char *what() const noexcept override { return "a Rust callback failed"; }
  std::shared_ptr<Failure> failure;
};

// Thrown where a store's Rust backend reported a failure of this kind.
struct StoreFailed : std::runtime_error {
  StoreFailed(int32_t kind, const std::string &message) : std::runtime_error(message), kind(kind) {}
  int32_t kind;
};

void set_error(int32_t kind, const char *message) noexcept;
// Sorts the exception in flight into a kind and stores it for this thread.
void set_error_from_current_exception() noexcept;

template <typename F> int32_t guard(F &&body) noexcept {
  try {
    body();
    return 0;
  } catch (...) {
    set_error_from_current_exception();
    return -1;
  }
}

inline std::vector<at::Tensor> tensors(void *const *handles, size_t count) {
  std::vector<at::Tensor> out;
  out.reserve(count);
  for (size_t i = 0; i < count; ++i)
    out.push_back(*static_cast<at::Tensor *>(handles[i]));
  return out;
}

inline std::vector<at::Tensor> &tensor_vec(void *handle) { return *static_cast<std::vector<at::Tensor> *>(handle); }
inline at::Tensor &tensor(void *handle) { return *static_cast<at::Tensor *>(handle); }
inline void *hand_over(at::Tensor t) { return new at::Tensor(std::move(t)); }

} // namespace te
