#include "comm/peer/wait.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <climits>
#include <cstddef>
#include <ctime>

namespace kintsugi::comm {

namespace {

// The bell may lie in memory shared between processes, so the futex is not a private one. Sleepers are told apart by a
// bit each (shared beyond 32 ranks), so that one system call wakes any set of them.
uint32_t bit_of(int rank) { return uint32_t{1} << (rank % 32); }

void futex_wait(std::atomic<uint32_t>& word, uint32_t seen, int rank, Duration at_most) {
  const auto until =
      std::chrono::duration_cast<std::chrono::nanoseconds>((MonotonicClock::now() + at_most).time_since_epoch())
          .count();
  const timespec t{.tv_sec = until / 1'000'000'000, .tv_nsec = until % 1'000'000'000};
  ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_BITSET, seen, &t, nullptr, bit_of(rank));
}

void futex_wake(std::atomic<uint32_t>& word, uint32_t bits) {
  ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_BITSET, INT_MAX, nullptr, nullptr, bits);
}

std::atomic<uint32_t>& bell_of(const PeerGroup& group) { return group.everyone[0]->bell; }

constexpr Duration kYieldThatGave = std::chrono::nanoseconds(1500);

// Of all ranks together, as far as they have said.
int usable_cores(const PeerGroup& group) {
  int count = 0;
  for (int word = 0; word < kMaxCpus / 64; ++word) {
    uint64_t cpus = 0;
    for (const ControlBlock* rank : group.everyone) cpus |= rank->cpus[word].load(std::memory_order_relaxed);
    count += std::popcount(cpus);
  }
  return count;
}

const std::atomic<uint64_t>& word_at(const PeerGroup& group, int rank, uint32_t offset) {
  const auto* block = reinterpret_cast<const uint8_t*>(group.peers[rank].control);
  return *reinterpret_cast<const std::atomic<uint64_t>*>(block + offset);
}

void fall_asleep(const PeerGroup& group, const Missing& missing) {
  Sleeper& own = group.own().sleeper;
  own.peers.store(missing.peers, std::memory_order_seq_cst);
  own.offset.store(missing.offset, std::memory_order_seq_cst);
  own.stamp.store(missing.stamp, std::memory_order_seq_cst);
  own.asleep.store(1, std::memory_order_seq_cst);
}

// True when the sleeper's wait is over. What it says may be torn, or left by a process that is gone: then a wake-up for
// nothing or none at all follows, and a living sleeper looks again by itself.
bool should_wake(const PeerGroup& group, const Sleeper& sleeper) {
  const Missing missing{
      .peers = sleeper.peers.load(std::memory_order_seq_cst) & (everyone_else(group) | uint64_t{1} << group.rank()),
      .offset = sleeper.offset.load(std::memory_order_seq_cst),
      .stamp = sleeper.stamp.load(std::memory_order_seq_cst)};
  if (missing.offset % alignof(uint64_t) != 0 || missing.offset >= offsetof(ControlBlock, payload)) return false;
  return is_over(group, missing);
}

}  // namespace

uint64_t everyone_else(const PeerGroup& group) {
  const int n = group.world_size();
  const uint64_t all = n == 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1;
  return all & ~(uint64_t{1} << group.rank());
}

uint32_t offset_in_block(const PeerGroup& group, const std::atomic<uint64_t>& own_word) {
  return static_cast<uint32_t>(reinterpret_cast<const uint8_t*>(&own_word) -
                               reinterpret_cast<const uint8_t*>(&group.own()));
}

int first_missing(const PeerGroup& group, const Missing& missing) {
  for (uint64_t rest = missing.peers; rest != 0; rest &= rest - 1) {
    const int r = std::countr_zero(rest);
    if (word_at(group, r, missing.offset).load(std::memory_order_seq_cst) < missing.stamp) return r;
  }
  return -1;
}

bool is_over(const PeerGroup& group, const Missing& missing) { return first_missing(group, missing) < 0; }

