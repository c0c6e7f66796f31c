// Every NCCL communicator of this process, so that one call ends them all at once.
//
// NCCL notices nothing of a dead peer: kernels spin, and calls wait, until the communicator is aborted. A rank that
// finds out by itself and aborts one communicator after another keeps its neighbours waiting; so whoever learns first
// that a generation is over (a thread that watches the stop word, a call that failed, a deadline) aborts all of them in
// one group. While it does nobody else is inside NCCL: calls are made under one lock and never block there, because
// communicators are non-blocking and are polled with the lock given back in between.
//
// An aborted collective's kernel ends with whatever lies in its buffers, and the device goes on with what is queued
// behind it. So NcclSetup::before_abort runs first: it raises the word that device code tests, so that nothing that
// follows counts.
// Thread safe. In builds without NCCL (no_nccl.cc) there is nothing to abort.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "runtime/base/status.h"

namespace kintsugi::comm {

class NcclHandle;

class NcclRegistry {
 public:
  static NcclRegistry& process();

  // Ends every communicator of generations up to `last_generation`; their calls return `why` (as kAborted) from now on.
  // Returns when NCCL has let go of their memory (0.1 to 0.6 s with several ranks on one GPU); at once when there are
  // none, and for those that another thread is aborting already.
  void abort_all(int64_t last_generation, const Status& why);
  // Looks for errors that NCCL found by itself (a connection that broke); what has one is aborted, and its first error
  // is returned. For a thread that looks every now and then while the training thread is busy elsewhere.
  Status check_all();
  // Communicators that have not ended.
  int64_t size() const;

 private:
  friend class NcclHandle;
  void add(const std::shared_ptr<NcclHandle>& handle);
  void forget_expired();
  std::vector<std::shared_ptr<NcclHandle>> alive(int64_t last_generation) const;

  mutable std::mutex list_mutex_;  // of the list; never held while NCCL is called
  std::vector<std::weak_ptr<NcclHandle>> handles_;
  std::mutex nccl_mutex_;  // whoever holds it is inside NCCL
};

}  // namespace kintsugi::comm
