// A closure or object of Rust that C++ owns: an opaque pointer and the function that drops it.
#pragma once
#include "common.h"
#include <utility>

namespace te {

struct Owned {
  Owned() = default;
  Owned(void *data, DropFn drop) : data_(data), drop_(drop) {}
  Owned(Owned &&other) noexcept : data_(std::exchange(other.data_, nullptr)), drop_(other.drop_) {}
  Owned &operator=(Owned &&other) noexcept {
    std::swap(data_, other.data_);
    std::swap(drop_, other.drop_);
    return *this;
  }
  Owned(const Owned &) = delete;
  Owned &operator=(const Owned &) = delete;
  ~Owned() { reset(); }

  void reset() noexcept {
    if (void *data = std::exchange(data_, nullptr))
      drop_(data);
  }
  void *get() const { return data_; }
  explicit operator bool() const { return data_ != nullptr; }

private:
  void *data_ = nullptr;
  DropFn drop_ = nullptr;
};

// Takes over a tensor that a Rust callback gave away; null means undefined.
inline at::Tensor take(void *handle) {
  std::unique_ptr<at::Tensor> owner(static_cast<at::Tensor *>(handle));
  return owner ? std::move(*owner) : at::Tensor();
}

// A new handle for tch, or null for an undefined tensor: tch panics on many calls with undefined tensors.
inline void *hand_over_if_defined(const at::Tensor &t) { return t.defined() ? hand_over(t) : nullptr; }

} // namespace te
