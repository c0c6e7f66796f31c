#include "launch/supervisor.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

namespace kintsugi::launch {
namespace {

constexpr int64_t kNsPerMs = 1'000'000;
// Ranks that fail for one reason (a missing file) fail within this of each other; the lowest one speaks.
constexpr int64_t kFailureGatherMs = 1'000;
constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

// The step that a process was working on: deaths "at the same step" are counted by it, recoveries to the step included.
int64_t step_at_death(const Progress& last, const Verdict& verdict) {
  if (verdict.generation == 0) return 0;
  return std::max(last.begun_step, verdict.committed_step + 1);
}

std::string what_happened(const Death& d) {
  return fmt::format("{}rank {} {}", d.agent ? "the agent of " : "", d.rank, d.hung ? "hung" : "died");
}

}  // namespace

Supervisor::Supervisor(int world_size, const SupervisorPolicy& policy, CheckpointRef resume_from, int64_t now_ns)
    : policy_(policy), ranks_(static_cast<size_t>(world_size)), checkpoint_(std::move(resume_from)) {
  for (Rank& r : ranks_) r.since_ns = now_ns;
}

void Supervisor::parked(int rank, const Progress& progress, int64_t now_ns) {
  if (over_) return;
  Rank& r = ranks_[static_cast<size_t>(rank)];
  const bool survivor = r.phase == Phase::kRunning || r.phase == Phase::kFinished;
  // A survivor may see the stop word, which the dead rank's agent raises at once, before the news arrives here.
  if (!gathering_) begin_generation(fmt::format("rank {} stopped", rank), now_ns);
  r.phase = Phase::kParked;
  r.progress = progress;
  if (progress.updated_step >= 0) r.known_step = progress.updated_step;
  best_step_ = std::max({best_step_, progress.updated_step, progress.reduced_step});
  if (recovery_) (survivor ? recovery_->stopped_ns : recovery_->ready_ns) = now_ns;
  end_when_failures_are_known(now_ns);
  decide_when_all_parked(now_ns);
}

void Supervisor::died(const Death& death, const Progress& last, int64_t now_ns) {
  if (over_) return;
  Rank& r = ranks_[static_cast<size_t>(death.rank)];
  if (r.phase == Phase::kFailed) return;  // it said so before it went
  Death d = death;
  d.step = step_at_death(last, last_);
  r.known_step = std::max(r.known_step, last.updated_step);
  r.deaths = r.death_step == d.step ? r.deaths + 1 : 1;
  r.death_step = d.step;
  const std::string where = last_.generation == 0 ? "during start-up" : fmt::format("at step {}", d.step);
  if (r.deaths >= policy_.max_restarts) {
    return end(1, fmt::format("rank {} died {} times {} (recovery.max_restarts = {}): giving up", death.rank, r.deaths,
                              where, policy_.max_restarts));
  }
  if (!gathering_) begin_generation(what_happened(d) + " " + where, now_ns);
  r.phase = Phase::kStarting;
  r.since_ns = now_ns;
  r.progress = {};
  idle_generations_ = 0;
  if (!recovery_) return;  // a death before the first generation is part of the start
  if (recovery_->deaths.empty()) {
    recovery_->began_ns = std::min(recovery_->began_ns, d.detected_ns);
    recovery_->cause = what_happened(d) + " " + where;
  }
  recovery_->deaths.push_back(d);
  if (d.announced_ns != 0) recovery_->announced_ns = d.announced_ns;
}

void Supervisor::trouble(int rank, int64_t generation, const std::string& reason, int64_t now_ns) {
  if (over_ || gathering_ || generation != generation_) return;  // news of a generation that is over anyway
  begin_generation(fmt::format("rank {}: {}", rank, reason), now_ns);
}

void Supervisor::failed(int rank, int exit_code, const std::string& message, int64_t now_ns) {
  if (over_) return;
  Rank& r = ranks_[static_cast<size_t>(rank)];
  r.phase = Phase::kFailed;
  r.exit_code = exit_code;
  r.failure = message;
  if (failure_due_ns_ == 0) failure_due_ns_ = now_ns + kFailureGatherMs * kNsPerMs;
  end_when_failures_are_known(now_ns);
}

void Supervisor::resumed(int rank, int64_t generation, const EntryTimes& times) {
  if (over_ || gathering_ || generation != generation_) return;
  Rank& r = ranks_[static_cast<size_t>(rank)];
  r.resumed = true;
  if (times.committed_ns != 0) idle_generations_ = 0;
  if (!recovery_) return;
  recovery_->ranks[static_cast<size_t>(rank)] = times;
  EntryTimes& latest = recovery_->entry;
  for (int64_t EntryTimes::*const moment :
       {&EntryTimes::stopped_ns, &EntryTimes::drained_ns, &EntryTimes::entered_ns, &EntryTimes::communicator_ns,
        &EntryTimes::fetched_ns, &EntryTimes::compared_ns, &EntryTimes::state_ns, &EntryTimes::begun_ns,
        &EntryTimes::committed_ns}) {
    latest.*moment = std::max(latest.*moment, times.*moment);
  }
  if (std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& x) { return x.resumed; })) complete_recovery();
}

void Supervisor::finished(int rank, bool stopped) {
  // After an announcement the rank stops waiting for its peers, and reports by parked().
  if (over_ || gathering_) return;
  Rank& r = ranks_[static_cast<size_t>(rank)];
  r.phase = Phase::kFinished;
  r.stopped = stopped;
  leave_when_all_finished();
}

