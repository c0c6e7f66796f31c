#include "comm/nccl/nccl_handle.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "comm/nccl/cuda_status.h"
#include "runtime/base/log.h"

namespace kintsugi::comm {
namespace {

// A launch takes tens of microseconds; connecting takes a large part of a second, and the cores have other work.
constexpr int kEagerPolls = 2000;
constexpr auto kPatientPoll = std::chrono::microseconds(100);

}  // namespace

Result<ncclUniqueId> NcclHandle::create_id() {
  ncclUniqueId id;
  const ncclResult_t result = ncclGetUniqueId(&id);
  if (result != ncclSuccess) return unavailable(std::string("ncclGetUniqueId: ") + ncclGetErrorString(result));
  return id;
}

Result<std::shared_ptr<NcclHandle>> NcclHandle::begin(const ncclUniqueId& id, const Membership& membership,
                                                      int64_t max_ctas, StopToken stop,
                                                      std::function<void()> before_abort) {
  int device = 0;
  KTG_RETURN_IF_ERROR(cuda_status(cudaGetDevice(&device), "cudaGetDevice"));
  std::shared_ptr<NcclHandle> handle(new NcclHandle(membership, stop, device, std::move(before_abort)));
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  if (max_ctas > 0) {
    config.minCTAs = 1;
    config.maxCTAs = static_cast<int>(max_ctas);
  }
  const ncclResult_t result =
      ncclCommInitRankConfig(&handle->comm_, membership.world_size, id, membership.rank, &config);
  NcclRegistry::process().add(handle);
  if (result != ncclSuccess && result != ncclInProgress) {
    return handle->fail(handle->error_of(result, "ncclCommInitRankConfig"));
  }
  return handle;
}

NcclHandle::~NcclHandle() {
  NcclRegistry::process().forget_expired();
  if (const ncclComm_t comm = take(); comm != nullptr) {
    (void)NcclAbort::begin({{comm, device_}}, "its owner is gone");
  }
}

std::string NcclHandle::describe(const char* what) const {
  return "rank " + std::to_string(membership_.rank) + " generation " + std::to_string(membership_.generation) +
         ": NCCL " + what;
}

Status NcclHandle::error_of(ncclResult_t result, const char* what) {
  std::string message = describe(what) + ": " + ncclGetErrorString(result);
  if (const char* detail = ncclGetLastError(nullptr); detail != nullptr && detail[0] != '\0') {
    message += std::string(" (") + detail + ")";
  }
  switch (result) {
    case ncclUnhandledCudaError:
      return device_lost(std::move(message));
    case ncclSystemError:
    case ncclRemoteError:
      return unavailable(std::move(message));
    default:
      return internal_error(std::move(message));
  }
}

Status NcclHandle::settle(ncclResult_t result, const char* what, Deadline deadline) {
  for (int polls = 0; result == ncclInProgress; ++polls) {
    if (failed()) return status();
    if (stop_.requested()) {
      return fail(aborted("generation " + std::to_string(membership_.generation) + " is over"));
    }
    if (deadline.passed()) return fail(deadline_exceeded(describe(what) + " did not get there in time"));
    if (polls > kEagerPolls) {
      std::this_thread::sleep_for(kPatientPoll);
    } else {
      ::sched_yield();
    }
    const std::lock_guard lock(call_mutex_);
    if (comm_ == nullptr) break;
    const ncclResult_t asked = ncclCommGetAsyncError(comm_, &result);
    if (asked != ncclSuccess) result = asked;
  }
  if (failed()) return status();
  if (result != ncclSuccess) return fail(error_of(result, what));
  return ok_status();
}

Status NcclHandle::wait_ready(Deadline deadline) {
  if (failed()) return status();
  if (ready_) return ok_status();
  KTG_RETURN_IF_ERROR(settle(ncclInProgress, "connecting to the peers", deadline));
  ready_ = true;
  return ok_status();
}

Status NcclHandle::call(const char* what, const std::function<ncclResult_t(ncclComm_t)>& calls, Deadline deadline) {
  KTG_RETURN_IF_ERROR(wait_ready(deadline));
  ncclResult_t result;
  {
    const std::lock_guard lock(call_mutex_);
    if (comm_ == nullptr) return status();
    result = calls(comm_);
  }
  return settle(result, what, deadline);
}

Status NcclHandle::call_group(const char* what, const std::function<ncclResult_t(ncclComm_t)>& calls,
                              Deadline deadline) {
  return call(
      what,
      [&calls](ncclComm_t comm) {
        if (const ncclResult_t begun = ncclGroupStart(); begun != ncclSuccess) return begun;
        const ncclResult_t made = calls(comm);
        const ncclResult_t ended = ncclGroupEnd();  // in any case: the group belongs to this thread
        return made != ncclSuccess && made != ncclInProgress ? made : ended;
      },
      deadline);
}

Status NcclHandle::check() {
  if (failed()) return status();
  ncclResult_t result = ncclSuccess;
  {
    const std::lock_guard lock(call_mutex_);
    if (comm_ == nullptr) return status();
    const ncclResult_t asked = ncclCommGetAsyncError(comm_, &result);
    if (asked != ncclSuccess) result = asked;
  }
  if (result == ncclSuccess || result == ncclInProgress) return ok_status();
  return fail(error_of(result, "collective"));
}

void NcclHandle::finish(Deadline deadline) {
  if (failed()) return;
  if (!ready_ || stop_.requested()) {
    (void)fail(aborted("the communicator ended before its work")).ok();
    return;
  }
  const Status flushed = call(
      "finalize", [](ncclComm_t comm) { return ncclCommFinalize(comm); }, deadline);
  if (!flushed.ok()) return;  // aborted by then
  ncclComm_t comm;
  {
    const std::lock_guard lock(call_mutex_);
    comm = std::exchange(comm_, nullptr);
  }
  if (comm != nullptr) (void)ncclCommDestroy(comm);
}

Status NcclHandle::wait_halted(Deadline deadline) {
  for (;;) {
    std::shared_ptr<NcclAbort> abort;
    {
      const std::lock_guard lock(call_mutex_);
      if (comm_ == nullptr && !taken_) return ok_status();
      abort = abort_;
    }
    if (abort) return abort->wait_halted(deadline);
    // Whoever marked it as failed is about to take it.
    if (deadline.passed()) return deadline_exceeded(describe("abort") + " did not begin in time");
    std::this_thread::sleep_for(kPatientPoll);
  }
}

Status NcclHandle::fail(Status why) {
  if (!failed() && why.code() != StatusCode::kAborted) log().error("{}", why.message());
  mark_failed(why);
  NcclRegistry::process().abort_all(membership_.generation, why);
  return status();
}

void NcclHandle::mark_failed(const Status& why) {
  const std::lock_guard lock(status_mutex_);
  if (failed_) return;
  status_ = why;
  failed_.store(true, std::memory_order_release);
}

Status NcclHandle::status() const {
  const std::lock_guard lock(status_mutex_);
  return status_;
}

void NcclHandle::drop_before_abort() {
  const std::lock_guard lock(hook_mutex_);
  before_abort_ = nullptr;
}

void NcclHandle::announce_abort() {
  const std::lock_guard lock(hook_mutex_);
  if (before_abort_ && !abort_announced_) before_abort_();
  abort_announced_ = true;
}

ncclComm_t NcclHandle::take() {
  const std::lock_guard lock(call_mutex_);
  taken_ = taken_ || comm_ != nullptr;
  return std::exchange(comm_, nullptr);
}

void NcclHandle::set_abort(std::shared_ptr<NcclAbort> abort) {
  const std::lock_guard lock(call_mutex_);
  abort_ = std::move(abort);
}

std::shared_ptr<NcclAbort> NcclAbort::begin(std::vector<Doomed> doomed, std::string why) {
  auto abort = std::make_shared<NcclAbort>();
  NcclRegistry::process().abort_begun();
  std::thread([abort, doomed = std::move(doomed), why = std::move(why)] {
    const int64_t began_ns = monotonic_ns();
    // Within a group the calls raise the flags that kernels and threads look at, wait for launches that are under way,
    // and leave the rest to the group's end.
    (void)ncclGroupStart();
    for (const Doomed& d : doomed) {
      (void)cudaSetDevice(d.device);
      (void)ncclCommAbort(d.comm);
    }
    const int64_t halted_ns = monotonic_ns();
    {
      const std::lock_guard lock(abort->mutex_);
      abort->halted_ = true;
    }
    abort->changed_.notify_all();
    (void)ncclGroupEnd();
    log().info("aborted {} communicators: told to end in {:.1f} ms, gone in {:.1f} ms: {}", doomed.size(),
               static_cast<double>(halted_ns - began_ns) / 1e6, static_cast<double>(monotonic_ns() - began_ns) / 1e6,
               why);
    NcclRegistry::process().abort_ended();
  }).detach();
  return abort;
}

Status NcclAbort::wait_halted(Deadline deadline) {
  std::unique_lock lock(mutex_);
  while (!halted_) {
    if (deadline.passed()) return deadline_exceeded("NCCL does not stop launching");
    changed_.wait_for(lock, std::chrono::milliseconds(1));
  }
  return ok_status();
}

}  // namespace kintsugi::comm
