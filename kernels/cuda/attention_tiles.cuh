// How thread blocks of attention's kernels for heads of 64 elements share their work and what they read: items handed
// out, tiles copied ahead by one thread, a ring of stages. Internal to kernels/cuda. Used by attention_forward.cuh and
// attention_backward.cuh.
//
// A block of 64 rows (tokens of one head) belongs to a warpgroup, which holds their operands and sums in registers. The
// warpgroups of a thread block take neighbouring blocks and share what streams by: steps of 64 tokens, of two tiles.
// Blocks and steps are aligned, so that only the step at which both are the same tokens has anything to mask.
#pragma once

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/hopper.cuh"

namespace kintsugi::kernels::cuda {

// All maps: (64 heads, T, B) [64, 64, 1]. T tokens of a sequence; what lies behind them reads as zeros. The forward
// pass takes q, k, v and o and, unless it is null, writes lse.
struct AttentionOperands {
  CUtensorMap q, k, v, o, d_o, dq, dk, dv;
  float* lse;                // (B, H, T)
  float* row_facts;          // (B, H, blocks, 32 pairs of tokens): of the pair -lse log2(e) twice, then delta twice
  const int32_t* positions;  // (B T); unused without cos_sin
  const float* cos_sin;      // (positions, 64): cosines, then sines; null: nothing is turned back
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

// Which rows a kernel works on, and what for: the forward pass's queries, the queries' gradients, keys' and values'.
enum class AttentionPart { kForward, kQueries, kKeys };

// Tiles of 64 rows of each warpgroup in shared memory: kOnce that it reads as an item begins, kKept that its products
// read to the end (two sets: the next item's come meanwhile), kResults that it stores.
template <AttentionPart kPart_, int kWarpgroups_, int kStages_>
struct AttentionTile {
  static constexpr AttentionPart kPart = kPart_;
  static constexpr bool kQueries = kPart != AttentionPart::kKeys;
  static constexpr int kWarpgroups = kWarpgroups_, kStages = kStages_;
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  static constexpr int kOnce = kPart == AttentionPart::kForward ? 1 : 2;
  static constexpr int kKept = kPart == AttentionPart::kQueries ? 1 : 0;
  static constexpr int kResults = kQueries ? 1 : 2;
  static constexpr uint32_t kTile = 64 * 64 * 2, kFacts = 64 * 8;  // bytes; of a step's tokens
  static constexpr uint32_t kStage = 2 * kTile + (kQueries ? 0 : kFacts);
  static constexpr int kTiles = kWarpgroups * (kOnce + 2 * kKept + kResults) + 2 * kStages;
  static constexpr int kBarriers = 4 + 2 * kStages;
  static constexpr int kSharedBytes =
      1024 + kTiles * static_cast<int>(kTile) + kStages * static_cast<int>(kFacts) + 8 * kBarriers + 16;
  static_assert(kSharedBytes <= 232448);
  // Registers of a thread that copies and of one that multiplies.
  static constexpr int kFew = kWarpgroups == 3 ? 32 : 40, kMany = kWarpgroups == 3 ? 160 : 232;
};

// Shared memory of a thread block.
template <class S>
struct AttentionBlock {
  uint32_t once, kept, results, stages, facts, barriers, item;  // addresses

