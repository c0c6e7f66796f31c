// ZeRO 1-3 and hybrid sharding. Every rank owns a shard of weights and moments (parallel/layout/unit_shards.h) and
// updates only that; what it needs of the rest is gathered unit by unit. `shard` ranks hold a replica together,
// `replicate` replicas hold the same.
//
//   mode    a rank keeps whole                     gradients
//   zero1   compute weights, one gradient          added up over micro-steps here, reduced once a step
//   zero2   compute weights                        reduced in every micro-step, accumulated as shards
//   zero3   nothing but two units in turn (below)  reduced in every micro-step, accumulated as shards
// parallelism.accumulation has the gradients of any of them added up whole or in shards. In fixed order every virtual
// shard's gradient is reduced by itself in all modes.
//
// Weights. A unit's gathered weights are stale after an update; in zero3 also once another unit has taken their buffer,
// from which reshard_after_forward = false and keep_after_forward keep blocks by a buffer for each. acquire(i) makes
// the stream wait for unit i's all-gather and starts the next one's: i + 1 in forward, i - 1 in backward. So zero1 and
// zero2 gather once a step, zero3 twice a micro-step, but for the two blocks whose weights still lie there where
// forward turns into backward, and backward into the next forward (plan_traffic() counts). What travels is the compute
// dtype; the fp32 vectors of all units (norms, biases), which the kernels read unrounded, are a small table that every
// rank keeps whole and gathers once after each update.
//
// Buffers of zero3: two for blocks, in turn; one for the tables at both ends (two with a tied embedding, which stays
// gathered from one end to the other and is reduced once). The same of fp32 for gradients in zero2 and zero3. In zero1
// and zero2 every unit has a buffer of its own for weights.
//
// Gradients. gradients_ready(i) starts unit i's reduce-scatter on its own communicator, then, with replicas, the
// all-reduce of the shard among them; the result is added to the shard's gradient. A buffer is handed out again once
// its sum is complete. Sums are fp32; the division by the number of targets happens in the update.
//
// Fixed order. Micro-step m of rank r runs virtual shard m N + r (batch_layout.h). Its gradient goes to the owners by
// all-to-all (and all-gather among replicas), and each owner adds the leaves of its chunk up the reduction tree
// (comm/reduction_tree.h), so the bits are those of DataParallel in fixed order, at every world size and mode.
//
// Update. It goes unit by unit, and what the next forward reads first is gathered behind it while the rest is updated:
// the first units in zero1 and zero2, and in zero3 one for each buffer.
//
// State, gradient shards and everything that peers read lie in the symmetric heap (on a GPU: of device memory).
#pragma once

#include <memory>
#include <vector>

#include "parallel/layout/unit_shards.h"
#include "parallel/mesh.h"
#include "parallel/parallel_mode.h"
#include "parallel/state_memory.h"

namespace kintsugi::parallel {

struct FullyShardedOptions {
  ParallelConfig config;
  kernels::DType dtype = kernels::DType::kF32;  // of the weights that the kernels read, and on the wire
  MomentsOptions moments{};
  int rank = 0, world_size = 1;
  int64_t num_micro_steps = 1;  // the same on all ranks
  bool overlap = true;          // gather ahead, and reduce while backward runs; off: wait at each
};

class FullySharded : public ParallelMode {
 public:
  // Takes plan_state_memory() bytes from `heap`, always in the same order, and writes nothing to it: another process of
  // this rank may be training there. `table`, `backend` and `heap` outlive it. `stream` carries what little a device
  // must be told before the first step. kInvalidArgument when the mesh does not fit.
  static Result<std::unique_ptr<FullySharded>> create(const runtime::ParamTable& table,
                                                      const FullyShardedOptions& options, runtime::Backend& backend,
                                                      comm::SymmetricHeap& heap, runtime::Stream& stream);
  // Device memory that create() takes beside the heap.
  static int64_t device_bytes(const runtime::ParamTable& table, const FullyShardedOptions& options);

  virtual const UnitShards& shards() const = 0;
  // Collectives issued since begin_step() and the bytes this rank gave to each kind: held against traffic() in tests.
  struct Traffic {
    int64_t all_gathers = 0, all_gather_bytes = 0;
    int64_t reduce_scatters = 0, reduce_scatter_bytes = 0;
    int64_t all_reduces = 0, all_reduce_bytes = 0;
    int64_t all_to_alls = 0, all_to_all_bytes = 0;
    bool operator==(const Traffic&) const = default;
  };
  virtual Traffic traffic() const = 0;
};

// kInvalidArgument when parallelism.keep_after_forward names what is no block.
Status check_unit_names(const runtime::ParamTable& table, const ParallelConfig& config);

// What one step of the mode sends, by formula: count and bytes of each collective (bytes of one rank's contribution).
FullySharded::Traffic plan_traffic(const runtime::ParamTable& table, const FullyShardedOptions& options);

}  // namespace kintsugi::parallel
