// libtorch's wheel holds Gloo but not its headers. ProcessGroupGloo.hpp names these types and calls nothing else of them.
#pragma once
#include <chrono>
#include <memory>
namespace gloo {
class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};
namespace transport {
class UnboundBuffer;
}
} // namespace gloo
