// Rendezvous stores: TCP, file, in-process hash, and a prefix over any of them.
#include "common.h"
#include "handles.h"
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

using namespace te;

namespace {
std::string text(const char *data, size_t length) { return std::string(data, length); }
std::vector<uint8_t> bytes(const uint8_t *data, size_t length) { return std::vector<uint8_t>(data, data + length); }

void give_bytes(const std::vector<uint8_t> &value, uint8_t **out, size_t *length) {
  auto *copy = new uint8_t[value.size() + 1];
  std::memcpy(copy, value.data(), value.size());
  *out = copy;
  *length = value.size();
}

std::vector<std::string> keys_of(const char *const *keys, const size_t *lengths, size_t count) {
  std::vector<std::string> out;
  out.reserve(count);
  for (size_t i = 0; i < count; ++i)
    out.emplace_back(keys[i], lengths[i]);
  return out;
}
} // namespace

extern "C" {
int32_t te_store_tcp(const char *host, size_t host_length, uint16_t port, bool is_server, int64_t num_workers, bool wait_workers,
                     int64_t timeout_ms, int32_t listen_fd, void **out) {
  return guard([&] {
    c10d::TCPStoreOptions options;
    options.port = port;
    options.isServer = is_server;
    if (num_workers > 0)
      options.numWorkers = static_cast<size_t>(num_workers);
    options.waitWorkers = wait_workers;
    options.timeout = std::chrono::milliseconds(timeout_ms);
    if (listen_fd >= 0) {
      options.masterListenFd = listen_fd;
      // Only the plain backend can take over a socket that somebody else has bound.
      options.useLibUV = false;
    }
    *out = new StorePtr(c10::make_intrusive<c10d::TCPStore>(text(host, host_length), options));
  });
}

int32_t te_store_tcp_port(void *handle, uint16_t *out) {
  return guard([&] {
    auto *tcp = dynamic_cast<c10d::TCPStore *>(store(handle).get());
    TORCH_CHECK_VALUE(tcp != nullptr, "only a TCP store has a port");
    *out = tcp->getPort();
  });
}

int32_t te_store_file(const char *path, size_t length, int32_t num_workers, void **out) {
  return guard([&] { *out = new StorePtr(c10::make_intrusive<c10d::FileStore>(text(path, length), num_workers)); });
}

int32_t te_store_hash(void **out) {
  return guard([&] { *out = new StorePtr(c10::make_intrusive<c10d::HashStore>()); });
}

int32_t te_store_prefix(const char *prefix, size_t length, void *inner, void **out) {
  return guard([&] { *out = new StorePtr(c10::make_intrusive<c10d::PrefixStore>(text(prefix, length), store(inner))); });
}

int32_t te_store_clone(void *handle, void **out) {
  return guard([&] { *out = new StorePtr(store(handle)); });
}

void te_store_free(void *handle) { delete static_cast<StorePtr *>(handle); }

void te_bytes_free(uint8_t *data) { delete[] data; }

int32_t te_store_set(void *handle, const char *key, size_t key_length, const uint8_t *value, size_t length) {
  return guard([&] { store(handle)->set(text(key, key_length), bytes(value, length)); });
}

int32_t te_store_get(void *handle, const char *key, size_t key_length, uint8_t **out, size_t *length) {
  return guard([&] { give_bytes(store(handle)->get(text(key, key_length)), out, length); });
}

int32_t te_store_compare_set(void *handle, const char *key, size_t key_length, const uint8_t *expected, size_t expected_length,
                             const uint8_t *desired, size_t desired_length, uint8_t **out, size_t *length) {
  return guard([&] {
    give_bytes(store(handle)->compareSet(text(key, key_length), bytes(expected, expected_length), bytes(desired, desired_length)), out,
               length);
  });
}

int32_t te_store_append(void *handle, const char *key, size_t key_length, const uint8_t *value, size_t length) {
  return guard([&] { store(handle)->append(text(key, key_length), bytes(value, length)); });
}

int32_t te_store_add(void *handle, const char *key, size_t key_length, int64_t amount, int64_t *out) {
  return guard([&] { *out = store(handle)->add(text(key, key_length), amount); });
}

int32_t te_store_delete_key(void *handle, const char *key, size_t key_length, bool *out) {
  return guard([&] { *out = store(handle)->deleteKey(text(key, key_length)); });
}

int32_t te_store_num_keys(void *handle, int64_t *out) {
  return guard([&] { *out = store(handle)->getNumKeys(); });
}

int32_t te_store_check(void *handle, const char *const *keys, const size_t *lengths, size_t count, bool *out) {
  return guard([&] { *out = store(handle)->check(keys_of(keys, lengths, count)); });
}

int32_t te_store_wait(void *handle, const char *const *keys, const size_t *lengths, size_t count, int64_t timeout_ms) {
  return guard([&] { store(handle)->wait(keys_of(keys, lengths, count), std::chrono::milliseconds(timeout_ms)); });
}

int32_t te_store_timeout(void *handle, int64_t *out) {
  return guard([&] { *out = store(handle)->getTimeout().count(); });
}

int32_t te_store_set_timeout(void *handle, int64_t timeout_ms) {
  return guard([&] { store(handle)->setTimeout(std::chrono::milliseconds(timeout_ms)); });
}
}
