// A store whose requests a Rust object answers.
#include "closure.h"
#include "handles.h"
#include <chrono>
#include <memory>
#include <optional>
#include <utility>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/exception.h>

using namespace te;

extern "C" {
// Mirrors `Request` in src/store/backend.rs.
struct te_store_request {
  int32_t operation;
  const char *const *keys;
  const size_t *key_lengths;
  size_t num_keys;
  const uint8_t *values[2];
  size_t value_lengths[2];
  int64_t amount;
  int64_t timeout_ms;
};
// Answers in `number` or by `te_store_answer`. Returns 0, or one more than the kind of the error, whose text is the answer then.
using te_store_call = int32_t (*)(void *backend, const te_store_request *request, void *answer, int64_t *number);
}

namespace {
enum Operation : int32_t { kSet, kGet, kCompareSet, kAppend, kAdd, kDeleteKey, kNumKeys, kCheck, kWait };

using Bytes = std::vector<uint8_t>;

// The deadline of requests that this thread makes by way of a `TimedStore`; none where it is negative.
thread_local std::chrono::milliseconds request_deadline{-1};

struct BackendDeadline {
  explicit BackendDeadline(std::chrono::milliseconds deadline) : outer(std::exchange(request_deadline, deadline)) {}
  ~BackendDeadline() { request_deadline = outer; }
  std::chrono::milliseconds outer;
};

struct Backend {
  Backend(void *data, te_store_call call, DropFn drop) : data(data, drop), call(call) {}
  Owned data;
  te_store_call call;
};

class BackendStore : public c10d::Store {
public:
  BackendStore(std::shared_ptr<Backend> backend, std::chrono::milliseconds timeout)
      : c10d::Store(timeout), backend_(std::move(backend)) {}

  // The same keys, with a deadline of its own.
  c10::intrusive_ptr<c10d::Store> clone() override { return c10::make_intrusive<BackendStore>(backend_, timeout_); }

  using c10d::Store::set;
  void set(const std::string &key, const Bytes &value) override { ask(kSet, {key}, &value); }

  using c10d::Store::compareSet;
  Bytes compareSet(const std::string &key, const Bytes &expected, const Bytes &desired) override {
    return ask(kCompareSet, {key}, &expected, &desired).bytes;
  }

  Bytes get(const std::string &key) override { return ask(kGet, {key}).bytes; }

  int64_t add(const std::string &key, int64_t amount) override { return ask(kAdd, {key}, nullptr, nullptr, amount).number; }

  bool deleteKey(const std::string &key) override { return ask(kDeleteKey, {key}).number != 0; }

  bool check(const std::vector<std::string> &keys) override { return ask(kCheck, keys).number != 0; }

  int64_t getNumKeys() override { return ask(kNumKeys, {}).number; }

  void wait(const std::vector<std::string> &keys) override { wait(keys, timeout_); }

  void wait(const std::vector<std::string> &keys, const std::chrono::milliseconds &timeout) override {
    ask(kWait, keys, nullptr, nullptr, 0, timeout);
  }

  void append(const std::string &key, const Bytes &value) override { ask(kAppend, {key}, &value); }

  std::vector<Bytes> multiGet(const std::vector<std::string> &keys) override {
    std::vector<Bytes> values;
    values.reserve(keys.size());
    for (const auto &key : keys)
      values.push_back(get(key));
    return values;
  }

  void multiSet(const std::vector<std::string> &keys, const std::vector<Bytes> &values) override {
    TORCH_CHECK_VALUE(keys.size() == values.size(), "multiSet: ", keys.size(), " keys and ", values.size(), " values");
    for (size_t i = 0; i < keys.size(); ++i)
      set(keys[i], values[i]);
  }

  bool hasExtendedApi() const override { return true; }

private:
  struct Answer {
    Bytes bytes;
    int64_t number = 0;
  };

