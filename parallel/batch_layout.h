// Which samples of a step's global batch a rank runs, and in how many pieces. Pure arithmetic.
//
// Fast order: rank r of N takes the r-th N-th of the batch, in micro-steps of `micro_batch_size` sequences.
// Fixed order: the batch is cut into V virtual shards of G / V sequences; rank r takes shards [r V / N, (r+1) V / N),
// and each forward and backward runs exactly one of them, whatever micro_batch_size says: the order of every sum is
// then a function of G and V alone. In the sharded modes, where all ranks gather and reduce in every micro-step,
// micro-step m of rank r runs shard m N + r instead, and in the last one some ranks may have nothing to run.
#pragma once

#include <cstdint>

#include "parallel/parallel_config.h"

namespace kintsugi::parallel {

struct BatchLayout {
  int64_t global_batch = 0;          // sequences of a step, all ranks
  int64_t first_sample = 0;          // of this rank's micro-step 0, counted from the step's first sample
  int64_t sample_stride = 0;         // from the first sample of a micro-step to that of the next
  int64_t micro_batch = 0;           // sequences of one forward and backward
  int64_t num_micro_steps = 0;       // in the sharded modes the same on all ranks
  int64_t num_busy_micro_steps = 0;  // the first so many have samples for this rank
  int64_t num_shards = 0;            // fixed order: V; fast order: 0
  bool interleaved = false;          // fixed order: micro-step m of rank r of N runs shard m N + r

  bool fixed_order() const { return num_shards > 0; }
  // First sample of a busy micro-step, counted from the step's first; its `micro_batch` samples follow each other.
  int64_t first_sample_of(int64_t micro_step) const { return first_sample + micro_step * sample_stride; }
  // Fixed order: the virtual shard that a busy micro-step runs.
  int64_t shard_of(int64_t micro_step) const { return first_sample_of(micro_step) / micro_batch; }
  // Sequences of a step that this rank runs.
  int64_t share() const { return num_busy_micro_steps * micro_batch; }
};

// micro_batch_size 0: a rank's whole share at once. kInvalidArgument names the key, and what would fit.
Result<BatchLayout> plan_batch(int64_t global_batch, int64_t micro_batch_size, const ParallelConfig& config, int rank,
                               int world_size);

}  // namespace kintsugi::parallel
