#include "launch/process_worker_link.h"

#include <algorithm>
#include <span>

#include "launch/futex.h"

namespace kintsugi::launch {
namespace {

using std::chrono::seconds;

// The agent reads all the time; if it does not for so long, it is stopped, and this worker has no reason to go on.
constexpr auto kSendPatience = seconds(60);

}  // namespace

ProcessWorkerLink::ProcessWorkerLink(ControlPage& page, int slot_index, int64_t incarnation, Channel channel)
    : page_(page),
      slot_(page.slots[slot_index]),
      slot_index_(slot_index),
      incarnation_(incarnation),
      channel_(std::move(channel)) {}

Status ProcessWorkerLink::send(MessageType type, int64_t value, std::string body) {
  Message m;
  m.type = type;
  m.rank = page_.rank;
  m.incarnation = incarnation_;
  m.generation = generation_;
  m.step = slot_.updated_step.load(std::memory_order_relaxed);
  m.value = value;
  m.body = std::move(body);
  const std::lock_guard lock(send_mutex_);
  return channel_.send(m, Deadline::after(kSendPatience));
}

StopToken ProcessWorkerLink::stop_token(int64_t generation) const { return {&page_.stop_generation, generation}; }

void ProcessWorkerLink::begun(int64_t step) {
  slot_.begun_step.store(step, std::memory_order_release);
  alive();
  if (times_.begun_ns == 0) times_.begun_ns = monotonic_ns();
}

void ProcessWorkerLink::left_vote(const VoteOutcome& vote) {
  slot_.vote = vote;
  slot_.reduced_step.store(vote.step, std::memory_order_release);
  alive();
}

void ProcessWorkerLink::updated(int64_t step) {
  if (slot_.reduced_step.load(std::memory_order_relaxed) != step) {
    // Not the end of a vote that this rank left: an update with the verdict's outcome, a fetch, a load, or a loss.
    slot_.vote = verdict_.vote.step == step ? verdict_.vote : VoteOutcome{};
    if (slot_.begun_step.load(std::memory_order_relaxed) != step) slot_.begun_step.store(std::max<int64_t>(step, 0));
    slot_.reduced_step.store(step, std::memory_order_release);
  }
  slot_.updated_step.store(step, std::memory_order_release);
  alive();
  if (!resumed_reported_ && times_.begun_ns != 0) {
    times_.committed_ns = monotonic_ns();
    report_resumed();
  }
}

void ProcessWorkerLink::alive() { slot_.heartbeat.fetch_add(1, std::memory_order_relaxed); }

void ProcessWorkerLink::entered(EntryMilestone milestone) {
  const auto moment = [&]() -> int64_t& {
    switch (milestone) {
      case EntryMilestone::kStopped:
        return times_.stopped_ns;
      case EntryMilestone::kDrained:
        return times_.drained_ns;
      case EntryMilestone::kCommunicator:
        return times_.communicator_ns;
      case EntryMilestone::kFetched:
        return times_.fetched_ns;
      case EntryMilestone::kCompared:
        return times_.compared_ns;
      case EntryMilestone::kState:
        break;
    }
    return times_.state_ns;
  };
  moment() = monotonic_ns();
  alive();
}

void ProcessWorkerLink::report_resumed() {
  resumed_reported_ = true;
  // A lost agent shows up at the next send that matters, and by the death signal.
  (void)send(MessageType::kResumed, 0, pack(times_)).ok();
}

Result<Verdict> ProcessWorkerLink::await_verdict(int64_t generation, Deadline deadline) {
  generation_ = std::max(generation_, generation);
  KTG_RETURN_IF_ERROR(send(MessageType::kParked, 0, pack(page_.progress(slot_index_))));
  while (slot_.verdict_generation.load(std::memory_order_acquire) <= generation_) {
    const uint32_t seen = slot_.mail_word.load(std::memory_order_acquire);
    if (slot_.verdict_generation.load(std::memory_order_acquire) > generation_) break;
    if (complete()) return unavailable("the job is complete");
    if (deadline.passed())
      return deadline_exceeded("no verdict on the generation after " + std::to_string(generation_));
    futex_wait(slot_.mail_word, seen, deadline);
  }
  verdict_ = slot_.verdict;
  generation_ = verdict_.generation;
  times_ = {.stopped_ns = times_.stopped_ns, .drained_ns = times_.drained_ns, .entered_ns = monotonic_ns()};
  resumed_reported_ = false;
  alive();
  // State that is about to be overwritten counts no longer, even if this generation, too, ends before it was touched:
  // beside peers that did begin, it would be taken for the newest.
  const bool overwritten =
      verdict_.source != StateSource::kSurvivors || (verdict_.joining_ranks >> page_.rank & 1) != 0;
  if (overwritten) updated(-1);
  // What was kept of steps that are about to be made anew belongs to an abandoned future.
  if (verdict_.source != StateSource::kSurvivors) {
    for (SnapshotSlot& s : page_.snapshots) {
      if (s.held_step.load() > verdict_.committed_step) s.held_step = -1;
    }
  }
  return verdict_;
}

bool ProcessWorkerLink::claim_fault(int64_t index) {
  if (!page_.claim_fault(index)) return false;
  slot_.fault_ns.store(monotonic_ns(), std::memory_order_release);
  return true;
}

bool ProcessWorkerLink::stop_requested() const { return page_.stop_requested.load(std::memory_order_relaxed) != 0; }

int ProcessWorkerLink::free_snapshot_slot(bool keep_newest) {
  const std::span<SnapshotSlot> slots(page_.snapshots, static_cast<size_t>(page_.num_snapshot_slots));
  int64_t newest = -1;
  for (const SnapshotSlot& s : slots) newest = std::max(newest, s.held_step.load(std::memory_order_relaxed));
  // After a recovery a step may have been kept twice: one of them will do.
  const bool twice = std::count_if(slots.begin(), slots.end(), [newest](const SnapshotSlot& s) {
                       return s.held_step.load(std::memory_order_relaxed) == newest;
                     }) > 1;
  for (SnapshotSlot& s : slots) {
    if (s.state.load(std::memory_order_acquire) != static_cast<int32_t>(SnapshotSlotState::kFree)) continue;
    if (keep_newest && !twice && newest >= 0 && s.held_step.load(std::memory_order_relaxed) == newest) continue;
    s.held_step.store(-1, std::memory_order_release);
    return static_cast<int>(&s - slots.data());
  }
  return -1;
}

Status ProcessWorkerLink::snapshot_ready(int64_t step, int64_t cursor, int slot, bool save) {
  KTG_CHECK(slot >= 0 && slot < page_.num_snapshot_slots) << slot;
  SnapshotSlot& s = page_.snapshots[slot];
  s.step = step;
  s.cursor = cursor;
  s.held_step.store(step, std::memory_order_release);
  if (!save) return ok_status();
  s.sequence = page_.handed_sequence.fetch_add(1) + 1;
  s.state.store(static_cast<int32_t>(SnapshotSlotState::kHandedOver), std::memory_order_release);
  return send(MessageType::kSnapshot);  // a doorbell: the agent reads the page, after a death of ours, too
}

WorkerLink::HeldSnapshot ProcessWorkerLink::held_snapshot(int64_t step) const {
  for (int i = 0; i < page_.num_snapshot_slots; ++i) {
    const SnapshotSlot& s = page_.snapshots[i];
    if (s.held_step.load(std::memory_order_acquire) == step) return {.slot = i, .cursor = s.cursor};
  }
  return {};
}

Status ProcessWorkerLink::await_snapshots(Deadline deadline) {
  const int64_t last = page_.handed_sequence.load();
  const StopToken stop = stop_token(generation_);
  while (true) {
    const uint32_t seen = page_.snapshot_word.load(std::memory_order_acquire);
    if (page_.settled_sequence.load(std::memory_order_acquire) >= last) break;
    if (stop.requested()) return aborted("generation " + std::to_string(generation_) + " is over");
    if (deadline.passed()) return deadline_exceeded("waiting for snapshots to be written");
    alive();
    // A generation's end does not signal this word: look for it now and then.
    futex_wait(page_.snapshot_word, seen,
               std::min(deadline, Deadline::after(std::chrono::milliseconds(20)),
                        [](const Deadline& a, const Deadline& b) { return a.when() < b.when(); }));
  }
  if (page_.failed_sequence.load() == last && last > 0) return resource_exhausted(page_.failure);
  return ok_status();
}

Status ProcessWorkerLink::publish(std::string_view topic, std::string_view payload) {
  std::string body(topic);
  body.push_back('\0');
  body.append(payload);
  if (body.size() > Channel::kMaxBody) {
    return invalid_argument("publish: " + std::to_string(body.size()) + " bytes, at most " +
                            std::to_string(Channel::kMaxBody));
  }
  return send(MessageType::kPublish, 0, std::move(body));
}

Status ProcessWorkerLink::finished(std::string_view summary_json) { return finished(summary_json, false); }

Status ProcessWorkerLink::finished(std::string_view summary_json, bool stopped) {
  if (!resumed_reported_) report_resumed();
  KTG_RETURN_IF_ERROR(send(MessageType::kFinished, stopped, std::string(summary_json)));
  const StopToken stop = stop_token(generation_);
  while (!complete()) {
    if (stop.requested()) return aborted("a peer died before it was complete");
    const uint32_t seen = slot_.mail_word.load(std::memory_order_acquire);
    if (complete() || stop.requested()) continue;
    alive();
    // Ends by the peers' completion or by a new generation, whichever comes: no deadline of its own. The stop word
    // is not signalled here, so look at it now and then.
    futex_wait(slot_.mail_word, seen, Deadline::after(std::chrono::milliseconds(20)));
  }
  return ok_status();
}

bool ProcessWorkerLink::complete() const { return slot_.leave.load(std::memory_order_acquire) != 0; }

Status ProcessWorkerLink::trouble(const Status& reason) { return send(MessageType::kTrouble, 0, reason.to_string()); }

Status ProcessWorkerLink::bad_checkpoint(const Status& reason) {
  return send(MessageType::kBadCheckpoint, 0, reason.message());
}

Status ProcessWorkerLink::failed(int exit_code, std::string_view message) {
  return send(MessageType::kFailed, exit_code, std::string(message.substr(0, 8192)));
}

}  // namespace kintsugi::launch
