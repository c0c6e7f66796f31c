#include "launch/snapshot_notes.h"

#include <limits>
#include <nlohmann/json.hpp>

namespace kintsugi::launch {
namespace {

using nlohmann::ordered_json;

double number_or_nan(const ordered_json& object, const char* key) {
  const auto it = object.find(key);
  return it != object.end() && it->is_number() ? it->get<double>() : std::numeric_limits<double>::quiet_NaN();
}

// A count; 0 for what can be none, so that it can be counted on.
int64_t count_or_zero(const ordered_json& object, const char* key) {
  constexpr int64_t kMostCounted = int64_t{1} << 53;
  const auto it = object.find(key);
  if (it == object.end() || !it->is_number_integer()) return 0;
  const auto count = it->get<int64_t>();
  return count >= 0 && count <= kMostCounted ? count : 0;
}

}  // namespace

std::string to_json(const SnapshotNotes& notes, const std::string& tuning) {
  ordered_json out;
  out["loss_sum"] = notes.vote.loss_sum;
  out["num_tokens"] = notes.vote.num_tokens;
  out["grad_norm"] = notes.vote.gradient_norm;
  out["skipped"] = notes.vote.skip != 0;
  out["skipped_steps"] = notes.skipped_steps;
  if (!tuning.empty()) out["tuning"] = tuning;
  return out.dump();
}

std::string parse_tuning(const std::string& json) {
  const ordered_json object = ordered_json::parse(json, nullptr, /*allow_exceptions=*/false);
  const auto it = object.find("tuning");
  return it != object.end() && it->is_string() ? it->get<std::string>() : "";
}

SnapshotNotes parse_snapshot_notes(const std::string& json, int64_t step) {
  SnapshotNotes notes;
  notes.vote.step = step;
  const ordered_json object = ordered_json::parse(json, nullptr, /*allow_exceptions=*/false);
  if (!object.is_object()) return notes;
  notes.vote.loss_sum = number_or_nan(object, "loss_sum");
  notes.vote.num_tokens = count_or_zero(object, "num_tokens");
  notes.vote.gradient_norm = number_or_nan(object, "grad_norm");
  const auto skipped = object.find("skipped");
  notes.vote.skip = skipped != object.end() && skipped->is_boolean() && skipped->get<bool>() ? 1 : 0;
  notes.skipped_steps = count_or_zero(object, "skipped_steps");
  return notes;
}

}  // namespace kintsugi::launch
