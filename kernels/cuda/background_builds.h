// What takes long to build and is known to be needed: begun early, each on a thread of its own, and whoever needs it
// first waits. Needs neither CUDA nor a GPU. Not thread-safe: its owner locks; builds run outside that lock and must
// not take it.
#pragma once

#include <chrono>
#include <functional>
#include <future>
#include <map>
#include <optional>
#include <system_error>

namespace kintsugi::kernels::cuda {

// Its destructor waits for the builds that run.
template <typename Key, typename Built>
class BackgroundBuilds {
 public:
  // Runs `build` on a thread of its own; where none can be had, later on that of take(). Nothing where one of the key
  // has been begun and was not taken.
  void begin(const Key& key, const std::function<Built()>& build) {
    if (builds_.contains(key)) return;
    try {
      builds_.emplace(key, std::async(std::launch::async, build));
    } catch (const std::system_error&) {
      builds_.emplace(key, std::async(std::launch::deferred, build));
    }
  }

  // What begin() began for the key, once; waits until it is built. Nothing where nothing was begun. Throws what the
  // build threw.
  std::optional<Built> take(const Key& key) {
    auto node = builds_.extract(key);
    if (node.empty()) return std::nullopt;
    return node.mapped().get();
  }

  // Until no thread runs or the time is over; whether none runs. What they built, or threw, can still be taken.
  bool wait(std::chrono::milliseconds limit) {
    const auto end = std::chrono::steady_clock::now() + limit;
    bool ended = true;
    // One that has no thread has nothing to wait for.
    for (auto& [key, build] : builds_) ended &= build.wait_until(end) != std::future_status::timeout;
    return ended;
  }

 private:
  std::map<Key, std::future<Built>> builds_;
};

}  // namespace kintsugi::kernels::cuda
