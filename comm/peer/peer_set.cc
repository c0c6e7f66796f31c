#include "comm/peer/peer_set.h"

#include <algorithm>
#include <string>

#include "comm/peer/peer_communicator.h"

namespace kintsugi::comm {

PeerSet::PeerSet(const PeerGroup& group, StopToken stop)
    : generation_(group.membership.generation), stop_(stop), policy_(WaitPolicy::for_group(group)) {}

void PeerSet::add(PeerCommunicator* communicator) {
  const std::lock_guard lock(mutex_);
  members_.push_back(communicator);
}

void PeerSet::remove(PeerCommunicator* communicator) {
  const std::lock_guard lock(mutex_);
  std::erase(members_, communicator);
}

Result<bool> PeerSet::progress() {
  KTG_RETURN_IF_ERROR(interrupted(false));
  bool moved = false;
  for (PeerCommunicator* member : members_) {
    KTG_ASSIGN_OR_RETURN(const bool this_one, member->progress());
    moved |= this_one;
  }
  return moved;
}

Status PeerSet::wait(Deadline deadline, const std::function<Status()>& late) {
  awaited_.clear();
  for (const PeerCommunicator* member : members_) {
    if (member->idle()) continue;
    awaited_.push_back({&member->group(), member->missing()});
  }
  return wait_for_any(awaited_, policy_, [&](bool slow) {
    KTG_RETURN_IF_ERROR(interrupted(slow));
    return slow && deadline.passed() ? late() : ok_status();
  });
}

Status PeerSet::interrupted(bool slow) {
  if (failed()) return status();
  if (stop_.requested()) {
    const PeerGroup& group = members_.front()->group();
    return fail(aborted("generation " + std::to_string(generation_) + " is over"),
                {.cause = StatusCode::kAborted, .origin = group.own_global()});
  }
  if (!slow) return ok_status();
  for (const PeerCommunicator* member : members_) {
    for (const PeerMemory& peer : member->group().peers) {
      const uint64_t stamp = peer.control->failed.stamp.load(std::memory_order_acquire);
      if (generation_of(stamp) != generation_ || count_of(stamp) == 0) continue;
      const FailureNote note = read_failure(stamp);
      return fail(aborted("rank " + std::to_string(note.origin) + " gave up generation " + std::to_string(generation_) +
                          ": " + std::string(to_string(note.cause))),
                  note);
    }
  }
  return ok_status();
}

Status PeerSet::fail(Status why, FailureNote note) {
  const std::lock_guard lock(mutex_);
  if (!status_.ok()) return status_;
  status_ = std::move(why);
  failed_.store(true, std::memory_order_release);
  for (const PeerCommunicator* member : members_) {
    const PeerGroup& group = member->group();
    publish(group, group.own().failed.stamp, failure_stamp(generation_, note));
  }
  return status_;
}

Status PeerSet::status() const {
  const std::lock_guard lock(mutex_);
  return status_;
}

}  // namespace kintsugi::comm
