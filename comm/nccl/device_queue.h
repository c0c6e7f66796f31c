// The communicator's stream, and events that are used again and again. For the .cc files of this folder.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <utility>
#include <vector>

#include "comm/nccl/cuda_status.h"

namespace kintsugi::comm {

// A stream with the highest priority of the current device.
class DeviceQueue {
 public:
  static Result<DeviceQueue> create() {
    int least = 0, greatest = 0;
    KTG_RETURN_IF_ERROR(
        cuda_status(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange"));
    DeviceQueue queue;
    KTG_RETURN_IF_ERROR(cuda_status(cudaStreamCreateWithPriority(&queue.stream_, cudaStreamNonBlocking, greatest),
                                    "cudaStreamCreateWithPriority"));
    return queue;
  }
  DeviceQueue(DeviceQueue&& other) noexcept : stream_(std::exchange(other.stream_, nullptr)) {}
  DeviceQueue& operator=(DeviceQueue&& other) noexcept {
    std::swap(stream_, other.stream_);
    return *this;
  }
  ~DeviceQueue() {
    if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);  // what is queued runs to its end
  }
  cudaStream_t stream() const { return stream_; }

 private:
  DeviceQueue() = default;
  cudaStream_t stream_ = nullptr;
};

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
