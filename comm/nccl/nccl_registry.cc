#include "comm/nccl/nccl_registry.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <string>
#include <utility>

#include "comm/nccl/nccl_handle.h"

namespace kintsugi::comm {

NcclRegistry& NcclRegistry::process() {
  // Never destroyed: NCCL's own threads and late aborts outlive main().
  static NcclRegistry& registry = *new NcclRegistry;
  return registry;
}

void NcclRegistry::add(const std::shared_ptr<NcclHandle>& handle) {
  const std::lock_guard lock(list_mutex_);
  std::erase_if(handles_, [](const std::weak_ptr<NcclHandle>& h) { return h.expired(); });
  handles_.push_back(handle);
}

void NcclRegistry::forget_expired() {
  const std::lock_guard lock(list_mutex_);
  std::erase_if(handles_, [](const std::weak_ptr<NcclHandle>& h) { return h.expired(); });
}

std::vector<std::shared_ptr<NcclHandle>> NcclRegistry::alive(int64_t last_generation) const {
  const std::lock_guard lock(list_mutex_);
  std::vector<std::shared_ptr<NcclHandle>> out;
  for (const std::weak_ptr<NcclHandle>& weak : handles_) {
    std::shared_ptr<NcclHandle> handle = weak.lock();
    if (handle && handle->generation() <= last_generation) out.push_back(std::move(handle));
  }
  return out;
}

int64_t NcclRegistry::size() const {
  const auto all = alive(std::numeric_limits<int64_t>::max());
  return std::count_if(all.begin(), all.end(), [](const auto& handle) { return !handle->failed(); });
}

void NcclRegistry::abort_all(int64_t last_generation, const Status& why) {
  std::vector<std::shared_ptr<NcclHandle>> handles = alive(last_generation);
  if (handles.empty()) return;
  for (const auto& handle : handles) handle->announce_abort();
  // Callers that poll see this between two polls, and leave NCCL.
  const Status reason = why.code() == StatusCode::kAborted ? why : aborted(why.message());
  for (const auto& handle : handles) handle->mark_failed(reason);
  std::vector<NcclAbort::Doomed> doomed;
  std::erase_if(handles, [&doomed](const auto& handle) {
    const ncclComm_t comm = handle->take();
    if (comm != nullptr) doomed.push_back({comm, handle->device_});
    return comm == nullptr;
  });
  if (doomed.empty()) return;
  const std::shared_ptr<NcclAbort> abort = NcclAbort::begin(std::move(doomed), reason.message());
  for (const auto& handle : handles) handle->set_abort(abort);
}

void NcclRegistry::abort_begun() {
  const std::lock_guard lock(list_mutex_);
  ++aborts_;
}

void NcclRegistry::abort_ended() {
  {
    const std::lock_guard lock(list_mutex_);
    --aborts_;
  }
  abort_over_.notify_all();
}

Status NcclRegistry::wait_for_aborts(Deadline deadline) {
  std::unique_lock lock(list_mutex_);
  while (aborts_ > 0) {
    if (deadline.passed()) return deadline_exceeded("NCCL does not let go of " + std::to_string(aborts_) + " aborts");
    abort_over_.wait_for(lock, std::chrono::milliseconds(10));
  }
  return ok_status();
}

Status NcclRegistry::check_all() {
  Status first;
  for (const auto& handle : alive(std::numeric_limits<int64_t>::max())) {
    if (handle->failed()) continue;
    const Status checked = handle->check();
    if (first.ok() && !checked.ok()) first = checked;
  }
  return first;
}

}  // namespace kintsugi::comm
