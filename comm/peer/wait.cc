#include "comm/peer/wait.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <ctime>

namespace kintsugi::comm {

namespace {

// The bell may lie in memory shared between processes, so the futex is not a private one.
void futex_wait(std::atomic<uint32_t>& word, uint32_t seen, Duration at_most) {
  const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(at_most).count();
  timespec t{.tv_sec = ns / 1'000'000'000, .tv_nsec = ns % 1'000'000'000};
  ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &t, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) {
  ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

int usable_cores() {
  cpu_set_t set;
  if (::sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

}  // namespace

WaitPolicy WaitPolicy::for_world(int world_size) {
  using std::chrono::microseconds;
  if (world_size <= usable_cores())
    return {.spins = 2000, .yield_for = microseconds(500), .sleep_at_most = microseconds(2000)};
  return {.spins = 20, .yield_for = microseconds(100), .sleep_at_most = microseconds(2000)};
}

// A sleeper raises `sleepers` and then looks at the word once more; the publisher stores the word and then looks at
// `sleepers`. Both are sequentially consistent, so one of the two sees the other.
void publish(ControlBlock& own, std::atomic<uint64_t>& word, uint64_t stamp) {
  word.store(stamp, std::memory_order_seq_cst);
  if (own.sleepers.load(std::memory_order_seq_cst) != 0) ring(own);
}

void ring(ControlBlock& peer) {
  peer.sleepers.store(0, std::memory_order_seq_cst);
  peer.bell.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(peer.bell);
}

Status wait_for_stamp(ControlBlock& peer, const std::atomic<uint64_t>& word, uint64_t stamp, const WaitPolicy& policy,
                      const std::function<Status(bool slow)>& interrupted) {
  auto reached = [&] { return word.load(std::memory_order_acquire) >= stamp; };
  for (int i = 0; i < policy.spins; ++i) {
    if (reached()) return ok_status();
    _mm_pause();
  }
  const Deadline yields_end = Deadline::after(policy.yield_for);
  for (int i = 1;; ++i) {
    if (reached()) return ok_status();
    const bool slow = i % 16 == 0;
    KTG_RETURN_IF_ERROR(interrupted(slow));
    if (slow && yields_end.passed()) break;
    ::sched_yield();
  }
  while (true) {
    const uint32_t seen = peer.bell.load(std::memory_order_seq_cst);
    peer.sleepers.store(1, std::memory_order_seq_cst);
    if (word.load(std::memory_order_seq_cst) >= stamp) return ok_status();
    KTG_RETURN_IF_ERROR(interrupted(true));
    futex_wait(peer.bell, seen, policy.sleep_at_most);
    if (reached()) return ok_status();
  }
}

}  // namespace kintsugi::comm
