// What an agent holds for one rank: its own, or one whose agent has died and that it adopted. The rank's memory
// outlives any one agent, because every agent of the host has descriptors of all of it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "launch/control_page.h"
#include "launch/rank_processes.h"
#include "launch/snapshot_keeper.h"

namespace kintsugi::launch {

// Stays where it is: the processes refer to the page and the template.
struct HeldRank {
  HeldRank() = default;
  HeldRank(const HeldRank&) = delete;
  HeldRank& operator=(const HeldRank&) = delete;

  ControlPageMap page;
  ChildTemplate child;
  std::unique_ptr<RankProcesses> processes;  // null: those of the agent before have not all ended yet
  std::unique_ptr<SnapshotKeeper> snapshots;
  int64_t first_incarnation = 1;
  std::vector<Message> waiting;  // about saves, until the keeper of snapshots is there
  int64_t heartbeat = -1, heartbeat_ns = 0;
};

}  // namespace kintsugi::launch
