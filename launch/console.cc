#include "launch/console.h"

#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

namespace kintsugi::launch {

struct Console::State {
  explicit State(int f) : fd(f) {}

  const int fd;
  std::mutex mutex;
  std::condition_variable changed;
  std::string waiting;
  bool started = false;
  bool writing = false;
  bool ending = false;
  int64_t dropped_lines = 0;

  void write_out();
  // False: the reader is gone for good.
  bool write_some(std::string_view text, size_t* done) const;
};

Console::Console(int fd) : state_(std::make_shared<State>(fd)) {}

Console::~Console() {
  flush(Deadline::after(std::chrono::seconds(2)));
  const std::lock_guard lock(state_->mutex);
  state_->ending = true;
  state_->changed.notify_all();
}

void Console::print(std::string_view text) {
  State& s = *state_;
  const std::lock_guard lock(s.mutex);
  if (!s.started) std::thread([state = state_] { state->write_out(); }).detach();
  s.started = true;
  if (s.waiting.size() + text.size() > kMaxWaiting) {
    s.dropped_lines += std::count(text.begin(), text.end(), '\n');
    return;
  }
  if (s.dropped_lines > 0) {
    s.waiting += fmt::format("({} lines were not printed: nobody read them)\n", s.dropped_lines);
    s.dropped_lines = 0;
  }
  s.waiting += text;
  s.changed.notify_all();
}

void Console::flush(Deadline deadline) {
  std::unique_lock lock(state_->mutex);
  state_->changed.wait_until(lock, deadline.when(), [this] { return state_->waiting.empty() && !state_->writing; });
}

void Console::State::write_out() {
  std::unique_lock lock(mutex);
  while (true) {
    changed.wait(lock, [this] { return ending || !waiting.empty(); });
    if (ending) return;
    const std::string chunk = std::exchange(waiting, {});
    writing = true;
    lock.unlock();
    for (size_t done = 0; done < chunk.size();) {
      if (!write_some(std::string_view(chunk).substr(done), &done)) break;
    }
    lock.lock();
    writing = false;
    changed.notify_all();
  }
}

bool Console::State::write_some(std::string_view text, size_t* done) const {
  pollfd p{fd, POLLOUT, 0};
  if (::poll(&p, 1, -1) < 0) return errno == EINTR;
  const ssize_t n = ::write(fd, text.data(), text.size());
  if (n > 0) *done += static_cast<size_t>(n);
  return n >= 0 || errno == EINTR || errno == EAGAIN;
}

}  // namespace kintsugi::launch