// Measured with experiments/collectives (8 ranks on 2 cores; 2 on 2): while yields pass the core on, they beat sleeping
// by 3 to 5 times in latency; where they do not, each microsecond of them is taken from a rank that works.
WaitPolicy WaitPolicy::for_group(const PeerGroup& group) {
  using std::chrono::microseconds;
  const bool crowded = static_cast<int>(group.everyone.size()) > usable_cores(group);
  return {.spins = crowded ? 2 : 300,
          .yield_for = microseconds(crowded ? 100 : 500),
          .idle_for = microseconds(crowded ? 3 : 200),
          .first_sleep = microseconds(1000),
          .longest_sleep = microseconds(4000)};
}

void publish_cpus(const PeerGroup& group) {
  cpu_set_t set;
  CPU_ZERO(&set);
  [[maybe_unused]] const int unknown = ::sched_getaffinity(0, sizeof(set), &set);
  for (int word = 0; word < kMaxCpus / 64; ++word) {
    uint64_t cpus = 0;
    for (int bit = 0; bit < 64; ++bit) cpus |= static_cast<uint64_t>(CPU_ISSET(word * 64 + bit, &set)) << bit;
    group.everyone[group.own_global()]->cpus[word].store(cpus, std::memory_order_relaxed);
  }
}

// A sleeper says what it waits for, raises `asleep` and then looks once more; a publisher stores its word and then
// looks at `asleep`. All of it is sequentially consistent, so one of the two sees the other; and of several publishers
// the last one in that order sees the words of all.
void publish(const PeerGroup& group, std::atomic<uint64_t>& word, uint64_t stamp) {
  word.store(stamp, std::memory_order_seq_cst);
  uint32_t bits = 0;
  for (int r = 0; r < group.world_size(); ++r) {
    Sleeper& sleeper = group.peers[r].control->sleeper;
    if (r == group.rank() || sleeper.asleep.load(std::memory_order_seq_cst) == 0) continue;
    if (!should_wake(group, sleeper)) continue;
    sleeper.asleep.store(0, std::memory_order_seq_cst);
    bits |= bit_of(group.global(r));
  }
  if (bits == 0) return;
  bell_of(group).fetch_add(1, std::memory_order_seq_cst);
  futex_wake(bell_of(group), bits);
}

void wake(const PeerGroup& group, int r) {
  bell_of(group).fetch_add(1, std::memory_order_seq_cst);
  futex_wake(bell_of(group), bit_of(group.global(r)));
}

Status wait_for_any(std::span<const Awaited> awaited, const WaitPolicy& policy,
                    const std::function<Status(bool slow)>& interrupted) {
  const auto any_over = [&] {
    return std::any_of(awaited.begin(), awaited.end(), [](const Awaited& a) { return is_over(*a.group, a.missing); });
  };
  for (int i = 0; i < policy.spins; ++i) {
    if (any_over()) return ok_status();
    _mm_pause();
  }
  // A yield that comes back at once found nobody to run: everybody else works on another core, or belongs to another
  // group of the scheduler, to which a yield gives nothing.
  TimePoint now = MonotonicClock::now();
  const TimePoint yields_end = now + policy.yield_for;
  TimePoint idle_since = now;
  for (int i = 1; now < yields_end && now - idle_since <= policy.idle_for; ++i) {
    if (any_over()) return ok_status();
    KTG_RETURN_IF_ERROR(interrupted(i % 16 == 0));
    ::sched_yield();
    const TimePoint after = MonotonicClock::now();
    if (after - now > kYieldThatGave) idle_since = after;
    now = after;
  }
  const PeerGroup& group = *awaited[0].group;
  std::atomic<uint32_t>& bell = bell_of(group);
  for (Duration sleep = policy.first_sleep;; sleep = std::min(2 * sleep, policy.longest_sleep)) {
    const uint32_t seen = bell.load(std::memory_order_seq_cst);
    for (const Awaited& a : awaited) fall_asleep(*a.group, a.missing);
    Status status = ok_status();
    const bool over = any_over();
    if (!over) status = interrupted(true);
    if (!over && status.ok()) futex_wait(bell, seen, group.own_global(), sleep);
    for (const Awaited& a : awaited) a.group->own().sleeper.asleep.store(0, std::memory_order_seq_cst);
    if (!status.ok()) return status;
    if (over || any_over()) return ok_status();
  }
}

}  // namespace kintsugi::comm
