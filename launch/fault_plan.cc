#include "launch/fault_plan.h"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <utility>

namespace kintsugi::launch {
namespace {

using NamedPoint = std::pair<const char*, FaultPoint>;
constexpr std::array<NamedPoint, 12> kPoints = {{{"start-up", FaultPoint::kStartUp},
                                                 {"data", FaultPoint::kData},
                                                 {"forward", FaultPoint::kForward},
                                                 {"backward", FaultPoint::kBackward},
                                                 {"mid-reduce", FaultPoint::kMidReduce},
                                                 {"before-vote", FaultPoint::kBeforeVote},
                                                 {"after-vote", FaultPoint::kAfterVote},
                                                 {"mid-update", FaultPoint::kMidUpdate},
                                                 {"snapshot", FaultPoint::kSnapshot},
                                                 {"write", FaultPoint::kWrite},
                                                 {"rename", FaultPoint::kRename},
                                                 {"during-recovery", FaultPoint::kDuringRecovery}}};

Result<int64_t> integer(const ConfigTable::Row& row, const char* key, size_t index) {
  const auto it = row.find(key);
  if (it == row.end()) return invalid_argument(fmt::format("fault.kill[{}]: {} is missing", index, key));
  if (const int64_t* value = std::get_if<int64_t>(&it->second)) return *value;
  return invalid_argument(fmt::format("fault.kill[{}].{}: must be an integer", index, key));
}

Result<std::string> text_or(const ConfigTable::Row& row, const char* key, const char* otherwise, size_t index) {
  const auto it = row.find(key);
  if (it == row.end()) return std::string(otherwise);
  if (const std::string* text = std::get_if<std::string>(&it->second)) return *text;
  return invalid_argument(fmt::format("fault.kill[{}].{}: must be a string", index, key));
}

Result<FaultEntry> parse_entry(const ConfigTable::Row& row, size_t index, int world_size) {
  FaultEntry entry{};
  KTG_ASSIGN_OR_RETURN(const int64_t rank, integer(row, "rank", index));
  KTG_ASSIGN_OR_RETURN(entry.step, integer(row, "step", index));
  if (rank < 0 || rank >= world_size) {
    return invalid_argument(fmt::format("fault.kill[{}].rank = {}: must be from 0 to {}", index, rank, world_size - 1));
  }
  if (entry.step < 1) {
    return invalid_argument(fmt::format("fault.kill[{}].step = {}: steps count from 1", index, entry.step));
  }
  entry.rank = static_cast<int>(rank);
  KTG_ASSIGN_OR_RETURN(const std::string point, text_or(row, "point", "backward", index));
  KTG_ASSIGN_OR_RETURN(entry.point, parse_fault_point(point));
  KTG_ASSIGN_OR_RETURN(const std::string by, text_or(row, "by", "signal", index));
  if (by != "signal" && by != "device") {
    return invalid_argument(fmt::format("fault.kill[{}].by = \"{}\": must be \"signal\" or \"device\"", index, by));
  }
  entry.by_device = by == "device";
  return entry;
}

Status kill_this_process() {
  kill(getpid(), SIGKILL);
  for (;;) pause();  // SIGKILL is delivered to a process, not to a call: other threads may run on for a moment
}

}  // namespace

Result<FaultPoint> parse_fault_point(const std::string& name) {
  std::string known;
  for (const auto& [text, point] : kPoints) {
    if (name == text) return point;
    known += (known.empty() ? "" : ", ") + std::string(text);
  }
  return invalid_argument(fmt::format("fault.kill: no point is called \"{}\"; there are {}", name, known));
}

Result<std::vector<FaultEntry>> FaultConfig::entries(int world_size) const {
  std::vector<FaultEntry> out;
  for (size_t i = 0; i < kill.size(); ++i) {
    KTG_ASSIGN_OR_RETURN(const FaultEntry entry, parse_entry(kill[i], i, world_size));
    out.push_back(entry);
  }
  return out;
}

void describe(ConfigTable& table, FaultConfig& config) {
  table.add_rows(
      "fault.kill", &config.kill, {"rank", "step", "point", "by"},
      "deliberate deaths: {rank, step, point = \"backward\", by = \"signal\"}, each once a job; by = \"device\": "
      "of a kernel's error on the GPU");
}

FaultPlan::FaultPlan(std::vector<FaultEntry> entries, int rank, std::function<bool(int64_t)> claim,
                     std::function<Status()> die, std::function<Status()> break_device)
    : entries_(std::move(entries)),
      rank_(rank),
      claim_(std::move(claim)),
      die_(die ? std::move(die) : kill_this_process),
      break_device_(break_device ? std::move(break_device) : die_) {}

bool FaultPlan::any_at(int64_t step) const {
  return std::any_of(entries_.begin(), entries_.end(),
                     [&](const FaultEntry& entry) { return entry.rank == rank_ && entry.step == step; });
}

Status FaultPlan::at(FaultPoint point, int64_t step) const {
  for (size_t i = 0; i < entries_.size(); ++i) {
    const FaultEntry& entry = entries_[i];
    if (entry.rank != rank_ || entry.point != point || entry.step != step) continue;
    if (claim_(static_cast<int64_t>(i))) return entry.by_device ? break_device_() : die_();
  }
  return ok_status();
}

}  // namespace kintsugi::launch
