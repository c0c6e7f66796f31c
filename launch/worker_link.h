// A worker's side of the connection to its agent: a shared page (progress counters, stop word, verdict) and a
// socketpair for messages. The trainer sees only this interface, so it is tested without processes.
// Thread safety: stop tokens and request flags from any thread; the rest from the training thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "launch/verdict.h"
#include "runtime/base/deadline.h"
#include "runtime/base/status.h"
#include "runtime/base/stop_token.h"

namespace kintsugi::launch {

// What a rank passes on the way from one generation into the next; the recovery report is made of these times.
enum class EntryMilestone {
  kStopped,       // this rank has seen that its generation is over
  kDrained,       // nothing of it runs any more: the rank is about to report
  kCommunicator,  // the new communicator stands
  kFetched,       // this rank's state is in place
  kCompared,      // and known to equal its peers'
  kState,         // the device's communicator is connected: steps may begin
};

class WorkerLink {
 public:
  virtual ~WorkerLink() = default;

  // Raised by the agent the moment this generation is over.
  virtual StopToken stop_token(int64_t generation) const = 0;

  // Progress. Each is a store to the shared page, no system call (but for the first step of a generation).
  virtual void begun(int64_t step) = 0;
  virtual void left_vote(const VoteOutcome& vote) = 0;  // gradients of vote.step are complete here
  // The state is of this step. After an initialisation, fetch or load, too: then gradients and vote of any other
  // step are forgotten. -1: no state, before one begins to overwrite it.
  virtual void updated(int64_t step) = 0;
  // A sign of life between steps, from work that takes long: validation, saving.
  virtual void alive() = 0;
  virtual void entered(EntryMilestone milestone) = 0;

  // The generation is over: this worker has stopped, its streams are drained, its counters are final. Waits for the
  // verdict of a newer generation than `generation`.
  virtual Result<Verdict> await_verdict(int64_t generation, Deadline deadline) = 0;

  // True once for entry `index` of fault.kill in the job's life, whichever incarnation asks: the agent remembers. The
  // time of the answer is noted as the time of death.
  virtual bool claim_fault(int64_t index) = 0;

  // Set by a signal to the agents: finish the step, save, leave. The vote spreads it to all ranks.
  virtual bool stop_requested() const = 0;

  // Snapshots. A slot of the segment that no writer reads, or -1 while all are busy. What it held counts no longer.
  // keep_newest: the newest complete snapshot stays, because all ranks may have to go back to it.
  virtual int free_snapshot_slot(bool keep_newest) = 0;
  // The slot holds this rank's part of the state of `step`. save: the agent's writer takes it from here, and training
  // goes on. Otherwise it is for memory alone.
  virtual Status snapshot_ready(int64_t step, int64_t cursor, int slot, bool save) = 0;
  struct HeldSnapshot {
    int slot = -1;  // -1: that step is not held
    int64_t cursor = 0;
  };
  virtual HeldSnapshot held_snapshot(int64_t step) const = 0;
  // Waits until every snapshot handed over is durable (or has failed: that status).
  virtual Status await_snapshots(Deadline deadline) = 0;

  // One line of text or JSON for the agent to relay: progress, metrics. `topic`: "metrics", "log", "summary".
  virtual Status publish(std::string_view topic, std::string_view payload) = 0;
  // The run is complete here. Waits until it is complete on every rank: then ok, and the process ends. kAborted when a
  // peer died before that: this rank is still needed; await the next verdict.
  virtual Status finished(std::string_view summary_json) = 0;
};

}  // namespace kintsugi::launch
