#include "launch/event_loop.h"

#include <algorithm>
#include <utility>

#include "runtime/base/deadline.h"

namespace kintsugi::launch {

void EventLoop::add(int fd, std::function<void()> on_ready, std::function<bool()> wants_to_write) {
  entries_[fd] = {std::move(on_ready), std::move(wants_to_write), next_id_++};
}

void EventLoop::remove(int fd) { entries_.erase(fd); }

void EventLoop::run_once(int64_t due_ns) {
  polled_.clear();
  polled_ids_.clear();
  for (const auto& [fd, entry] : entries_) {
    const bool writing = entry.wants_to_write && entry.wants_to_write();
    polled_.push_back({fd, static_cast<short>(POLLIN | (writing ? POLLOUT : 0)), 0});
    polled_ids_.push_back(entry.id);
  }
  constexpr int64_t kLongestNs = 60'000'000'000;
  const int64_t wait_ns = std::clamp<int64_t>(due_ns - monotonic_ns(), 0, kLongestNs);
  const timespec timeout{.tv_sec = wait_ns / 1'000'000'000, .tv_nsec = wait_ns % 1'000'000'000};
  if (::ppoll(polled_.data(), polled_.size(), &timeout, nullptr) <= 0) return;
  for (size_t i = 0; i < polled_.size(); ++i) {
    if (polled_[i].revents == 0) continue;
    // A function called before may have removed this one, or put another in its place.
    const auto it = entries_.find(polled_[i].fd);
    if (it == entries_.end() || it->second.id != polled_ids_[i]) continue;
    const std::function<void()> on_ready = it->second.on_ready;  // lives through its own removal
    on_ready();
  }
}

}  // namespace kintsugi::launch
