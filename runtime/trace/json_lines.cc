#include "runtime/trace/json_lines.h"

#include <algorithm>
#include <nlohmann/json.hpp>

namespace kintsugi::trace {
namespace {

nlohmann::json parse_object(std::string_view text) {
  nlohmann::json object = nlohmann::json::parse(text, nullptr, false);
  return object.is_object() ? object : nlohmann::json();
}

int64_t integer_or(const nlohmann::json& object, const char* key, int64_t otherwise) {
  const auto it = object.find(key);
  return it != object.end() && it->is_number_integer() ? it->get<int64_t>() : otherwise;
}

}  // namespace

Result<JsonLines> JsonLines::open(FileSystem& fs, std::string path) {
  JsonLines lines(fs, std::move(path));
  if (!fs.exists(lines.path_)) {
    KTG_RETURN_IF_ERROR(fs.append_file(lines.path_, ""));
    return lines;
  }
  KTG_ASSIGN_OR_RETURN(const std::string text, fs.read_file(lines.path_));
  const size_t whole = text.rfind('\n') == std::string::npos ? 0 : text.rfind('\n') + 1;
  std::string_view kept(text.data(), whole);
  if (whole < text.size()) {
    if (parse_object(std::string_view(text).substr(whole)).is_object()) {
      KTG_RETURN_IF_ERROR(fs.append_file(lines.path_, "\n"));
      kept = text;
    } else {
      KTG_RETURN_IF_ERROR(fs.truncate_file(lines.path_, static_cast<int64_t>(whole)));
    }
  }
  int64_t highest = 0;
  while (!kept.empty()) {
    const std::string_view line = kept.substr(0, kept.find('\n'));
    kept.remove_prefix(std::min(kept.size(), line.size() + 1));
    const nlohmann::json object = parse_object(line);
    if (!object.is_object()) continue;
    const int64_t attempt = integer_or(object, "attempt", 0);
    if (attempt < INT64_MAX) highest = std::max(highest, attempt);  // a damaged digit must not leave no next one
    lines.last_step_ = integer_or(object, "step", lines.last_step_);
  }
  lines.attempt_ = highest + 1;
  return lines;
}

Status JsonLines::append(std::string_view object) {
  const nlohmann::json parsed = parse_object(object);
  if (!parsed.is_object() || object.front() != '{' || object.find('\n') != std::string_view::npos) {
    return invalid_argument(path_ + ": not one line with a JSON object: " + std::string(object.substr(0, 80)));
  }
  const std::string attempt = "{\"attempt\":" + std::to_string(attempt_) + (parsed.empty() ? "" : ",");
  KTG_RETURN_IF_ERROR(fs_->append_file(path_, attempt + std::string(object.substr(1)) + "\n"));
  last_step_ = integer_or(parsed, "step", last_step_);
  return ok_status();
}

}  // namespace kintsugi::trace
