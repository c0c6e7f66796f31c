// Knowing of a death at once. A thread of the worker locks a robust mutex in shared memory and never lets go; a
// thread of the agent waits for it. When the worker dies, however it dies, the kernel hands the mutex over before it
// tears the process's memory down, which pidfd, waitpid and sockets all wait for (60-90 ms per GiB). The holding thread
// must live as long as the process, start after exec, and never enter a device driver.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <semaphore>
#include <thread>

namespace kintsugi::launch {

class LifeHolder {
 public:
  // Returns once the mutex is locked.
  explicit LifeHolder(pthread_mutex_t* life);
  // A clean departure: unlocks, so that the watcher does not take it for a death.
  ~LifeHolder();

 private:
  std::binary_semaphore locked_{0}, release_{0};
  std::thread thread_;
};

class LifeWatcher {
 public:
  // `on_end(died, now_ns)` runs on the watching thread, once: died is false after a clean departure.
  // The holder must have locked the mutex already.
  LifeWatcher(pthread_mutex_t* life, std::function<void(bool died, int64_t now_ns)> on_end);
  // Joins: the watched process has ended or is about to.
  ~LifeWatcher();

 private:
  std::thread thread_;
};

}  // namespace kintsugi::launch
