// Owner of one ncclComm_t: non-blocking, aborted by anyone, polled after every call. For the .cc files of this folder.
//
// NCCL allows one thread at a time in a communicator, and any number in different ones (source: 2.28.9 keeps what
// communicators share behind locks of its own). So each handle has a lock of its own, and a communicator that is being
// aborted belongs to the thread that does it: the next generation's connects meanwhile.
//
// The rule that every method keeps (measured: sums are wrong otherwise): after a call that returns ncclInProgress
// nothing else is done with the communicator or its stream until ncclCommGetAsyncError says that it is over, because
// NCCL launches the kernels from a thread of its own.
#pragma once

#include <nccl.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/nccl/nccl_registry.h"

namespace kintsugi::comm {

// Communicators on their way out, in a thread of their own. Kernels end within milliseconds of ncclCommAbort, but the
// call returns only when NCCL's proxy threads have looked at the abort flag, which they do twice a second (source:
// 2.28.9, proxy.cc), and nobody has to wait for that.
class NcclAbort {
 public:
  struct Doomed {
    ncclComm_t comm;
    int device;
  };
  // Takes the communicators over; the registry counts them until NCCL has let go of them. `why` is for the log.
  static std::shared_ptr<NcclAbort> begin(std::vector<Doomed> doomed, std::string why);
  // Until kernels have been told to end and NCCL launches none any more.
  Status wait_halted(Deadline deadline);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool halted_ = false;
};

class NcclHandle final : public std::enable_shared_from_this<NcclHandle> {
 public:
  // A new rendezvous: rank 0's, told to the others out of band. Its thread waits for every rank to come.
  static Result<ncclUniqueId> create_id();
  // Begins to connect, and registers the communicator; the peers need not have come. On the current device.
  static Result<std::shared_ptr<NcclHandle>> begin(const ncclUniqueId& id, const Membership& membership,
                                                   int64_t max_ctas, StopToken stop,
                                                   std::function<void()> before_abort);
  // Whoever made it goes away; waits for a call that is running.
  void drop_before_abort();
  // Aborts what finish() has not ended.
  ~NcclHandle();
  NcclHandle(const NcclHandle&) = delete;

  // Until every rank has come and the communicator may be used.
  Status wait_ready(Deadline deadline);
  // Enqueues: `calls` makes NCCL calls and returns the first that is not a success. They are launched when this
  // returns ok. Waits for readiness first.
  Status call(const char* what, const std::function<ncclResult_t(ncclComm_t)>& calls, Deadline deadline);
  // The same for calls that belong together: between ncclGroupStart and ncclGroupEnd.
  Status call_group(const char* what, const std::function<ncclResult_t(ncclComm_t)>& calls, Deadline deadline);
  // Errors that NCCL found by itself.
  Status check();
  // The end of a healthy communicator: what peers still wait for is sent. Aborts when that takes longer.
  void finish(Deadline deadline);
  // Of a communicator that has failed: until no kernel of it is launched any more.
  Status wait_halted(Deadline deadline);

  // Makes `why` the first error, unless there is one, and aborts every communicator of this and older generations.
  // Returns the first error.
  Status fail(Status why);
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  Status status() const;
  int64_t generation() const { return membership_.generation; }
  const Membership& membership() const { return membership_; }
  bool stop_requested() const { return stop_.requested(); }

 private:
  friend class NcclRegistry;
  NcclHandle(const Membership& membership, StopToken stop, int device, std::function<void()> before_abort)
      : membership_(membership), stop_(stop), device_(device), before_abort_(std::move(before_abort)) {}
  Status settle(ncclResult_t result, const char* what, Deadline deadline);
  std::string describe(const char* what) const;
  Status error_of(ncclResult_t result, const char* what);
  void mark_failed(const Status& why);
  // Before an abort, from the aborting thread.
  void announce_abort();
  // What is left to abort: nothing when another thread has taken it, or when it has ended.
  ncclComm_t take();
  void set_abort(std::shared_ptr<NcclAbort> abort);

  const Membership membership_;
  const StopToken stop_;
  const int device_;
  std::mutex hook_mutex_;
  std::function<void()> before_abort_;
  bool abort_announced_ = false;
  std::mutex call_mutex_;             // whoever holds it may be inside NCCL with comm_
  ncclComm_t comm_ = nullptr;         // null once it has ended, or somebody aborts it
  bool taken_ = false;                // by somebody who aborts it
  std::shared_ptr<NcclAbort> abort_;  // who has
  bool ready_ = false;                // of the calling thread
  std::atomic<bool> failed_{false};
  mutable std::mutex status_mutex_;
  Status status_;
};

}  // namespace kintsugi::comm