  __device__ explicit AttentionBlock(const void* shared) {
    once = (hopper::shared_address(shared) + 1023) & ~1023u;
    kept = once + S::kWarpgroups * S::kOnce * S::kTile;
    results = kept + 2 * S::kWarpgroups * S::kKept * S::kTile;
    stages = results + S::kWarpgroups * S::kResults * S::kTile;
    facts = stages + S::kStages * 2 * S::kTile;
    barriers = facts + S::kStages * S::kFacts;
    item = barriers + 8 * S::kBarriers;
  }
  __device__ uint32_t once_tile(int32_t group, int32_t i) const { return once + (group * S::kOnce + i) * S::kTile; }
  __device__ uint32_t kept_tile(int32_t group, uint32_t set) const {
    return kept + (set * S::kWarpgroups + group) * S::kTile;
  }
  __device__ uint32_t result(int32_t group, int32_t i) const { return results + (group * S::kResults + i) * S::kTile; }
  __device__ uint32_t x(uint32_t stage) const { return stages + stage * 2 * S::kTile; }
  __device__ uint32_t y(uint32_t stage) const { return x(stage) + S::kTile; }
  __device__ uint32_t step_facts(uint32_t stage) const { return facts + stage * S::kFacts; }
  __device__ uint32_t item_full() const { return barriers; }
  __device__ uint32_t once_free() const { return barriers + 8; }
  __device__ uint32_t kept_free(uint32_t set) const { return barriers + 16 + 8 * set; }
  __device__ uint32_t full(uint32_t stage) const { return barriers + 32 + 8 * stage; }
  __device__ uint32_t empty(uint32_t stage) const { return full(S::kStages + stage); }

  __device__ void init_barriers() const {
    constexpr uint32_t kWarps = 4 * S::kWarpgroups;
    hopper::barrier_init(item_full(), 1);
    hopper::barrier_init(once_free(), kWarps);
    for (int i = 0; i < 2; ++i) hopper::barrier_init(kept_free(i), kWarps);
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

// One thread: takes items and brings what they need.
template <class S>
__device__ inline void copy_tiles(const AttentionBlock<S>& at, const AttentionOperands& t,
                                  const AttentionItems& items) {
  StageCursor<S> cursor;
  for (uint32_t n = 0;; ++n) {
    const int32_t index = atomicAdd(t.next + (S::kQueries ? 0 : 1), 1);
    const uint32_t set = n % 2;
    hopper::wait(at.once_free(), n % 2 ^ 1);
    if (S::kKept > 0) hopper::wait(at.kept_free(set), n / 2 % 2 ^ 1);
    hopper::store_shared(at.item, index);
    if (index >= items.count()) {
      hopper::arrive(at.item_full());
      return;
    }
    const AttentionWork<S> work(t, items, index);
    int32_t present = 0;
    for (int32_t g = 0; g < S::kWarpgroups; ++g) present += work.has(t, g);
    hopper::arrive_and_expect(at.item_full(), static_cast<uint32_t>(present * (S::kOnce + S::kKept)) * S::kTile);
    for (int32_t g = 0; g < S::kWarpgroups; ++g) {
      if (!work.has(t, g)) continue;
      const int32_t x = (S::kQueries ? work.head : work.kv_head) * 64, row = work.block(g) * 64;
      const auto load = [&](uint32_t to, const CUtensorMap& map) {
        hopper::load_tile(to, map, x, row, work.batch, at.item_full());
      };
      if constexpr (S::kPart == AttentionPart::kForward) {
        load(at.once_tile(g, 0), t.q);
      } else if constexpr (S::kPart == AttentionPart::kQueries) {
        load(at.once_tile(g, 0), t.d_o);
        load(at.once_tile(g, 1), t.o);
        load(at.kept_tile(g, set), t.q);
      } else {
        load(at.once_tile(g, 0), t.k);
        load(at.once_tile(g, 1), t.v);
      }
    }
    for (int32_t h = 0; h < work.heads; ++h) {
      const int32_t x = (S::kQueries ? work.kv_head : work.head + h) * 64;
      const float* facts = t.row_facts + (int64_t{work.batch} * t.H + work.head + h) * t.blocks * 128;
      for (int32_t i = 0; i < work.steps; ++i, cursor.advance()) {
        const int32_t step = work.first_step + i;
        const uint32_t stage = cursor.stage, full = at.full(stage);
        hopper::wait(at.empty(stage), cursor.parity ^ 1);
        hopper::arrive_and_expect(full, S::kStage);
        hopper::load_tile(at.x(stage), S::kQueries ? t.k : t.q, x, step * 64, work.batch, full);
        hopper::load_tile(at.y(stage), S::kQueries ? t.v : t.d_o, x, step * 64, work.batch, full);
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
  __device__ void release(uint32_t stage) const {
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
};

}  // namespace kintsugi::kernels::cuda
