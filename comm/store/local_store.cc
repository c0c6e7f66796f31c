// The stores that need no network: in this process, and a view of another store.
#include <condition_variable>
#include <mutex>

#include "comm/store/store.h"
#include "comm/store/store_table.h"

namespace kintsugi::comm {

namespace {

class LocalStore final : public Store {
 public:
  Status set(std::string_view key, std::string_view value, Deadline) override {
    std::lock_guard lock(mutex_);
    const Status done = table_.set(key, value);
    changed_.notify_all();
    return done;
  }
  Result<std::string> get(std::string_view key, Deadline deadline) override {
    std::unique_lock lock(mutex_);
    while (true) {
      if (const std::string* value = table_.find(key)) return *value;
      if (deadline.passed()) {
        return deadline_exceeded("store key \"" + std::string(key) + "\" did not appear in time");
      }
      changed_.wait_for(lock, deadline.remaining());
    }
  }
  Result<int64_t> add(std::string_view key, int64_t delta, Deadline) override {
    std::lock_guard lock(mutex_);
    auto count = table_.add(key, delta);
    changed_.notify_all();
    return count;
  }
  Result<std::string> set_if_absent(std::string_view key, std::string_view value, Deadline) override {
    std::lock_guard lock(mutex_);
    auto stands = table_.set_if_absent(key, value);
    changed_.notify_all();
    return stands;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  StoreTable table_;
};

class PrefixStore final : public Store {
 public:
  PrefixStore(Store& store, std::string prefix) : store_(store), prefix_(std::move(prefix) + "/") {}
  Status set(std::string_view key, std::string_view value, Deadline deadline) override {
    return store_.set(scoped(key), value, deadline);
  }
  Result<std::string> get(std::string_view key, Deadline deadline) override {
    return store_.get(scoped(key), deadline);
  }
  Result<int64_t> add(std::string_view key, int64_t delta, Deadline deadline) override {
    return store_.add(scoped(key), delta, deadline);
  }
  Result<std::string> set_if_absent(std::string_view key, std::string_view value, Deadline deadline) override {
    return store_.set_if_absent(scoped(key), value, deadline);
  }

 private:
  std::string scoped(std::string_view key) const { return std::string(prefix_).append(key); }
  Store& store_;
  std::string prefix_;
};

}  // namespace

std::unique_ptr<Store> create_local_store() { return std::make_unique<LocalStore>(); }

std::unique_ptr<Store> create_prefix_store(Store& store, std::string prefix) {
  return std::make_unique<PrefixStore>(store, std::move(prefix));
}

}  // namespace kintsugi::comm
