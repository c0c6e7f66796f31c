// The agent's main loop: descriptors, one function each, and a deadline. Everything the agent does happens inside one
// of these functions, on one thread, so nothing in it needs a lock.
#pragma once

#include <poll.h>

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

namespace kintsugi::launch {

class EventLoop {
 public:
  // Calls on_ready while `fd` is readable (or its peer is gone). `wants_to_write`, where given, is asked before each
  // wait, and on_ready is called for writability, too, while it says true.
  void add(int fd, std::function<void()> on_ready, std::function<bool()> wants_to_write = nullptr);
  // Also from inside a function of the loop.
  void remove(int fd);
  // Waits until something is ready or due_ns (CLOCK_MONOTONIC) has come, and calls what is.
  void run_once(int64_t due_ns);

 private:
  struct Entry {
    std::function<void()> on_ready;
    std::function<bool()> wants_to_write;
    uint64_t id;
  };
  std::map<int, Entry> entries_;
  uint64_t next_id_ = 1;
  std::vector<pollfd> polled_;
  std::vector<uint64_t> polled_ids_;
};

}  // namespace kintsugi::launch
