#include "checkpoint/step_folder.h"

#include <algorithm>
#include <charconv>

namespace kintsugi::checkpoint {
namespace {

constexpr std::string_view kPrefix = "step-";

bool is_attempt_char(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_' || c == '.';
}

}  // namespace

std::optional<StepFolder> parse_step_folder(std::string_view name) {
  if (!name.starts_with(kPrefix)) return std::nullopt;
  name.remove_prefix(kPrefix.size());
  int64_t step = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), step);
  const std::string_view digits = name.substr(0, static_cast<size_t>(end - name.data()));
  // One spelling a number: no sign, no leading zeros.
  if (error != std::errc() || digits != std::to_string(step) || step < 0) return std::nullopt;
  const std::string_view rest = name.substr(digits.size());
  using Kind = StepFolder::Kind;
  if (rest.empty()) return StepFolder{step, Kind::kCommitted};
  if (rest == ".replaced") return StepFolder{step, Kind::kReplaced};
  if (rest == ".removing") return StepFolder{step, Kind::kRemoving};
  if (rest.starts_with(".partial-")) return StepFolder{step, Kind::kPartial};
  if (rest.starts_with(".aside-")) return StepFolder{step, Kind::kAside};
  return std::nullopt;
}

std::string step_folder_name(int64_t step) { return std::string(kPrefix) + std::to_string(step); }

std::string partial_folder_name(int64_t step, const std::string& attempt) {
  return step_folder_name(step) + ".partial-" + attempt;
}

bool is_valid_attempt(std::string_view attempt) {
  return !attempt.empty() && attempt.size() <= 100 && std::all_of(attempt.begin(), attempt.end(), is_attempt_char);
}

Status write_file_durably(FileSystem& fs, const std::string& dir, const std::string& name, std::string_view contents) {
  const std::string path = join_path(dir, name);
  const std::string temporary = path + ".tmp";
  KTG_RETURN_IF_ERROR(fs.write_file(temporary, contents));
  KTG_RETURN_IF_ERROR(fs.sync_file(temporary));
  KTG_RETURN_IF_ERROR(fs.rename(temporary, path));
  return fs.sync_dir(dir);
}

}  // namespace kintsugi::checkpoint
