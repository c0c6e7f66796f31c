// Which samples of a step's global batch a rank runs, and in how many pieces. Pure arithmetic.
//
// Fast order: rank r of N takes the r-th N-th of the batch, in micro-steps of `micro_batch_size` sequences.
// Fixed order: the batch is cut into V virtual shards of G / V sequences; rank r takes shards [r V / N, (r+1) V / N),
// and each forward and backward runs exactly one of them, whatever micro_batch_size says: the order of every sum is
// then a function of G and V alone.
#pragma once

#include <cstdint>

#include "parallel/parallel_config.h"

namespace kintsugi::parallel {

struct BatchLayout {
  int64_t global_batch = 0;     // sequences of a step, all ranks
  int64_t first_sample = 0;     // of this rank, counted from the step's first sample
  int64_t micro_batch = 0;      // sequences of one forward and backward
  int64_t num_micro_steps = 0;  // of this rank
  int64_t first_shard = 0;      // fixed order: the virtual shard of micro-step 0
  int64_t num_shards = 0;       // fixed order: V; fast order: 0

  bool fixed_order() const { return num_shards > 0; }
};

// micro_batch_size 0: a rank's whole share at once. kInvalidArgument names the key, and what would fit.
Result<BatchLayout> plan_batch(int64_t global_batch, int64_t micro_batch_size, const ParallelConfig& config, int rank,
                               int world_size);

}  // namespace kintsugi::parallel
