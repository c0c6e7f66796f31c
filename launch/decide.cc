#include "launch/decide.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace kintsugi::launch {
namespace {

// The newest step that all agents hold in memory; -1: there is none.
int64_t newest_held(const DecisionView& view) {
  if (!view.snapshots || view.ranks.empty()) return -1;
  const auto holds = [](const Progress& p, int64_t step) {
    return std::find(std::begin(p.held_steps), std::end(p.held_steps), step) != std::end(p.held_steps);
  };
  int64_t newest = -1;
  for (const int64_t step : view.ranks.front().held_steps) {
    if (step > newest &&
        std::all_of(view.ranks.begin(), view.ranks.end(), [&](const Progress& p) { return holds(p, step); })) {
      newest = step;
    }
  }
  return newest;
}

uint64_t holders_of(const DecisionView& view, size_t rank) {
  return view.holders.empty() ? ~uint64_t{0} : view.holders[rank];
}

// All ranks leave the state they have, or have lost. `why`: the first part of the sentence.
Decision go_back(const DecisionView& view, int64_t best_step, const std::string& why) {
  Decision d;
  d.verdict.generation = view.generation;
  const int64_t held = view.last.generation > 0 && view.policy == StatePolicy::kAuto ? newest_held(view) : -1;
  if (held >= 0 && (!view.checkpoint.exists() || held >= view.checkpoint.step)) {
    d.verdict.source = StateSource::kSnapshots;
    d.verdict.committed_step = held;
    d.reason = fmt::format("{}: all ranks go back to step {}, which every agent holds in memory", why, held);
  } else if (view.checkpoint.exists()) {
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
  if (d.steps_lost > 0) {
    d.reason += d.steps_lost == 1
                    ? fmt::format("; step {} is run again", best_step)
                    : fmt::format("; steps {} to {} are run again", d.verdict.committed_step + 1, best_step);
  }
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
  if (committed < 0) return go_back(view, committed, first ? "start" : "no rank has state");
  if (view.policy == StatePolicy::kCheckpoint && !all_have_state) {
    return go_back(view, committed, "recovery.source = \"checkpoint\"");
  }

  Decision d;
  d.verdict.generation = view.generation;
  d.verdict.source = StateSource::kSurvivors;
  d.verdict.committed_step = committed;
  d.verdict.vote = find_vote(view, committed);
  const bool vote_known = committed >= 1 && d.verdict.vote.step == committed;
  int num_late = 0, num_done = 0;
  const uint64_t living = view.ranks.size() == 64 ? ~uint64_t{0} : (uint64_t{1} << view.ranks.size()) - 1;
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
  uint64_t orphaned = 0;  // joining ranks whose state nobody holds any more
  for (size_t r = 0; r < view.ranks.size(); ++r) {
    const bool joins = (d.verdict.joining_ranks >> r & 1) != 0;
    if (joins && (holders_of(view, r) & living & ~d.verdict.joining_ranks) == 0) orphaned |= uint64_t{1} << r;
  }
  if (orphaned != 0) {
    const std::string what = fmt::format("the state of {} is held by nobody else", rank_list(orphaned));
    if (view.policy == StatePolicy::kPeer) return failed_precondition("recovery.source = \"peer\": " + what);
    return go_back(view, committed, what);
  }
  d.reason = num_late == 0   ? fmt::format("step {} is committed", committed)
             : num_done == 0 ? fmt::format("the vote of step {} was over: the survivors make its update", committed)
                             : fmt::format("step {} is committed: {} rank(s) make its update now", committed, num_late);
  if (d.verdict.joining_ranks != 0) {
    const bool one = (d.verdict.joining_ranks & (d.verdict.joining_ranks - 1)) == 0;
    d.reason += view.holders.empty() ? fmt::format("; {} take{} rank {}'s state", rank_list(d.verdict.joining_ranks),
                                                   one ? "s" : "", d.verdict.source_rank)
                                     : fmt::format("; {} take{} the state of a rank with the same shard",
                                                   rank_list(d.verdict.joining_ranks), one ? "s" : "");
  }
  return d;
}

}  // namespace kintsugi::launch
