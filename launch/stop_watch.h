// A thread of the worker that ends a generation on the device the moment its stop word is raised, whatever the training
// thread is doing: it may be waiting for a device that a dead peer keeps waiting.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>

#include "launch/control_page.h"

namespace kintsugi::launch {

class StopWatch {
 public:
  struct Actions {
    // Generations below `stop_generation` are over. Once for each raise that is seen, the newest only.
    std::function<void(int64_t stop_generation)> stop;
    // A few times a second.
    std::function<void()> look_around;
  };
  // `page` outlives it. Raises before this call count, too.
  StopWatch(ControlPage& page, Actions actions);
  // Waits for a call that is running.
  ~StopWatch();

 private:
  ControlPage& page_;
  const Actions actions_;
  std::atomic<bool> end_{false};
  std::thread thread_;
};

}  // namespace kintsugi::launch
