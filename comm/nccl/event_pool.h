// Events that are used again and again. For the .cc files of this folder.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <vector>

#include "comm/nccl/cuda_status.h"

namespace kintsugi::comm {

// Events of one thread. An event goes back when its last user drops it.
class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  using Event = std::shared_ptr<CUevent_st>;
  ~EventPool() {
    for (const cudaEvent_t event : free_) (void)cudaEventDestroy(event);
  }
  Result<Event> take() {
    cudaEvent_t event = nullptr;
    if (free_.empty()) {
      KTG_RETURN_IF_ERROR(
          cuda_status(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags"));
    } else {
      event = free_.back();
      free_.pop_back();
    }
    return Event(event, [pool = shared_from_this()](cudaEvent_t e) { pool->free_.push_back(e); });
  }

 private:
  std::vector<cudaEvent_t> free_;
};

}  // namespace kintsugi::comm
