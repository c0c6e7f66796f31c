#include "launch/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace kintsugi::launch {
namespace {

// Not FUTEX_PRIVATE_FLAG: the word lies in a mapping that several processes share.
long futex(const std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* timeout) {
  return ::syscall(SYS_futex, reinterpret_cast<const uint32_t*>(word), operation, value, timeout, nullptr, 0);
}

}  // namespace

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t) && std::atomic<uint32_t>::is_always_lock_free);

void futex_wait(const std::atomic<uint32_t>& word, uint32_t seen, Deadline deadline) {
  const int64_t ns = std::chrono::duration_cast<std::chrono::nanoseconds>(deadline.remaining()).count();
  const timespec timeout{.tv_sec = ns / 1'000'000'000, .tv_nsec = ns % 1'000'000'000};
  futex(&word, FUTEX_WAIT, seen, &timeout);
}

void futex_signal(std::atomic<uint32_t>& word) {
  word.fetch_add(1, std::memory_order_release);
  futex(&word, FUTEX_WAKE, INT_MAX, nullptr);
}

}  // namespace kintsugi::launch