  Answer ask(Operation operation, const std::vector<std::string> &keys, const Bytes *first = nullptr, const Bytes *second = nullptr,
             int64_t amount = 0, std::optional<std::chrono::milliseconds> timeout = std::nullopt) const {
    std::vector<const char *> texts;
    std::vector<size_t> lengths;
    texts.reserve(keys.size());
    lengths.reserve(keys.size());
    for (const auto &key : keys) {
      texts.push_back(key.data());
      lengths.push_back(key.size());
    }
    te_store_request request{};
    request.operation = operation;
    request.keys = texts.data();
    request.key_lengths = lengths.data();
    request.num_keys = keys.size();
    const Bytes *values[] = {first, second};
    for (size_t i = 0; i < 2; ++i) {
      request.values[i] = values[i] == nullptr ? nullptr : values[i]->data();
      request.value_lengths[i] = values[i] == nullptr ? 0 : values[i]->size();
    }
    request.amount = amount;
    auto own = request_deadline.count() < 0 ? timeout_ : request_deadline;
    request.timeout_ms = timeout.value_or(own).count();
    Answer answer;
    int32_t status = backend_->call(backend_->data.get(), &request, &answer.bytes, &answer.number);
    if (status != 0)
      throw StoreFailed(status - 1, std::string(answer.bytes.begin(), answer.bytes.end()));
    return answer;
  }

  std::shared_ptr<Backend> backend_;
};
// The same store with a deadline of its own. A clone would not do: that of a HashStore is the same object.
class TimedStore : public c10d::Store {
public:
  TimedStore(StorePtr inner, std::chrono::milliseconds timeout) : c10d::Store(timeout), inner_(std::move(inner)) {
    StorePtr last = inner_;
    if (auto *prefix = dynamic_cast<c10d::PrefixStore *>(last.get()))
      last = prefix->getUnderlyingNonPrefixStore();
    takes_deadline_ = dynamic_cast<BackendStore *>(last.get()) != nullptr;
  }

  c10::intrusive_ptr<c10d::Store> clone() override { return c10::make_intrusive<TimedStore>(inner_, timeout_); }
  using c10d::Store::set;
  void set(const std::string &key, const Bytes &value) override {
    BackendDeadline deadline(timeout_);
    inner_->set(key, value);
  }
  using c10d::Store::compareSet;
  Bytes compareSet(const std::string &key, const Bytes &expected, const Bytes &desired) override {
    BackendDeadline deadline(timeout_);
    return inner_->compareSet(key, expected, desired);
  }
  Bytes get(const std::string &key) override {
    BackendDeadline deadline(timeout_);
    // Others wait in `get` by a deadline of their own.
    if (!takes_deadline_)
      inner_->wait({key}, timeout_);
    return inner_->get(key);
  }
  int64_t add(const std::string &key, int64_t amount) override {
    BackendDeadline deadline(timeout_);
    return inner_->add(key, amount);
  }
  bool deleteKey(const std::string &key) override {
    BackendDeadline deadline(timeout_);
    return inner_->deleteKey(key);
  }
  bool check(const std::vector<std::string> &keys) override {
    BackendDeadline deadline(timeout_);
    return inner_->check(keys);
  }
  int64_t getNumKeys() override {
    BackendDeadline deadline(timeout_);
    return inner_->getNumKeys();
  }
  void wait(const std::vector<std::string> &keys) override { inner_->wait(keys, timeout_); }
  void wait(const std::vector<std::string> &keys, const std::chrono::milliseconds &timeout) override { inner_->wait(keys, timeout); }
  void append(const std::string &key, const Bytes &value) override {
    BackendDeadline deadline(timeout_);
    inner_->append(key, value);
  }

private:
  StorePtr inner_;
  bool takes_deadline_ = false;
};
} // namespace

extern "C" {
int32_t te_store_backend(void *data, te_store_call call, DropFn drop, int64_t timeout_ms, void **out) {
  // Rust has given the object away: it is dropped here, also if the store cannot be made.
  Owned owned(data, drop);
  return guard([&] {
    auto backend = std::make_shared<Backend>(nullptr, call, drop);
    backend->data = std::move(owned);
    *out = new StorePtr(c10::make_intrusive<BackendStore>(std::move(backend), std::chrono::milliseconds(timeout_ms)));
  });
}

int32_t te_store_answer(void *answer, const uint8_t *data, size_t length) {
  return guard([&] { static_cast<Bytes *>(answer)->assign(data, data + length); });
}

int32_t te_store_fork(void *handle, int64_t timeout_ms, void **out) {
  return guard([&] { *out = new StorePtr(c10::make_intrusive<TimedStore>(store(handle), std::chrono::milliseconds(timeout_ms))); });
}
}
