// The terminal, for a process that must never wait for it: text goes to a thread of its own that writes it out. When
// whoever reads standard output stops reading (a pager, Ctrl-S), lines beyond a bound are dropped and counted; training
// and the control plane go on. Thread safe.
#pragma once

#include <memory>
#include <string_view>

#include "runtime/base/deadline.h"

namespace kintsugi::launch {

class Console {
 public:
  static constexpr size_t kMaxWaiting = 4 << 20;  // bytes

  explicit Console(int fd);
  // Waits two seconds for what is left to be written, then leaves it.
  ~Console();

  // Whole lines. Does not block. The first call starts the thread, so that signals can be blocked before.
  void print(std::string_view text);
  // Until all that was printed so far is written, or the deadline.
  void flush(Deadline deadline);

 private:
  struct State;
  // Shared with the thread, which is left behind when it is stuck in a write at the end.
  const std::shared_ptr<State> state_;
};

}  // namespace kintsugi::launch
