// The decision that begins a generation: whose state counts, which step is committed, who fetches from whom.
// A pure function of what the ranks reported after they had all stopped.
//
// Why two states are enough. A rank leaves the vote of step s only when every rank has entered it, and a rank enters it
// with its gradients of s complete. So when any rank has left the vote of s, all that were alive in it hold the
// gradients of s and the update can be made everywhere: s is committed. When none has, nobody has updated: s is run
// again.
//
// Where a lost rank's state comes from, nearest first: a living rank that holds the same; failing that all ranks go
// back to the newest step that every rank's agent holds in memory, or to the newest durable checkpoint if that is
// newer, or begin anew.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "launch/verdict.h"
#include "runtime/base/status.h"

namespace kintsugi::launch {

enum class StatePolicy { kAuto, kPeer, kCheckpoint };
Result<StatePolicy> parse_state_policy(const std::string& name);

struct CheckpointRef {
  int64_t step = -1;
  std::string dir;  // empty: none
  bool exists() const { return !dir.empty(); }
};

struct DecisionView {
  int64_t generation = 1;           // to begin
  std::span<const Progress> ranks;  // every rank's final counters; updated_step -1: it has no state
  Verdict last;                     // of the generation that ended; generation 0: this is the first
  CheckpointRef checkpoint;         // newest one known
  // Which ranks hold the same state as each rank, itself included: bit r is rank r. Empty: all hold the same.
  std::span<const uint64_t> holders{};
  bool snapshots = false;  // Progress::held_steps are of a rank's whole state: all can go back to them
  StatePolicy policy = StatePolicy::kAuto;
};

struct Decision {
  Verdict verdict;
  std::string reason;      // a sentence for people
  int64_t steps_lost = 0;  // committed steps that have to be run again
};

// kFailedPrecondition: policy kPeer, a generation has run, and somebody's state is held by no rank that lives.
Result<Decision> decide(const DecisionView& view);

}  // namespace kintsugi::launch
