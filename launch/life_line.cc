#include "launch/life_line.h"

#include <cerrno>

#include "launch/scheduling.h"
#include "runtime/base/check.h"
#include "runtime/base/deadline.h"

namespace kintsugi::launch {

LifeHolder::LifeHolder(pthread_mutex_t* life)
    : thread_([this, life] {
        // A dying thread must be scheduled to die, and the watcher waits for exactly that.
        make_thread_urgent();
        const int error = pthread_mutex_lock(life);
        KTG_CHECK(error == 0) << "a new incarnation's mutex: error " << error;
        locked_.release();
        release_.acquire();
        pthread_mutex_unlock(life);
      }) {
  locked_.acquire();
}

LifeHolder::~LifeHolder() {
  release_.release();
  thread_.join();
}

LifeWatcher::LifeWatcher(pthread_mutex_t* life, std::function<void(bool, int64_t)> on_end)
    : thread_([life, on_end = std::move(on_end)] {
        make_thread_urgent();
        const int error = pthread_mutex_lock(life);
        const int64_t now_ns = monotonic_ns();
        KTG_CHECK(error == 0 || error == EOWNERDEAD) << "waiting for a worker's mutex: error " << error;
        on_end(error == EOWNERDEAD, now_ns);
        if (error == EOWNERDEAD) pthread_mutex_consistent(life);
        pthread_mutex_unlock(life);
      }) {}

LifeWatcher::~LifeWatcher() { thread_.join(); }

}  // namespace kintsugi::launch
