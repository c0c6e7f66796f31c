// JSON documents of a checkpoint: sealed by a checksum line, read strictly. A member that is missing, unknown or of
// another type is an error that names it; nothing is guessed, and no exception leaves these functions.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/base/status.h"

namespace kintsugi::checkpoint {

using Json = nlohmann::ordered_json;

// The document as text: one member a line, arrays of objects one element a line, and as the last member "xxh3", the
// XXH3-128 of all bytes before its line break. kInvalidArgument when a string is not UTF-8.
Result<std::string> seal_json(const Json& object);
// kDataLoss unless the text is sealed and every byte is as it was; the object without "xxh3".
Result<Json> unseal_json(std::string_view text);
// One line, no seal. kInvalidArgument when a string is not UTF-8.
Result<std::string> dump_json(const Json& value);
// Any JSON object. kInvalidArgument otherwise.
Result<Json> parse_json_object(std::string_view text);

// Takes members out of an object one by one; the first failure sticks and the rest are no-ops.
class JsonFields {
 public:
  // `what` names the object in messages.
  JsonFields(const Json& object, std::string what);
  void get(const char* key, int64_t& out);
  void get(const char* key, int& out);
  void get(const char* key, double& out);
  void get(const char* key, bool& out);
  void get(const char* key, std::string& out);
  void get(const char* key, std::vector<int64_t>& out);
  // The member itself, which must be of that type; an empty value after a failure.
  const Json& get_object(const char* key);
  const Json& get_array(const char* key);
  const Json& get_any(const char* key);
  // The first failure (kDataLoss), or an unknown member, or ok.
  Status finish() const;

 private:
  const Json* find(const char* key, Json::value_t type, const char* type_name);
  void fail(const std::string& message);
  const Json& object_;
  std::string what_;
  size_t taken_ = 0;
  Status status_;
};

}  // namespace kintsugi::checkpoint
