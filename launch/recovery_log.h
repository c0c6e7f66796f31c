// What people and programs are told of a job's life: recovery.jsonl (one object an event), the table of processes, the
// report of each recovery, and summary.json. Agent 0 only, on its main thread.
//
// A "recovered" object has the phases of the whole job, each from the end of the one before, and under "ranks" when
// each rank passed its milestones, all from the kill (where its time is known) or from its detection.
//
// Times in recovery.jsonl: t_ns counts CLOCK_MONOTONIC nanoseconds from the origin that the job's first object
// ("start") states; "wall" is the same moment in UTC. Every process of the host shares that clock.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "launch/agent_messages.h"
#include "launch/supervisor.h"
#include "runtime/base/status.h"

namespace kintsugi::launch {

// The phases of a recovery in milliseconds; < 0: not known (a kill by hand has no known time).
struct RecoveryPhases {
  double detect_ms = -1;        // the kill to its detection; known for fault.kill
  double announce_ms = -1;      // to every stop word being raised
  double abort_ms = -1;         // to the last survivor having stopped
  double rejoin_ms = -1;        // to the replacement standing by, and the verdict
  double communicator_ms = -1;  // to the last rank's new communicator
  double state_ms = -1;         // to the last rank's state being in place and compared
  double first_step_ms = -1;    // to the last rank having begun the next step
  double total_ms = -1;         // all of it: from the kill, or from its detection, to the next step begun everywhere
  double committed_ms = -1;     // the same until that step's update was made everywhere
};
RecoveryPhases phases_of(const Recovery& recovery);
// Three lines of text.
std::string describe_recovery(const Recovery& recovery);
// rank -> pid of agent, worker and spares, one line a rank.
std::string describe_processes(const std::map<int, Roster>& rosters);

class RecoveryLog {
 public:
  // Appends to `out_dir`/recovery.jsonl. An empty `out_dir` writes nothing.
  RecoveryLog(std::string out_dir, std::string run_id);

  void start(int world_size, const std::string& launcher, int64_t resumed_step);
  void processes(int rank, const Roster& roster);
  void death(const Death& death, int64_t generation);
  void generation(const Verdict& verdict, const std::string& reason);
  void recovered(const Recovery& recovery);
  void saved(int64_t step, double seconds);
  void save_failed(int64_t step, const std::string& why);
  // Writes summary.json, too: the trainer's summary (may be empty) with this job's failures.
  Status end(int exit_code, const std::string& message, const std::string& trainer_summary);

 private:
  void write(const std::string& event, const nlohmann::ordered_json& members);

  const std::string out_dir_;
  const std::string run_id_;
  const int64_t origin_ns_;
  std::vector<std::string> failures_;  // JSON objects
  int64_t saves_ = 0, failed_saves_ = 0;
  bool complained_ = false;
};

}  // namespace kintsugi::launch
