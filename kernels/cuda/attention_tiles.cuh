// How thread blocks of attention's kernels share their work and what they read: items handed out, tiles copied ahead by
// one thread, a ring of stages. Internal to kernels/cuda. Used by attention_forward.cuh and attention_backward.cuh.
//
// A block of 64 rows (tokens of one head) belongs to a warpgroup, which holds their sums in registers. The warpgroups
// of a thread block take neighbouring blocks and share what streams by: steps of 64 tokens, of two tiles. Blocks and
// steps are aligned, so that only the step at which both are the same tokens has anything to mask. What warpgroups take
// into registers as an item begins comes through the ring, too, in front of its steps.
//
// A tile: 64 rows of a head, in shared memory by 64 of its columns (as hopper.cuh has them).
#pragma once

#include <algorithm>

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/hopper.cuh"

namespace kintsugi::kernels::cuda {

// All maps: (D heads, T, B) [64, 64, 1]. T tokens of a sequence; what lies behind them reads as zeros. The forward
// pass takes q, k, v and o and, unless it is null, writes lse.
struct AttentionOperands {
  CUtensorMap q, k, v, o, d_o, dq, dk, dv;
  float* lse;                // (B, H, T)
  float* row_facts;          // (B, H, blocks, 32 pairs of tokens): of the pair -lse log2(e) twice, then delta twice
  const int32_t* positions;  // (B T); unused without cos_sin
  const float* cos_sin;      // (positions, D): cosines, then sines; null: nothing is turned back
  int32_t* next;             // of each kernel: how many of its items are taken; zero in front of the first
  int32_t T, H, K;
  int32_t blocks;  // of 64 tokens in a sequence
  float scale;
};

// What a thread block works on at a time: `warpgroups` neighbouring blocks of a head. They are taken in this order,
// whoever comes first: the longest tiles of some heads (so that what these read lies in L2), their shorter ones.
struct AttentionItems {
  int32_t heads;  // of all sequences
  int32_t tiles;  // of a head
  int32_t chunk;  // heads that are worked at together

  struct Item {
    int32_t head, tile;  // tile 0 is the longest
  };
  __device__ int32_t count() const { return heads * tiles; }
  __device__ Item item(int32_t index) const {
    const int32_t first = index / (chunk * tiles) * chunk, rest = index - first * tiles;
    const int32_t height = min(chunk, heads - first);
    return {first + rest % height, rest / height};
  }
};

constexpr uint32_t kPartBytes = 64 * 64 * 2;  // of a tile: 64 columns

// Which rows a kernel works on, and what for: the forward pass's queries, the queries' gradients, keys' and values'.
enum class AttentionPart { kForward, kQueries, kKeys };

// Tiles of each warpgroup in shared memory: kOpening that it takes into registers as an item begins (they come through
// the ring), kKept that its products read to the end (in kSets sets: with two the next item's come meanwhile), kResults
// that it stores. The rest is the ring's.
template <AttentionPart kPart_, int kD_>
struct AttentionTile {
  static constexpr AttentionPart kPart = kPart_;
  static constexpr bool kQueries = kPart != AttentionPart::kKeys;
  static constexpr int kD = kD_;
  static constexpr int kSums = kD / 2;  // a thread's share of 64 rows of a head
  static constexpr int kWarpgroups = kQueries && kD == 64 ? 3 : 2;
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  // Keys and values of 128 elements do not fit into registers beside the sums of their gradients, and no product may
  // run on while score gradients are computed.
  static constexpr bool kKeepsKeys = !kQueries && kD > 64;
  static constexpr int kBehindDp = kKeepsKeys ? 0 : 1;
  // Registers of a thread that copies and of one that multiplies. More than the block begins with would never be given.
  static constexpr int kFew = kWarpgroups == 3 ? 32 : kKeepsKeys ? 24 : 40;
  static constexpr int kMany = kWarpgroups == 3 ? 160 : kKeepsKeys ? 240 : 232;
  static_assert(kFew + kWarpgroups * kMany <= (kWarpgroups + 1) * (65536 / kThreads / 8 * 8));

  static constexpr int kOpening = kPart == AttentionPart::kForward ? 1 : kKeepsKeys ? 0 : 2;
  static constexpr int kKept = kPart == AttentionPart::kQueries ? 1 : kKeepsKeys ? 2 : 0;
  static constexpr int kSets = kKeepsKeys ? 1 : 2;
  static constexpr int kResults = kQueries ? 1 : 2;
  static constexpr int kOpeningStages = (kWarpgroups * kOpening + 1) / 2;
  static constexpr int kParts = kD / 64;  // of a tile

