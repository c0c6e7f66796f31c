#include "comm/store/store_table.h"

#include <charconv>

#include "comm/store/wire.h"

namespace kintsugi::comm {

Status StoreTable::set(std::string_view key, std::string_view value) {
  KTG_RETURN_IF_ERROR(check_limits(key, value));
  const auto found = values_.find(std::string(key));
  const auto old_bytes = static_cast<int64_t>(found == values_.end() ? 0 : key.size() + found->second.size());
  const int64_t total = total_bytes_ - old_bytes + static_cast<int64_t>(key.size() + value.size());
  if (total > kMaxTotalBytes) {
    return resource_exhausted("the store is full: " + std::to_string(total) + " bytes with key \"" + std::string(key) +
                              "\", at most " + std::to_string(kMaxTotalBytes));
  }
  total_bytes_ = total;
  values_.insert_or_assign(std::string(key), std::string(value));
  return ok_status();
}

Result<std::string> StoreTable::set_if_absent(std::string_view key, std::string_view value) {
  if (const std::string* there = find(key)) return *there;
  KTG_RETURN_IF_ERROR(set(key, value));
  return std::string(value);
}

Result<int64_t> StoreTable::add(std::string_view key, int64_t delta) {
  int64_t count = 0;
  if (const std::string* there = find(key)) {
    const char* end = there->data() + there->size();
    const auto parsed = std::from_chars(there->data(), end, count);
    if (parsed.ec != std::errc() || parsed.ptr != end) {
      return failed_precondition("store key \"" + std::string(key) + "\" holds no count");
    }
  }
  if (__builtin_add_overflow(count, delta, &count)) {
    return failed_precondition("store key \"" + std::string(key) + "\": the count does not fit into 64 bits");
  }
  KTG_RETURN_IF_ERROR(set(key, std::to_string(count)));
  return count;
}

const std::string* StoreTable::find(std::string_view key) const {
  const auto found = values_.find(std::string(key));
  return found == values_.end() ? nullptr : &found->second;
}

}  // namespace kintsugi::comm
