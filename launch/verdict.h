// What the agents decide after a change of membership, and what a worker reports for that decision.
// Plain data: it crosses shared pages and sockets as bytes.
#pragma once

#include <cstdint>

namespace kintsugi::launch {

// The result of a step's vote: the same bits on every rank that left it.
struct VoteOutcome {
  int64_t step = 0;
  double gradient_norm = 0;  // before clipping
  double loss_sum = 0;
  int64_t num_tokens = 0;      // valid targets of the global batch
  int32_t skip = 0;            // the gradient was not finite: no update
  int32_t stop_requested = 0;  // some rank was asked to save and leave after this step
};

// A worker's progress, kept in its page where its agent can read it whatever happens to the worker.
// After each change: updated_step <= reduced_step <= updated_step + 1. -1: no valid state yet.
inline constexpr int kMaxSnapshotSlots = 4;

struct Progress {
  int64_t begun_step = 0;     // the step whose fetch has begun
  int64_t reduced_step = -1;  // last step whose vote this rank has left: its gradients are complete here
  int64_t updated_step = -1;  // last step whose update is complete here: the state is of this step
  VoteOutcome vote;           // of reduced_step
  // Steps of which its agent's memory holds this rank's whole part of the state: it outlives the worker. -1: none.
  int64_t held_steps[kMaxSnapshotSlots] = {-1, -1, -1, -1};
};

enum class StateSource : int32_t {
  kFresh = 0,       // initialise: step 0
  kSurvivors = 1,   // survivors keep theirs, `source_rank` gives it to those who have none
  kCheckpoint = 2,  // everyone loads checkpoint_step from disk
  kSnapshots = 3,   // everyone goes back to committed_step as its own agent's memory holds it
};

// The decision of one generation.
struct Verdict {
  int64_t generation = 0;
  StateSource source = StateSource::kFresh;
  int64_t committed_step = 0;  // all ranks hold the state of this step before the next one begins
  VoteOutcome vote;  // of committed_step: whoever has updated_step == committed_step - 1 applies the update with it.
                     // vote.step != committed_step when nobody knows it any more: then nobody has to
  int32_t source_rank = -1;        // kSurvivors: whose state the joining ranks fetch
  uint64_t joining_ranks = 0;      // kSurvivors, kept for up to 64 ranks a node: bit r set = rank r has no state
  char checkpoint_dir[1024] = {};  // kCheckpoint
};

}  // namespace kintsugi::launch
