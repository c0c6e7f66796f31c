// Where a rank of a sharded mode keeps what: its pieces of the symmetric heap, the buffers of whole units, and which
// unit uses which. Pure arithmetic, the same on every rank.
//
// Slots. Weights and gradients of whole units lie in slots. A mode that keeps them whole has a slot for each unit;
// otherwise blocks take two in turn, and the two ends share one (with a tied embedding, which the head needs inside its
// own unit, each end has one).
#pragma once

#include <cstdint>
#include <vector>

#include "parallel/fully_sharded.h"
#include "parallel/state_memory.h"

namespace kintsugi::parallel {

struct Slots {
  std::vector<int> of_unit;
  std::vector<int64_t> begin;  // elements, by slot
  int64_t length = 0;          // of all
  int count() const { return static_cast<int>(begin.size()); }
};

// Fixed order: leaves of one micro-step that are a whole subtree of the reduction tree, and its place on a stack of
// sums (gradient_stack.h): the subtree's sum is written into `buffer`, then so many `merges` follow.
struct LeafRun {
  int first_rank, count;  // the ranks whose leaves they are
  int buffer, merges;
};
struct LeafRuns {
  std::vector<std::vector<LeafRun>> by_micro_step;
  int num_buffers = 1;
};
LeafRuns plan_leaf_runs(int64_t num_shards, int world_size);

class ShardPlan {
 public:
  ShardPlan(const runtime::ParamTable& table, const ParallelConfig& config, const StateTypes& types, int rank,
            int world_size);

  const Mesh mesh;
  const int num_shards, num_replicas, shard, replica;
  const UnitShards shards;
  const bool fixed;       // reduce order
  const bool wire_bf16;   // gradients
  const bool rounded;     // the kernels read another type than fp32
  const bool every_step;  // gradients are reduced in every micro-step; accumulated whole: in the last
  const bool tied;        // the head has no matrix of its own
  const bool one_rank;    // nothing is exchanged
  const bool alone;       // fast order at one rank: gradients are written where they stay
  Slots weights, gradients, received;
  std::vector<bool> kept;  // by unit: a block with a slot for its weights alone, though others take turns
  LeafRuns leaves;         // fixed order; buffers of the local space

  StateMemory memory() const;
  // Where the local space is cut for the update: unit by unit where each is gathered next, else in halves.
  std::vector<int64_t> update_borders() const;
  int64_t weight_bytes() const { return kernels::size_of(types_.compute); }  // of one element that the kernels read
  // Slots that hold units of different layouts: what one leaves in another's padding must go.
  bool shared_ends() const { return !alone && gradients.of_unit.front() == gradients.of_unit.back(); }
  int num_units() const { return shards.num_units(); }

 private:
  StateTypes types_;
  int64_t vote_bytes_ = 0;
};

// Elements of the flat space that are no tensor's, as ranges of a unit's buffer of `length` elements.
std::vector<runtime::StateRange> unit_padding(const runtime::ParamTable& table, int unit, int64_t length);

}  // namespace kintsugi::parallel
