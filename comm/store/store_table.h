// The keys and values themselves, without waiting: what the server and the local store have in common. Not thread safe.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>

#include "runtime/base/status.h"

namespace kintsugi::comm {

class StoreTable {
 public:
  static constexpr int64_t kMaxTotalBytes = 256 << 20;  // keys and values

  // Each: kInvalidArgument beyond the limits of a key or value, kResourceExhausted when the table is full.
  Status set(std::string_view key, std::string_view value);
  Result<std::string> set_if_absent(std::string_view key, std::string_view value);
  // kFailedPrecondition when the value there is no count, or the sum does not fit.
  Result<int64_t> add(std::string_view key, int64_t delta);
  // Null when the key does not exist.
  const std::string* find(std::string_view key) const;

 private:
  std::unordered_map<std::string, std::string> values_;
  int64_t total_bytes_ = 0;
};

}  // namespace kintsugi::comm
