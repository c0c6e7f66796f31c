// Every NCCL communicator of this process, so that one call ends them all at once.
//
// NCCL notices nothing of a dead peer: kernels spin, and calls wait, until the communicator is aborted. A rank that
// finds out by itself and aborts one communicator after another keeps its neighbours waiting; so whoever learns first
// that a generation is over (a thread that watches the stop word, a call that failed, a deadline) aborts all of them in
// one group. NCCL's part of it runs in a thread of its own (comm/nccl/nccl_handle.h): nobody waits for it but those who
// must know that nothing is launched any more (Communicator::drain), and the end of the process.
//
// An aborted collective's kernel ends with whatever lies in its buffers, and the device goes on with what is queued
// behind it. So NcclSetup::before_abort runs first: it raises the word that device code tests, so that nothing that
// follows counts.
// Thread safe. In builds without NCCL (no_nccl.cc) there is nothing to abort.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "runtime/base/deadline.h"
#include "runtime/base/status.h"

namespace kintsugi::comm {

class NcclHandle;

class NcclRegistry {
 public:
  static NcclRegistry& process();

  // Ends every communicator of generations up to `last_generation`; their calls return `why` (as kAborted) from now on.
  // Returns at once: kernels end and memory is given back behind it (0.1 to 0.6 s with several ranks on one GPU).
  void abort_all(int64_t last_generation, const Status& why);
  // Until NCCL has let go of all that was aborted: before the process ends, and where its memory is counted.
  Status wait_for_aborts(Deadline deadline);
  // Looks for errors that NCCL found by itself (a connection that broke); what has one is aborted, and its first error
  // is returned. For a thread that looks every now and then while the training thread is busy elsewhere.
  Status check_all();
  // Communicators that have not ended.
  int64_t size() const;

 private:
  friend class NcclHandle;
  friend class NcclAbort;
  void add(const std::shared_ptr<NcclHandle>& handle);
  void forget_expired();
  std::vector<std::shared_ptr<NcclHandle>> alive(int64_t last_generation) const;
  void abort_begun();
  void abort_ended();

  mutable std::mutex list_mutex_;  // never held while NCCL is called
  std::condition_variable abort_over_;
  std::vector<std::weak_ptr<NcclHandle>> handles_;
  int64_t aborts_ = 0;  // under way
};

}  // namespace kintsugi::comm
