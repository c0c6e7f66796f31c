#include "comm/nccl/nccl_registry.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "comm/nccl/nccl_handle.h"
#include "runtime/base/deadline.h"
#include "runtime/base/log.h"

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
  std::erase_if(handles, [](const auto& handle) { return handle->abort_claimed_.exchange(true); });
  if (handles.empty()) return;
  const int64_t began_ns = monotonic_ns();
  const std::lock_guard lock(nccl_mutex_);
  if (std::none_of(handles.begin(), handles.end(), [](const auto& handle) { return handle->comm_ != nullptr; })) return;
  (void)ncclGroupStart();
  for (const auto& handle : handles) handle->abort_now();
  (void)ncclGroupEnd();
  log().info("aborted {} communicators up to generation {} in {:.1f} ms: {}", handles.size(), last_generation,
             static_cast<double>(monotonic_ns() - began_ns) / 1e6, reason.message());
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
