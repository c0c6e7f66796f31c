#include "launch/stop_watch.h"

#include <chrono>
#include <utility>

#include "launch/futex.h"
#include "launch/scheduling.h"
#include "runtime/base/deadline.h"

namespace kintsugi::launch {
namespace {

constexpr auto kLookAroundEvery = std::chrono::milliseconds(250);

}  // namespace

StopWatch::StopWatch(ControlPage& page, Actions actions)
    : page_(page), actions_(std::move(actions)), thread_([this] {
        make_thread_urgent();
        for (int64_t handled = 0; !end_;) {
          const uint32_t signal = page_.stop_word.load(std::memory_order_acquire);
          const int64_t stop = page_.stop_generation.load(std::memory_order_acquire);
          if (stop > handled) {
            actions_.stop(stop);
            handled = stop;
            continue;
          }
          futex_wait(page_.stop_word, signal, Deadline::after(kLookAroundEvery));
          if (page_.stop_word.load(std::memory_order_acquire) == signal && !end_) actions_.look_around();
        }
      }) {}

StopWatch::~StopWatch() {
  end_ = true;
  futex_signal(page_.stop_word);
  thread_.join();
}

}  // namespace kintsugi::launch
