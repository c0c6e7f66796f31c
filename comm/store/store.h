// A small key-value service for rendezvous: rank 0 serves it over TCP, everybody is a client. Keys are
// paths ("gen/3/addr/0"), values are bytes (at most 1 MiB). Wire format: comm/store/PROTOCOL.md.
// Thread safe; each call carries its Deadline to the server, so a lost server ends in kDeadlineExceeded or
// kUnavailable.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "runtime/base/deadline.h"
#include "runtime/base/status.h"

namespace kintsugi::comm {

class Store {
 public:
  virtual ~Store() = default;
  virtual Status set(std::string_view key, std::string_view value, Deadline deadline) = 0;
  // Waits until the key exists.
  virtual Result<std::string> get(std::string_view key, Deadline deadline) = 0;
  // Adds to a counter (absent: 0) and returns the new value.
  virtual Result<int64_t> add(std::string_view key, int64_t delta, Deadline deadline) = 0;
  // Sets only if absent; returns the value that stands.
  virtual Result<std::string> set_if_absent(std::string_view key, std::string_view value, Deadline deadline) = 0;
};

class StoreServer {
 public:
  virtual ~StoreServer() = default;
  // Binds host:port (port 0: any free one) and serves on its own thread until destroyed.
  static Result<std::unique_ptr<StoreServer>> start(const std::string& host, int port);
  virtual int port() const = 0;
};

// Retries the connection until the deadline.
Result<std::unique_ptr<Store>> connect_store(const std::string& host, int port, Deadline deadline);
// In this process, for tests and one-rank jobs.
std::unique_ptr<Store> create_local_store();
// Scopes every key under `prefix`/; `store` outlives it.
std::unique_ptr<Store> create_prefix_store(Store& store, std::string prefix);

}  // namespace kintsugi::comm
