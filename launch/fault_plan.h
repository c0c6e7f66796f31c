// Deliberate deaths, by configuration: fault.kill = [{rank = 3, step = 40, point = "mid-reduce"}]. The worker sends
// itself SIGKILL at the named point of the step, once a job for each entry; with by = "device" it queues a kernel there
// that reads an address that does not exist, as a broken kernel would, and meets the device's error in its own time.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "runtime/base/config_table.h"
#include "runtime/base/status.h"

namespace kintsugi::launch {

enum class FaultPoint {
  kStartUp,
  kData,
  kForward,
  kBackward,
  kMidReduce,
  kBeforeVote,
  kAfterVote,
  kMidUpdate,
  kSnapshot,
  kWrite,
  kRename,
  kDuringRecovery
};
// "start-up", "data", "forward", "backward", "mid-reduce", "before-vote", "after-vote", "mid-update", "snapshot",
// "write", "rename", "during-recovery".
Result<FaultPoint> parse_fault_point(const std::string& name);

struct FaultEntry {
  int rank;
  int64_t step;
  FaultPoint point;
  bool by_device = false;
};

struct FaultConfig {
  std::vector<ConfigTable::Row> kill;
  Result<std::vector<FaultEntry>> entries(int world_size) const;
};
void describe(ConfigTable& table, FaultConfig& config);

// The entries of one rank, in its worker.
//   kStartUp          before a process without state takes the state of `step` - 1
//   kDuringRecovery   in a recovery whose verdict commits `step` or `step` - 1, before the state is handed over
//   kWrite, kRename   in the process that writes the checkpoint of `step`
//   the others        inside the step
class FaultPlan {
 public:
  // `claim(i)`: true once a job for entry i. `die` ends the process; null: SIGKILL to itself. A test's may return an
  // error instead, which at() hands on. `break_device` serves entries that strike by the device; null: they die, too.
  FaultPlan(std::vector<FaultEntry> entries, int rank, std::function<bool(int64_t)> claim,
            std::function<Status()> die = nullptr, std::function<Status()> break_device = nullptr);
  // Whether an entry is meant for this rank at `step`, wherever in it, fired or not.
  bool any_at(int64_t step) const;
  // Ok unless an entry strikes here. Costs nothing without entries.
  Status at(FaultPoint point, int64_t step) const;

 private:
  std::vector<FaultEntry> entries_;
  int rank_;
  std::function<bool(int64_t)> claim_;
  std::function<Status()> die_, break_device_;
};

}  // namespace kintsugi::launch
