// The communicators of one rank in one generation, as far as they share a fate: whoever waits on one of them makes
// progress on all, and the first error of one is the error of all.
//
// Progress: the caller's thread is all that carries a rank's collectives out. If rank 0 waited on communicator A alone,
// and rank 1 on B, neither would do its part of what the other waits for.
// Errors: a rank that gives up does so for its generation. The ranks that wait for it on other communicators must learn
// of it as well.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "comm/communicator.h"
#include "comm/peer/wait.h"

namespace kintsugi::comm {

class PeerCommunicator;

class PeerSet {
 public:
  // `group`: of any of the communicators.
  PeerSet(const PeerGroup& group, StopToken stop);

  void add(PeerCommunicator* communicator);
  void remove(PeerCommunicator* communicator);

  // Carries every queued call of all communicators as far as it goes now; true when anything moved.
  Result<bool> progress();
  // Until progress() can go on with anything. `late` makes the error of a passed deadline.
  Status wait(Deadline deadline, const std::function<Status()>& late);
  // By now more ranks have said where they run.
  void refresh_policy(const PeerGroup& group) { policy_ = WaitPolicy::for_group(group); }

  bool failed() const { return failed_.load(std::memory_order_acquire); }
  Status status() const;
  // Keeps the first error and tells the peers of all communicators: its code, and with which rank it began.
  Status fail(Status why, FailureNote note);

 private:
  Status interrupted(bool slow);

  const int64_t generation_;
  const StopToken stop_;
  WaitPolicy policy_;  // of the calling thread
  std::vector<Awaited> awaited_;

  std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;  // of what follows; the list changes only in the calling thread
  Status status_;
  std::vector<PeerCommunicator*> members_;
};

}  // namespace kintsugi::comm