void Supervisor::tick(int64_t now_ns) {
  if (over_) return;
  end_when_failures_are_known(now_ns);
  if (over_ || !gathering_) return;
  for (size_t i = 0; i < ranks_.size(); ++i) {
    Rank& r = ranks_[i];
    const bool must_stop = r.phase == Phase::kRunning || r.phase == Phase::kFinished;
    const bool late =
        (must_stop && now_ns >= ack_due_ns_) || (r.phase == Phase::kStarting && policy_.hang_timeout_ms > 0 &&
                                                 now_ns >= r.since_ns + policy_.hang_timeout_ms * kNsPerMs);
    if (!late) continue;
    actions_.push_back({.kind = Action::Kind::kKill, .rank = static_cast<int>(i)});
    // Its death will be reported; should that be lost, ask again.
    if (r.phase == Phase::kStarting) r.since_ns = now_ns;
  }
  if (now_ns >= ack_due_ns_) ack_due_ns_ = now_ns + policy_.ack_timeout_ms * kNsPerMs;
}

int64_t Supervisor::due_ns() const {
  if (over_) return kNever;
  int64_t due = failure_due_ns_ != 0 ? failure_due_ns_ : kNever;
  if (!gathering_) return due;
  for (const Rank& r : ranks_) {
    if (r.phase == Phase::kRunning || r.phase == Phase::kFinished) due = std::min(due, ack_due_ns_);
    if (r.phase == Phase::kStarting && policy_.hang_timeout_ms > 0) {
      due = std::min(due, r.since_ns + policy_.hang_timeout_ms * kNsPerMs);
    }
  }
  return due;
}

void Supervisor::checkpoint_committed(const CheckpointRef& checkpoint) { checkpoint_ = checkpoint; }

std::vector<Action> Supervisor::take_actions() { return std::exchange(actions_, {}); }

void Supervisor::begin_generation(const std::string& cause, int64_t now_ns) {
  ++generation_;
  gathering_ = true;
  ack_due_ns_ = now_ns + policy_.ack_timeout_ms * kNsPerMs;
  for (Rank& r : ranks_) r.resumed = false;
  if (!recovery_) recovery_ = Recovery{.cause = cause, .began_ns = now_ns};
  recovery_->announced_ns = now_ns;
  recovery_->stopped_ns = recovery_->ready_ns = 0;
  recovery_->entry = {};
  recovery_->ranks.assign(ranks_.size(), {});
  actions_.push_back({.kind = Action::Kind::kAnnounce, .generation = generation_, .text = cause});
  if (++idle_generations_ > policy_.max_restarts) {
    end(1, fmt::format("{} generations in a row ended without a step (last: {}): giving up", idle_generations_, cause));
  }
}

void Supervisor::decide_when_all_parked(int64_t now_ns) {
  if (over_ || !gathering_ || failure_due_ns_ != 0) return;
  std::vector<Progress> progress;
  for (const Rank& r : ranks_) {
    if (r.phase != Phase::kParked) return;
    progress.push_back(r.progress);
  }
  const Result<Decision> decision = decide({.generation = generation_,
                                            .ranks = progress,
                                            .last = last_,
                                            .checkpoint = checkpoint_,
                                            .holders = policy_.holders,
                                            .snapshots = policy_.snapshots,
                                            .policy = policy_.source});
  if (!decision.ok()) return end(1, decision.status().message());
  last_ = decision->verdict;
  gathering_ = false;
  for (Rank& r : ranks_) {
    r.phase = Phase::kRunning;
    r.stopped = false;
  }
  if (recovery_) {
    recovery_->generation = generation_;
    recovery_->verdict_ns = now_ns;
    recovery_->committed_step = last_.committed_step;
    // A step counts as committed when a survivor has it; when nobody is left, when anybody had it.
    int64_t committed = best_step_;
    if (last_.source != StateSource::kSurvivors) {
      for (const Rank& r : ranks_) committed = std::max(committed, r.known_step);
    }
    recovery_->steps_lost += std::max<int64_t>(0, committed - last_.committed_step);
    recovery_->source = last_.source;
    recovery_->source_rank = last_.source_rank;
    recovery_->decision = decision->reason;
  }
  best_step_ = last_.committed_step;
  for (Rank& r : ranks_) r.known_step = last_.committed_step;
  actions_.push_back(
      {.kind = Action::Kind::kVerdict, .generation = generation_, .text = decision->reason, .verdict = last_});
}

void Supervisor::leave_when_all_finished() {
  if (!std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& r) { return r.phase == Phase::kFinished; })) return;
  if (recovery_) complete_recovery();
  const bool stopped = std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& r) { return r.stopped; });
  over_ = true;
  actions_.push_back({.kind = Action::Kind::kLeave, .exit_code = stopped ? 75 : 0});
}

void Supervisor::end_when_failures_are_known(int64_t now_ns) {
  if (over_ || failure_due_ns_ == 0) return;
  // While starting, wait for the others' word; later a failure is a rank's own, and the others are busy.
  if (now_ns < failure_due_ns_ && last_.generation == 0 && !none_in(Phase::kStarting)) return;
  for (size_t i = 0; i < ranks_.size(); ++i) {
    if (ranks_[i].phase == Phase::kFailed)
      return end(ranks_[i].exit_code, fmt::format("rank {}: {}", i, ranks_[i].failure));
  }
}

void Supervisor::complete_recovery() {
  actions_.push_back({.kind = Action::Kind::kResumed, .generation = generation_, .recovery = std::move(*recovery_)});
  recovery_.reset();
}

void Supervisor::end(int exit_code, std::string text) {
  if (over_) return;
  over_ = true;
  actions_.push_back({.kind = Action::Kind::kEnd, .exit_code = exit_code, .text = std::move(text)});
}

bool Supervisor::none_in(Phase phase) const {
  return std::none_of(ranks_.begin(), ranks_.end(), [phase](const Rank& r) { return r.phase == phase; });
}

}  // namespace kintsugi::launch
