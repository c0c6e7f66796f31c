#include "launch/decide.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace kintsugi::launch {
namespace {

Decision from_disk(const DecisionView& view, int64_t best_step) {
  Decision d;
  d.verdict.generation = view.generation;
  const std::string why = view.last.generation == 0 ? "start"
                          : best_step < 0           ? "no rank has state"
                                                    : "recovery.source = \"checkpoint\"";
  if (view.checkpoint.exists()) {
    d.verdict.source = StateSource::kCheckpoint;
    d.verdict.committed_step = view.checkpoint.step;
    KTG_CHECK(view.checkpoint.dir.size() < sizeof d.verdict.checkpoint_dir) << view.checkpoint.dir;
    std::memcpy(d.verdict.checkpoint_dir, view.checkpoint.dir.c_str(), view.checkpoint.dir.size() + 1);
    d.reason = fmt::format("{}: all ranks load the checkpoint of step {}", why, view.checkpoint.step);
  } else {
    d.verdict.source = StateSource::kFresh;
    d.verdict.committed_step = 0;
    d.reason = fmt::format("{}, and there is no checkpoint: all ranks begin with step 0", why);
  }
  d.steps_lost = std::max<int64_t>(0, best_step - d.verdict.committed_step);
  return d;
}

// The vote of `step` >= 1, if anybody who reports, or the last verdict, knows its outcome; else that of step 0, which
// has none.
VoteOutcome find_vote(const DecisionView& view, int64_t step) {
  if (step < 1) return {};
  for (const Progress& p : view.ranks) {
    if (p.updated_step >= 0 && p.reduced_step == step && p.vote.step == step) return p.vote;
  }
  if (view.last.generation > 0 && view.last.vote.step == step) return view.last.vote;
  return {};
}

std::string rank_list(uint64_t mask) {
  std::vector<int> ranks;
  for (int r = 0; r < 64; ++r) {
    if ((mask >> r) & 1) ranks.push_back(r);
  }
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "));
}

}  // namespace

Result<StatePolicy> parse_state_policy(const std::string& name) {
  if (name == "auto") return StatePolicy::kAuto;
  if (name == "peer") return StatePolicy::kPeer;
  if (name == "checkpoint") return StatePolicy::kCheckpoint;
  return invalid_argument("recovery.source = \"" + name + "\": allowed: auto, peer, checkpoint");
}

Result<Decision> decide(const DecisionView& view) {
  KTG_CHECK(view.ranks.size() <= 64) << view.ranks.size() << " ranks";
  int64_t committed = -1;
  bool all_have_state = true;
  for (const Progress& p : view.ranks) {
    all_have_state = all_have_state && p.updated_step >= 0;
    if (p.updated_step >= 0) committed = std::max({committed, p.updated_step, p.reduced_step});
  }
  const bool first = view.last.generation == 0;
  if (committed < 0 && !first && view.policy == StatePolicy::kPeer) {
    return failed_precondition("recovery.source = \"peer\", and no rank is left that has state");
  }
  const bool prefers_disk = view.policy == StatePolicy::kCheckpoint && !all_have_state;
  if (committed < 0 || prefers_disk) return from_disk(view, committed);

  Decision d;
  d.verdict.generation = view.generation;
  d.verdict.source = StateSource::kSurvivors;
  d.verdict.committed_step = committed;
  d.verdict.vote = find_vote(view, committed);
  const bool vote_known = committed >= 1 && d.verdict.vote.step == committed;
  int num_late = 0, num_done = 0;
  for (size_t r = 0; r < view.ranks.size(); ++r) {
    const Progress& p = view.ranks[r];
    const bool done = p.updated_step == committed;
    // It entered the vote of `committed`, or left it, and has not updated: its gradients are whole.
    const bool late = p.updated_step == committed - 1 && p.updated_step >= 0 && p.begun_step == committed && vote_known;
    num_done += done;
    num_late += late;
    if (!done && !late) {
      d.verdict.joining_ranks |= uint64_t{1} << r;
    } else if (d.verdict.source_rank < 0) {
      d.verdict.source_rank = static_cast<int32_t>(r);
    }
  }
  KTG_CHECK(d.verdict.source_rank >= 0) << "step " << committed << " is committed, and nobody can make its state";
  d.reason = num_late == 0   ? fmt::format("step {} is committed", committed)
             : num_done == 0 ? fmt::format("the vote of step {} was over: the survivors make its update", committed)
                             : fmt::format("step {} is committed: {} rank(s) make its update now", committed, num_late);
  if (d.verdict.joining_ranks != 0) {
    d.reason +=
        fmt::format("; {} take{} rank {}'s state", rank_list(d.verdict.joining_ranks),
                    (d.verdict.joining_ranks & (d.verdict.joining_ranks - 1)) == 0 ? "s" : "", d.verdict.source_rank);
  }
  return d;
}

}  // namespace kintsugi::launch
