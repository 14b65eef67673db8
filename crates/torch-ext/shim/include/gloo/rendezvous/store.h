// The virtual table must match Gloo's own order, since c10d's GlooStore derives from this class.
#pragma once
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>
namespace gloo::rendezvous {
class Store {
 public:
  static constexpr std::chrono::milliseconds kDefaultTimeout{30000};
  virtual ~Store();
  virtual void set(const std::string &key, const std::vector<char> &data) = 0;
  virtual std::vector<char> get(const std::string &key) = 0;
  virtual void wait(const std::vector<std::string> &keys) = 0;
  virtual void wait(const std::vector<std::string> &keys, const std::chrono::milliseconds &timeout) = 0;
  virtual bool has_v2_support();
  virtual std::vector<std::vector<char>> multi_get(const std::vector<std::string> &keys);
  virtual void multi_set(const std::vector<std::string> &keys, const std::vector<std::vector<char>> &values);
  virtual void append(const std::string &key, const std::vector<char> &data);
  virtual int64_t add(const std::string &key, int64_t value);
};
} // namespace gloo::rendezvous
