// What one rank shows its peers: flags, call descriptors and staging memory, in memory that all ranks of a
// world address (mapped segments, or plain memory of one process).
//
// Every word has one writer, its owner, and holds a stamp: the generation in the upper bits, a counter
// in the lower. A waiter waits for "at least (my generation, n)". Counters start anew in each generation,
// so a word that a dead generation left behind is simply too small, whatever it says, and needs no clearing.
//
// Call number n (from 1) of a generation lives in slot n % kMaxInFlight. Its plain fields are written before `posted`
// is stored (release) and read after it was seen (acquire); they are written again for call n + kMaxInFlight only when
// every peer has completed call n.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "comm/communicator.h"

namespace kintsugi::comm {

inline constexpr int kMaxWorldSize = 64;
inline constexpr int kMaxChannels = 8;
inline constexpr int kMaxInFlight = 16;
inline constexpr int kMaxParts = 16;                     // of all_reduce_fixed: 2 log2(64) = 12 at most
inline constexpr int kMaxLanes = 4;                      // progress counters of one call; the double tree uses all
inline constexpr int64_t kPayloadBytes = 16 << 10;       // calls up to this size travel inside the slot
inline constexpr int64_t kStagingHalfBytes = 512 << 10;  // unregistered memory passes through two of these

inline constexpr int kMaxCpus = 1024;

// Stamps. 2^20 generations a job; 2^44 counts a generation.
inline constexpr int kCountBits = 44;
inline constexpr int64_t kMaxGeneration = (int64_t{1} << 20) - 1;
constexpr uint64_t make_stamp(int64_t generation, int64_t count) {
  return static_cast<uint64_t>(generation) << kCountBits | static_cast<uint64_t>(count);
}
constexpr int64_t generation_of(uint64_t stamp) { return static_cast<int64_t>(stamp >> kCountBits); }
constexpr int64_t count_of(uint64_t stamp) { return static_cast<int64_t>(stamp & ((uint64_t{1} << kCountBits) - 1)); }

// Why a rank gave up, as the count of a stamp; never 0.
struct FailureNote {
  StatusCode cause = StatusCode::kAborted;
  int origin = 0;  // the rank (of the generation) with which it began
};
constexpr uint64_t failure_stamp(int64_t generation, FailureNote note) {
  return make_stamp(generation, int64_t{note.origin} << 8 | static_cast<int64_t>(note.cause));
}
constexpr FailureNote read_failure(uint64_t stamp) {
  return {.cause = static_cast<StatusCode>(count_of(stamp) & 0xff), .origin = static_cast<int>(count_of(stamp) >> 8)};
}

// A stamp on a cache line of its own.
struct alignas(64) Word {
  std::atomic<uint64_t> stamp{0};
};

enum class OpKind : uint8_t {
  kBarrier = 1,
  kAllReduce,
  kAllReduceFixed,
  kReduceScatter,
  kAllGather,
  kAllToAll,
  kBroadcast,
  kFetch
};
const char* name_of(OpKind kind);

// What must be equal on every rank.
struct Call {
  OpKind kind{};
  Algorithm algorithm{};
  int16_t num_leaves = 0;  // kAllReduceFixed
  int32_t root = -1;       // kBroadcast, kFetch
  int64_t size_bytes = 0;  // all_reduce: of x; reduce_scatter, all_gather, all_to_all: of one share
  int64_t chunk_bytes = 0;
  bool operator==(const Call&) const = default;
};

struct alignas(64) Slot {
  // The first line is all that most calls read of a peer.
  std::atomic<uint64_t> posted{0};
  Call call;
  bool staged = false;    // my memory is not in my heap: it passes through my staging area
  bool receives = true;   // kFetch: this rank takes the data
  int32_t num_parts = 0;  // kAllReduceFixed
  int64_t in_offset = 0;  // of my memory in my heap
  int64_t out_offset = 0;
  alignas(64) int64_t part_offsets[kMaxParts] = {};
  Word lanes[kMaxLanes];  // steps done of this call, counted on from those of the calls before it in this slot
};

// What a sleeping rank waits for, so that whoever brings it about can tell, and only then wakes it: the word at
// `offset` of the control block of every rank in `peers` (bit r: rank r) is at least `stamp`. Written by its owner.
struct alignas(64) Sleeper {
  std::atomic<uint32_t> asleep{0};
  std::atomic<uint32_t> offset{0};
  std::atomic<uint64_t> peers{0};
  std::atomic<uint64_t> stamp{0};
};

// One a channel and rank.
struct ControlBlock {
  Word completed;  // last call completed here
  Word failed;     // the generation in which this rank gave up, and a FailureNote
  Sleeper sleeper;
  // The futex on which ranks sleep; that of rank 0 and channel 0 serves all ranks of the generation and all channels.
  alignas(64) std::atomic<uint32_t> bell{0};
  // The CPUs on which this rank may run, one bit each: how ranks tell whether they outnumber their cores. In channel 0.
  alignas(64) std::atomic<uint64_t> cpus[kMaxCpus / 64] = {};
  Slot slots[kMaxInFlight];
  alignas(64) uint8_t payload[kMaxInFlight][kPayloadBytes] = {};
  alignas(64) uint8_t staging[2][kStagingHalfBytes] = {};
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

// One rank's memory as this process addresses it.
struct PeerMemory {
  ControlBlock* control = nullptr;
  uint8_t* heap = nullptr;
  int64_t heap_bytes = 0;
};

// The ranks of one group as one of them sees them. Ranks without further words are those of the group.
struct PeerGroup {
  Membership membership;
  std::vector<PeerMemory> peers;        // by rank
  std::vector<int> ranks;               // of the generation, by rank
  std::vector<ControlBlock*> everyone;  // channel 0 of all ranks of the generation
  int64_t max_inline_bytes = 0;         // calls up to this size travel inside the slot
  int64_t stream_bytes = 0;             // sums from this size on write past the caches

  int rank() const { return membership.rank; }
  int world_size() const { return membership.world_size; }
  // What messages call rank `r`: its number in the generation.
  int global(int r) const { return r < 0 ? r : ranks[r]; }
  int own_global() const { return ranks[rank()]; }
  ControlBlock& own() const { return *peers[rank()].control; }
  bool in_own_heap(const void* p, int64_t size_bytes) const {
    const PeerMemory& mine = peers[rank()];
    const auto* byte = static_cast<const uint8_t*>(p);
    return mine.heap != nullptr && byte >= mine.heap && byte + size_bytes <= mine.heap + mine.heap_bytes;
  }
};

}  // namespace kintsugi::comm
