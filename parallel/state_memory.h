// Bytes that a rank keeps, for the memory plan.
#pragma once

#include <cstdint>

#include "kernels/types.h"
#include "parallel/parallel_config.h"
#include "runtime/model/param_table.h"

namespace kintsugi::parallel {

struct StateTypes {
  kernels::DType compute = kernels::DType::kF32;  // of the weights that the kernels read
  kernels::DType moments = kernels::DType::kF32;
};

struct StateMemory {
  int64_t weights_bytes = 0;  // in the symmetric heap, as the next three
  int64_t moments_bytes = 0;
  int64_t gradients_bytes = 0;
  int64_t vote_bytes = 0;
  // Private. ddp: the rounded weights; 0 in fp32, where the kernels read the master weights. Sharded modes: gathered
  // weights.
  int64_t compute_copy_bytes = 0;
};

StateMemory plan_state_memory(const runtime::ParamTable& table, const ParallelConfig& config, const StateTypes& types,
                              int world_size);

}  // namespace kintsugi::parallel
