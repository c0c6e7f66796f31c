// Deliberate deaths, by configuration: fault.kill = [{rank = 3, step = 40, point = "mid-reduce"}]. The worker sends
// itself SIGKILL at the named point of the step, once a job for each entry.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/base/config_table.h"
#include "runtime/base/status.h"

namespace kintsugi::launch {

enum class FaultPoint {
  kStartUp, kData, kForward, kBackward, kMidReduce, kBeforeVote, kAfterVote, kMidUpdate, kSnapshot, kWrite, kRename, kDuringRecovery
};
// "start-up", "data", "forward", "backward", "mid-reduce", "before-vote", "after-vote", "mid-update", "snapshot", "write",
// "rename", "during-recovery".
Result<FaultPoint> parse_fault_point(const std::string& name);

struct FaultEntry {
  int rank;
  int64_t step;
  FaultPoint point;
};

struct FaultConfig {
  std::vector<ConfigTable::Row> kill;
  Result<std::vector<FaultEntry>> entries(int world_size) const;
};
void describe(ConfigTable& table, FaultConfig& config);

}  // namespace kintsugi::launch