  static constexpr uint32_t kTile = kParts * kPartBytes, kFacts = kQueries ? 0 : 64 * 8;  // bytes
  static constexpr uint32_t kStage = 2 * kTile + kFacts;
  static constexpr int kOwnBytes = kWarpgroups * (kSets * kKept + kResults) * static_cast<int>(kTile);
  static constexpr int kOtherBytes = 1024 + 8 * 6 + 16;  // to begin at a multiple, barriers, the item
  // What fits, at most 12: far more steps than a copy takes.
  static constexpr int kStages =
      std::min((hopper::kMostSharedBytes - kOwnBytes - kOtherBytes) / (static_cast<int>(kStage) + 16), 12);
  static constexpr int kBarriers = 6 + 2 * kStages;
  static constexpr int kSharedBytes = kOwnBytes + kOtherBytes + kStages * (static_cast<int>(kStage) + 16);
};

// Shared memory of a thread block.
template <class S>
struct AttentionBlock {
  uint32_t kept, results, stages, facts, barriers, item;  // addresses

  __device__ explicit AttentionBlock(const void* shared) {
    kept = (hopper::shared_address(shared) + 1023) & ~1023u;
    results = kept + S::kSets * S::kWarpgroups * S::kKept * S::kTile;
    stages = results + S::kWarpgroups * S::kResults * S::kTile;
    facts = stages + S::kStages * 2 * S::kTile;
    barriers = facts + S::kStages * S::kFacts;
    item = barriers + 8 * S::kBarriers;
  }
  __device__ uint32_t kept_tile(int32_t group, int32_t i, uint32_t set) const {
    return kept + ((set * S::kWarpgroups + group) * S::kKept + i) * S::kTile;
  }
  __device__ uint32_t result(int32_t group, int32_t i) const { return results + (group * S::kResults + i) * S::kTile; }
  __device__ uint32_t x(uint32_t stage) const { return stages + stage * 2 * S::kTile; }
  __device__ uint32_t y(uint32_t stage) const { return x(stage) + S::kTile; }
  __device__ uint32_t step_facts(uint32_t stage) const { return facts + stage * S::kFacts; }
  __device__ uint32_t item_full() const { return barriers; }
  __device__ uint32_t item_free() const { return barriers + 8; }
  __device__ uint32_t kept_free(uint32_t set) const { return barriers + 16 + 8 * set; }
  __device__ uint32_t kept_full(uint32_t set) const { return barriers + 32 + 8 * set; }
  __device__ uint32_t full(uint32_t stage) const { return barriers + 48 + 8 * stage; }
  __device__ uint32_t empty(uint32_t stage) const { return full(S::kStages + stage); }

  // Item n's kept tiles are there; their set.
  __device__ uint32_t wait_kept(uint32_t n) const {
    hopper::wait(kept_full(n % S::kSets), n / S::kSets % 2);
    return n % S::kSets;
  }

  __device__ void init_barriers() const {
    constexpr uint32_t kWarps = 4 * S::kWarpgroups;
    hopper::barrier_init(item_full(), 1);
    hopper::barrier_init(item_free(), kWarps);
    for (int i = 0; i < 2; ++i) {
      hopper::barrier_init(kept_free(i), kWarps);
      hopper::barrier_init(kept_full(i), 1);
    }
    for (int i = 0; i < S::kStages; ++i) {
      hopper::barrier_init(full(i), 1);
      hopper::barrier_init(empty(i), kWarps);
    }
    hopper::publish_barriers();
  }
};

// A place in the ring of stages.
template <class S>
struct StageCursor {
  uint32_t stage = 0, parity = 0;
  __device__ void advance() {
    if (++stage == S::kStages) stage = 0, parity ^= 1;
  }
};

// An item as all see it. A step's tokens are block `first_step + i` of the head that streams by.
template <class S>
struct AttentionWork {
  int32_t batch, head, kv_head;
  int32_t first_block;  // that of the first warpgroup; may lie in front of the sequence or (last) behind it
  int32_t first_step, steps, heads;  // steps of each of so many streamed heads, from `head` on

