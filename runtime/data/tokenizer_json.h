// Reading single values of a tokenizer.json; every error names the part of the file, the key and what was found.
#pragma once

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <string>

#include "runtime/base/status.h"

namespace kintsugi::runtime {

// The "type" of a component.
inline Result<std::string> type_of(const nlohmann::json& item, const char* where) {
  if (!item.is_object() || !item.contains("type") || !item["type"].is_string()) {
    return invalid_argument(fmt::format("{}: is no object with a \"type\"", where));
  }
  return item["type"].get<std::string>();
}

inline Result<bool> bool_at(const nlohmann::json& item, const char* key, bool missing, const std::string& where) {
  if (!item.contains(key)) return missing;
  if (!item[key].is_boolean()) return invalid_argument(fmt::format("{}: \"{}\" is neither true nor false", where, key));
  return item[key].get<bool>();
}

inline Result<std::string> string_at(const nlohmann::json& item, const char* key, const std::string& where) {
  if (!item.contains(key) || !item[key].is_string()) {
    return invalid_argument(fmt::format("{}: \"{}\" is no string", where, key));
  }
  return item[key].get<std::string>();
}

inline Result<const nlohmann::json*> array_at(const nlohmann::json& item, const char* key, const std::string& where) {
  if (!item.contains(key) || !item[key].is_array()) {
    return invalid_argument(fmt::format("{}: \"{}\" is no array", where, key));
  }
  return &item[key];
}

// A token id: 0 to kMostTokens - 1, so that tables over ids stay small whatever a broken file says.
inline constexpr int64_t kMostTokens = 16'000'000;
inline Result<int32_t> token_id_of(const nlohmann::json& value, const std::string& where) {
  if (!value.is_number_unsigned() || value.get<uint64_t>() >= static_cast<uint64_t>(kMostTokens)) {
    return invalid_argument(fmt::format("{}: the id is no number from 0 to {}", where, kMostTokens - 1));
  }
  return static_cast<int32_t>(value.get<uint64_t>());
}

}  // namespace kintsugi::runtime
