// How a rank waits for a peer's word: a short spin, then yields, then sleep on the peer's bell. Ranks may outnumber
// cores, so the spin is short and the sleep comes soon: a rank that waits leaves its core to one that works.
#pragma once

#include <chrono>
#include <functional>

#include "comm/peer/layout.h"
#include "runtime/base/deadline.h"

namespace kintsugi::comm {

struct WaitPolicy {
  int spins = 0;             // looks at the word, some nanoseconds apart
  Duration yield_for{};      // then sched_yield between looks, this long
  Duration sleep_at_most{};  // then sleeps of at most this; aborts are noticed in between
  // For `world_size` ranks on the cores that this process may use.
  static WaitPolicy for_world(int world_size);
};

// Stores a stamp and wakes whoever sleeps on this rank's bell. `word` belongs to `own`.
void publish(ControlBlock& own, std::atomic<uint64_t>& word, uint64_t stamp);

// Wakes everybody who sleeps on the bell: they look around and sleep again.
void ring(ControlBlock& peer);

// Returns once `word` >= stamp, or with the error of `interrupted`, which is asked between looks (often, so it must be
// cheap; `slow` asks for its dearer checks too).
Status wait_for_stamp(ControlBlock& peer, const std::atomic<uint64_t>& word, uint64_t stamp, const WaitPolicy& policy,
                      const std::function<Status(bool slow)>& interrupted);

}  // namespace kintsugi::comm
