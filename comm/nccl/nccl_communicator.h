// Communicator among GPU ranks, over NCCL: collectives on a stream of its own with the highest priority.
//
//   a call       the communicator's stream waits for what is queued on the caller's stream, then the collective is
//                launched. The host waits until NCCL has launched it (tens of microseconds), not for the result
//   Work::wait   the caller's stream waits for the collective; the host does not. An error known by then is returned
//   Work::poll   whether the result is there; looks for errors that NCCL found meanwhile
//   barrier      the host waits until this rank's collectives are done and all ranks are here
//   fetch        the host waits too (recovery alone uses it): for the stream's earlier work in the call, for the copy
//                in Work::wait. Where x lies in the device heap at the source's offset, and the source is on this host,
//                receivers copy it out of the source's memory (CUDA IPC), and NCCL is not needed; else NCCL sends it
//
// Memory is the device's; host pointers are refused (kInvalidArgument): the control communicator serves those. But for
// fetch, which also moves pinned memory of the host (moments that are kept there), through NCCL.
//
// The control communicator is that of the same ranks and generation over host memory. It brings rank 0's NCCL id and
// every rank's memory handle to all ranks (there the segments are mapped already, its calls have deadlines and stop
// with the generation, and nothing has to listen or connect: a store would need a server that outlives workers), and it
// is what fetch and barrier synchronise by. So these count as calls on it: between a fetch and the end of its Work,
// every rank makes the same other calls on it, in the same order.
//
// Groups and channels: each group has a control communicator of its own, made with the others of this rank, and an NCCL
// communicator over that. Every rank makes them in the same order. Their kernels run at the same time, and each takes
// multiprocessors (comm.max_ctas); a fetch or barrier on one does not wait for the others'.
//
// A peer that dies is noticed by nobody here: NCCL waits for ever. Whoever learns of it raises the stop token and calls
// NcclRegistry::abort_all(). Aborted kernels then end within milliseconds, still writing to what they were given:
// drain() waits for that. NCCL's own clean-up goes on behind it, and the next generation's communicator is made
// meanwhile. With comm.check_calls every call is compared with the peers' first, as the other backends do always.
#pragma once

#include <functional>
#include <memory>

#include "comm/communicator.h"
#include "comm/nccl/device_heap.h"
#include "comm/nccl/nccl_registry.h"
#include "runtime/backend.h"

namespace kintsugi::comm {

// Device memory that all_reduce_fixed stages what it receives in.
inline constexpr int64_t kFixedOrderStagingBytes = int64_t{64} << 20;

struct NcclSetup {
  Communicator* control = nullptr;  // same membership; outlives the communicator
  runtime::Backend* backend = nullptr;
  DeviceHeap* heap = nullptr;  // null: fetch goes through NCCL; outlives the communicator
  // kFixedOrderStagingBytes for this communicator alone, which outlive it: so no step allocates them, and the next
  // generation's communicator finds them. Null: all_reduce_fixed is refused (kFailedPrecondition).
  void* fixed_order_staging = nullptr;
  // Shuts the gate through which updates go. Called once for each communicator, before NCCL's kernels are aborted for
  // whatever reason, from the thread that aborts; must not block. Not called any more once the communicator is gone.
  std::function<void()> before_abort = nullptr;
};

// Returns once every rank has come and the exchange of ids is done; NCCL goes on connecting, and the first collective
// (or barrier) waits until it is through. A fetch out of the device heap need not wait for that. One rank alone needs
// no NCCL and gets a communicator that copies.
// kFailedPrecondition in builds without NCCL.
Result<std::unique_ptr<Communicator>> create_nccl_communicator(const NcclSetup& setup, const CommConfig& config,
                                                               StopToken stop, Deadline deadline);

// Loads NCCL and its kernels, so that a spare's first communicator costs no more than any. Makes a communicator of one
// rank on the current device and ends it.
Status warm_up_nccl();

// "NCCL 2.28.9"; "no NCCL (...)" in builds without it.
std::string nccl_description();

}  // namespace kintsugi::comm
