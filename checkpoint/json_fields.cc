#include "checkpoint/json_fields.h"

#include <limits>

#include "checkpoint/xxh3.h"

namespace kintsugi::checkpoint {
namespace {

constexpr std::string_view kSealHead = ",\n \"xxh3\": \"";
constexpr std::string_view kSealTail = "\"\n}\n";
constexpr size_t kHexDigits = 32;

const Json& nothing() {
  static const Json value;
  return value;
}

bool is_array_of_objects(const Json& value) { return value.is_array() && !value.empty() && value.front().is_object(); }

// May throw: nlohmann refuses to dump what is not UTF-8.
std::string to_lines(const Json& object) {
  std::string text = "{";
  for (const auto& [key, value] : object.items()) {
    text += text.size() == 1 ? "\n " : ",\n ";
    text += Json(key).dump() + ": ";
    if (!is_array_of_objects(value)) {
      text += value.dump();
      continue;
    }
    for (size_t i = 0; i < value.size(); ++i) text += (i == 0 ? "[\n  " : ",\n  ") + value[i].dump();
    text += "]";
  }
  return text;
}

}  // namespace

Result<std::string> seal_json(const Json& object) {
  KTG_CHECK(object.is_object() && !object.empty());
  std::string text;
  try {
    text = to_lines(object);
  } catch (const Json::exception& e) {
    return invalid_argument(e.what());
  }
  const std::string sum = xxh3_128(text);
  return text.append(kSealHead).append(sum).append(kSealTail);
}

Result<Json> unseal_json(std::string_view text) {
  const size_t seal_size = kSealHead.size() + kHexDigits + kSealTail.size();
  if (text.size() <= seal_size) return data_loss("too short for its checksum line");
  const std::string_view body = text.substr(0, text.size() - seal_size);
  const std::string want = std::string(kSealHead) + xxh3_128(body) + std::string(kSealTail);
  if (text.substr(body.size()) != want) return data_loss("its checksum line does not fit its bytes");
  Json object = Json::parse(std::string(body) + "}", nullptr, false);
  if (!object.is_object()) return data_loss("not a JSON object");
  return object;
}

Result<std::string> dump_json(const Json& value) {
  try {
    return value.dump();
  } catch (const Json::exception& e) {
    return invalid_argument(e.what());
  }
}

Result<Json> parse_json_object(std::string_view text) {
  Json object = Json::parse(text, nullptr, false);
  if (!object.is_object()) return invalid_argument("not a JSON object");
  return object;
}

JsonFields::JsonFields(const Json& object, std::string what) : object_(object), what_(std::move(what)) {
  if (!object.is_object()) fail("must be an object");
}

void JsonFields::fail(const std::string& message) {
  if (status_.ok()) status_ = data_loss(what_ + ": " + message);
}

const Json& JsonFields::get_any(const char* key) {
  if (!status_.ok()) return nothing();
  const auto it = object_.find(key);
  if (it == object_.end()) {
    fail(std::string("no \"") + key + "\"");
    return nothing();
  }
  ++taken_;
  return *it;
}

const Json* JsonFields::find(const char* key, Json::value_t type, const char* type_name) {
  const Json& value = get_any(key);
  if (!status_.ok()) return nullptr;
  if (value.type() == type) return &value;
  fail(std::string("\"") + key + "\" must be " + type_name);
  return nullptr;
}

const Json& JsonFields::get_object(const char* key) {
  const Json* value = find(key, Json::value_t::object, "an object");
  return value == nullptr ? nothing() : *value;
}

const Json& JsonFields::get_array(const char* key) {
  const Json* value = find(key, Json::value_t::array, "an array");
  return value == nullptr ? nothing() : *value;
}

void JsonFields::get(const char* key, int64_t& out) {
  const Json& value = get_any(key);
  if (!status_.ok()) return;
  // nlohmann calls what has no sign unsigned; beyond int64_t it would wrap.
  if (!value.is_number_integer() ||
      (value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX))) {
    return fail(std::string("\"") + key + "\" must be an integer");
  }
  out = value.get<int64_t>();
}

void JsonFields::get(const char* key, int& out) {
  int64_t wide = 0;
  get(key, wide);
  if (status_.ok() && (wide < std::numeric_limits<int>::min() || wide > std::numeric_limits<int>::max())) {
    return fail(std::string("\"") + key + "\" must fit 32 bits");
  }
  if (status_.ok()) out = static_cast<int>(wide);
}

void JsonFields::get(const char* key, double& out) {
  const Json& value = get_any(key);
  if (!status_.ok()) return;
  if (!value.is_number()) return fail(std::string("\"") + key + "\" must be a number");
  out = value.get<double>();
}

void JsonFields::get(const char* key, bool& out) {
  if (const Json* value = find(key, Json::value_t::boolean, "true or false")) out = value->get<bool>();
}

void JsonFields::get(const char* key, std::string& out) {
  if (const Json* value = find(key, Json::value_t::string, "a string")) out = value->get<std::string>();
}

void JsonFields::get(const char* key, std::vector<int64_t>& out) {
  const Json& array = get_array(key);
  if (!status_.ok()) return;
  out.clear();
  for (const Json& value : array) {
    if (!value.is_number_integer()) return fail(std::string("\"") + key + "\" must hold integers");
    out.push_back(value.get<int64_t>());
  }
}

Status JsonFields::finish() const {
  if (status_.ok() && taken_ != object_.size()) {
    return data_loss(what_ + ": " + std::to_string(object_.size() - taken_) + " unknown members");
  }
  return status_;
}

}  // namespace kintsugi::checkpoint
