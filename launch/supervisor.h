// The job-wide side of recovery, as a state machine without processes, sockets or clocks of its own: what happened goes
// in, with its time; what to do comes out as Actions. Agent 0 runs it; tests drive it by hand.
//
// A generation: every rank runs (kRunning) until something ends it; then it is announced as over, every rank stops and
// reports its final counters (kParked), a lost rank's replacement reports that it has none; when all have, decide()
// makes the verdict and the next generation runs. Whatever happens in between (another death, a hang, a late answer)
// only changes who has yet to report, so there is no state in which the job can be stuck without a deadline.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "launch/control_page.h"
#include "launch/decide.h"
#include "launch/verdict.h"

namespace kintsugi::launch {

struct SupervisorPolicy {
  StatePolicy source = StatePolicy::kAuto;
  int64_t max_restarts = 3;  // deaths of one rank at one step, and generations without progress, that end the job
  int64_t hang_timeout_ms = 300'000;  // for a starting process to report; 0: never
  int64_t ack_timeout_ms = 10'000;    // for a running one to stop
  int64_t total_steps = 0;
  std::vector<uint64_t> holders{};  // DecisionView's
  bool snapshots = false;
};

struct Death {
  int rank = -1;
  int32_t pid = 0;
  int64_t step = 0;      // it was working on
  int64_t fault_ns = 0;  // when it killed itself by fault.kill; 0: not known
  int64_t detected_ns = 0;
  int64_t announced_ns = 0;  // all stop words of this host were raised
  bool hung = false;         // killed by its agent for being late
  bool agent = false;        // its agent died, and it with it; the pid is the agent's
};

// One recovery: from the first death to the first step that every rank began. Times are CLOCK_MONOTONIC ns, 0: did not
// come to it.
struct Recovery {
  int64_t generation = 0;       // that it ended in
  std::vector<Death> deaths{};  // empty: the communicator failed without one
  std::string cause{};
  int64_t began_ns = 0;  // first detection
  int64_t announced_ns = 0;
  int64_t stopped_ns = 0;  // the last survivor reported
  int64_t ready_ns = 0;    // the last replacement reported
  int64_t verdict_ns = 0;
  EntryTimes entry{};  // the latest rank's
  std::vector<EntryTimes> ranks{};
  int64_t committed_step = 0;
  int64_t steps_lost = 0;
  StateSource source = StateSource::kFresh;
  int source_rank = -1;
  std::string decision{};
};

struct Action {
  enum class Kind {
    kAnnounce,  // generations below `generation` are over
    kVerdict,   // to every rank
    kKill,      // `rank`'s process: it is late
    kResumed,   // `recovery` is complete: report it
    kLeave,     // every rank is complete: let them go; the job's exit code is `exit_code`
    kEnd,       // end now with `exit_code`; `text` says why
  };
  Kind kind;
  int rank = -1;
  int64_t generation = 0;
  int exit_code = 0;
  std::string text{};
  std::optional<Verdict> verdict{};
  std::optional<Recovery> recovery{};
};

class Supervisor {
 public:
  // All ranks are starting. A resume_from that exists is what the first generation loads.
  Supervisor(int world_size, const SupervisorPolicy& policy, CheckpointRef resume_from, int64_t now_ns);

  // A rank's active process has stopped and waits for a verdict.
  void parked(int rank, const Progress& progress, int64_t now_ns);
  // It is dead. A replacement will report by parked().
  void died(const Death& death, const Progress& last, int64_t now_ns);
  // Its communicator failed in `generation`, and it will stop.
  void trouble(int rank, int64_t generation, const std::string& reason, int64_t now_ns);
  // It cannot go on, and a replacement could not either.
  void failed(int rank, int exit_code, const std::string& message, int64_t now_ns);
  void resumed(int rank, int64_t generation, const EntryTimes& times);
  // It has run all its steps. `stopped`: because of a stop request, and steps are left.
  void finished(int rank, bool stopped);
  // Deadlines. Call when due_ns() has come.
  void tick(int64_t now_ns);
  // When tick() has something to do, at the latest; INT64_MAX: never.
  int64_t due_ns() const;

  void checkpoint_committed(const CheckpointRef& checkpoint);
  const CheckpointRef& checkpoint() const { return checkpoint_; }
  int64_t generation() const { return generation_; }
  bool over() const { return over_; }

  // What to do, in order; each is returned once.
  std::vector<Action> take_actions();

 private:
  enum class Phase { kStarting, kRunning, kParked, kFinished, kFailed };
  struct Rank {
    Phase phase = Phase::kStarting;
    int64_t since_ns = 0;     // of kStarting
    int64_t known_step = -1;  // last state it was seen to hold, dead or alive
    Progress progress;
    bool resumed = false;
    bool stopped = false;
    int64_t death_step = -1;  // and how often it died there
    int64_t deaths = 0;
    int exit_code = 0;
    std::string failure;
  };

  void begin_generation(const std::string& cause, int64_t now_ns);
  void decide_when_all_parked(int64_t now_ns);
  void leave_when_all_finished();
  void end_when_failures_are_known(int64_t now_ns);
  void complete_recovery();
  void end(int exit_code, std::string text);
  bool none_in(Phase phase) const;

  const SupervisorPolicy policy_;
  std::vector<Rank> ranks_;
  int64_t generation_ = 1;  // announced; begins with its verdict
  bool gathering_ = true;
  int64_t ack_due_ns_ = 0;      // for the ranks that still run
  int64_t failure_due_ns_ = 0;  // for other ranks' word after a failure; 0: none failed
  Verdict last_;                // newest verdict
  CheckpointRef checkpoint_;
  int64_t idle_generations_ = 0;      // in a row that ended without a death and without a committed step
  int64_t best_step_ = -1;            // highest step that a survivor was seen to hold or to have voted on
  std::optional<Recovery> recovery_;  // under way
  bool over_ = false;
  std::vector<Action> actions_;
};

}  // namespace kintsugi::launch
