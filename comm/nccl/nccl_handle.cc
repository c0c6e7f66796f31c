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
  const std::lock_guard lock(NcclRegistry::process().nccl_mutex_);
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
  NcclRegistry& registry = NcclRegistry::process();
  ncclResult_t result;
  {
    const std::lock_guard lock(registry.nccl_mutex_);
    result = ncclCommInitRankConfig(&handle->comm_, membership.world_size, id, membership.rank, &config);
  }
  registry.add(handle);
  if (result != ncclSuccess && result != ncclInProgress) {
    return handle->fail(handle->error_of(result, "ncclCommInitRankConfig"));
  }
  return handle;
}

NcclHandle::~NcclHandle() {
  NcclRegistry& registry = NcclRegistry::process();
  registry.forget_expired();
  const std::lock_guard lock(registry.nccl_mutex_);
  if (comm_ == nullptr) return;
  (void)ncclGroupStart();
  abort_now();
  (void)ncclGroupEnd();
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
  std::mutex& nccl_mutex = NcclRegistry::process().nccl_mutex_;
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
    const std::lock_guard lock(nccl_mutex);
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
    const std::lock_guard lock(NcclRegistry::process().nccl_mutex_);
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
    const std::lock_guard lock(NcclRegistry::process().nccl_mutex_);
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
  const std::lock_guard lock(NcclRegistry::process().nccl_mutex_);
  if (comm_ == nullptr) return;
  (void)ncclCommDestroy(std::exchange(comm_, nullptr));
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

void NcclHandle::abort_now() {
  if (comm_ == nullptr) return;
  (void)cudaSetDevice(device_);
  (void)ncclCommAbort(std::exchange(comm_, nullptr));
}

}  // namespace kintsugi::comm