  __device__ AttentionWork(const AttentionOperands& t, const AttentionItems& items, int32_t index) {
    const AttentionItems::Item item = items.item(index);
    const int32_t group = t.H / t.K, per_sequence = S::kQueries ? t.H : t.K;
    batch = item.head / per_sequence;
    const int32_t in_sequence = item.head - batch * per_sequence;
    kv_head = S::kQueries ? in_sequence / group : in_sequence;
    head = S::kQueries ? in_sequence : in_sequence * group;
    heads = S::kQueries ? 1 : group;
    first_block = S::kQueries ? t.blocks - S::kWarpgroups * (item.tile + 1) : S::kWarpgroups * item.tile;
    first_step = S::kQueries ? 0 : first_block;
    steps = S::kQueries ? first_block + S::kWarpgroups : t.blocks - first_block;
  }
  __device__ int32_t block(int32_t group) const { return first_block + group; }
  __device__ bool has(const AttentionOperands& t, int32_t group) const {
    return block(group) >= 0 && block(group) < t.blocks;
  }
};

// A tile whose first column is x of the map's.
template <class S>
__device__ inline void load_tile(uint32_t to, const CUtensorMap& map, int32_t x, int32_t row, int32_t batch,
                                 uint32_t barrier) {
#pragma unroll
  for (int i = 0; i < S::kParts; ++i) {
    hopper::load_tile(to + i * kPartBytes, map, x + 64 * i, row, batch, barrier);
  }
}

// What a warpgroup takes into registers (i < kOpening) or keeps (behind these).
template <class S>
__device__ inline const CUtensorMap& own_map(const AttentionOperands& t, int32_t i) {
  if constexpr (S::kPart == AttentionPart::kForward) return t.q;
  if constexpr (S::kPart == AttentionPart::kQueries) return i == 0 ? t.d_o : i == 1 ? t.o : t.q;
  return i == 0 ? t.k : t.v;
}

// One thread: takes items and brings what they need. Rows outside of the sequence come as zeros.
template <class S>
__device__ inline void copy_tiles(const AttentionBlock<S>& at, const AttentionOperands& t,
                                  const AttentionItems& items) {
  StageCursor<S> cursor;
  const auto next_stage = [&](uint32_t bytes) {
    hopper::wait(at.empty(cursor.stage), cursor.parity ^ 1);
    hopper::arrive_and_expect(at.full(cursor.stage), bytes);
    return cursor.stage;
  };
  for (uint32_t n = 0;; ++n) {
    const int32_t index = atomicAdd(t.next + (S::kQueries ? 0 : 1), 1);
    hopper::wait(at.item_free(), n % 2 ^ 1);
    hopper::store_shared(at.item, index);
    hopper::arrive(at.item_full());
    if (index >= items.count()) return;
    const AttentionWork<S> work(t, items, index);
    const int32_t own_x = (S::kQueries ? work.head : work.kv_head) * S::kD;
    for (int32_t j = 0; j < S::kOpeningStages; ++j, cursor.advance()) {
      const int32_t tiles = min(S::kWarpgroups * S::kOpening - 2 * j, 2);
      const uint32_t stage = next_stage(static_cast<uint32_t>(tiles) * S::kTile);
      for (int32_t i = 2 * j; i < 2 * j + tiles; ++i) {
        load_tile<S>(at.x(stage) + i % 2 * S::kTile, own_map<S>(t, i / S::kWarpgroups), own_x,
                     work.block(i % S::kWarpgroups) * 64, work.batch, at.full(stage));
      }
    }
    if constexpr (S::kKept > 0) {
      const uint32_t set = n % S::kSets;
      hopper::wait(at.kept_free(set), n / S::kSets % 2 ^ 1);
      hopper::arrive_and_expect(at.kept_full(set), S::kWarpgroups * S::kKept * S::kTile);
      for (int32_t g = 0; g < S::kWarpgroups; ++g) {
        for (int32_t i = 0; i < S::kKept; ++i) {
          load_tile<S>(at.kept_tile(g, i, set), own_map<S>(t, S::kOpening + i), own_x, work.block(g) * 64, work.batch,
                       at.kept_full(set));
        }
      }
    }
    for (int32_t h = 0; h < work.heads; ++h) {
      const int32_t x = (S::kQueries ? work.kv_head : work.head + h) * S::kD;
      const float* facts = t.row_facts + (int64_t{work.batch} * t.H + work.head + h) * t.blocks * 128;
      for (int32_t i = 0; i < work.steps; ++i, cursor.advance()) {
        const int32_t step = work.first_step + i;
        const uint32_t stage = next_stage(S::kStage), full = at.full(stage);
        load_tile<S>(at.x(stage), S::kQueries ? t.k : t.q, x, step * 64, work.batch, full);
        load_tile<S>(at.y(stage), S::kQueries ? t.v : t.d_o, x, step * 64, work.batch, full);
        if (!S::kQueries) hopper::load_bytes(at.step_facts(stage), facts + step * 128, S::kFacts, full);
      }
    }
  }
}

// What the steps of an item share.
template <class S>
struct StepRing {
  const AttentionBlock<S>& at;
  StageCursor<S> cursor;

  __device__ explicit StepRing(const AttentionBlock<S>& block) : at(block) {}
  // All that this warp reads of a stage it has read.
  __device__ void release(uint32_t stage) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) hopper::arrive(at.empty(stage));
  }
  __device__ void wait() const { hopper::wait(at.full(cursor.stage), cursor.parity); }
  // Steps that other warpgroups use.
  __device__ void skip(int32_t steps) {
    for (int32_t i = 0; i < steps; ++i, cursor.advance()) {
      wait();
      release(cursor.stage);
    }
  }
  // An item's opening: take(i, tile) for each of this warpgroup's tiles.
  template <class Take>
  __device__ void open(int32_t group, Take take) {
#pragma unroll
    for (int32_t j = 0; j < S::kOpeningStages; ++j, cursor.advance()) {
      wait();
#pragma unroll
      for (int32_t i = 0; i < S::kOpening; ++i) {
        const int32_t mine = i * S::kWarpgroups + group - 2 * j;
        if (mine == 0 || mine == 1) take(i, at.x(cursor.stage) + mine * S::kTile);
      }
      release(cursor.stage);
    }
  }
};

}  // namespace kintsugi::kernels::cuda
