// How a rank waits for words of its peers: a short spin, some yields, then sleep. Ranks may outnumber cores, so a rank
// that waits must soon leave its core to one that works.
//
// A sleeper says what it waits for (Sleeper in layout.h). Whoever publishes a word looks who sleeps, and wakes those
// whose wait that ended: of eight ranks that wait for all others, none wakes before the last one has come.
#pragma once

#include <chrono>
#include <functional>
#include <span>

#include "comm/peer/layout.h"
#include "runtime/base/deadline.h"

namespace kintsugi::comm {

// The word at `offset` of the control blocks of `peers` (bit r: rank r) is at least `stamp`.
struct Missing {
  uint64_t peers = 0;
  uint32_t offset = 0;
  uint64_t stamp = 0;
};
uint64_t everyone_else(const PeerGroup& group);
uint32_t offset_in_block(const PeerGroup& group, const std::atomic<uint64_t>& own_word);
bool is_over(const PeerGroup& group, const Missing& missing);
// The first rank whose word is not far enough; -1 when the wait is over.
int first_missing(const PeerGroup& group, const Missing& missing);

struct WaitPolicy {
  int spins = 0;             // looks, some 30 ns apart
  Duration yield_for{};      // then sched_yield between looks, this long
  Duration idle_for{};       // or until yields have found nobody to run for this long
  Duration first_sleep{};    // then sleep until woken, but look at stop words after this long; twice as long each time,
  Duration longest_sleep{};  // up to this
  // For all ranks of the generation on the cores that they said they may use.
  static WaitPolicy for_group(const PeerGroup& group);
};

// One of the things for which a rank waits at the same time.
struct Awaited {
  const PeerGroup* group = nullptr;
  Missing missing;
};

// Says on which CPUs this rank may run.
void publish_cpus(const PeerGroup& group);

// Stores a stamp in a word of this rank, and wakes the ranks that slept for it.
void publish(const PeerGroup& group, std::atomic<uint64_t>& word, uint64_t stamp);
// Wakes rank `r` for a look around, whatever it waits for.
void wake(const PeerGroup& group, int r);

// Returns once one of the waits is over, or with the error of `interrupted`, which is asked between looks (often, so it
// must be cheap; `slow` asks for its dearer checks too). At least one; all of one rank.
Status wait_for_any(std::span<const Awaited> awaited, const WaitPolicy& policy,
                    const std::function<Status(bool slow)>& interrupted);

}  // namespace kintsugi::comm
