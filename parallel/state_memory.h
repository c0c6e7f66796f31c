// Bytes that a rank keeps, for the memory plan.
#pragma once

#include <cstdint>

#include "kernels/types.h"
#include "parallel/parallel_config.h"
#include "runtime/model/param_table.h"

namespace kintsugi::parallel {

// How AdamW's moments are kept.
struct MomentsOptions {
  kernels::DType dtype = kernels::DType::kF32;
  bool on_host = false;               // in pinned memory of the worker's host, and on a device during updates alone
  int64_t bucket = int64_t{8} << 20;  // elements that travel at a time; a multiple of 64
};

struct StateTypes {
  kernels::DType compute = kernels::DType::kF32;  // of the weights that the kernels read
  MomentsOptions moments{};
};

struct StateMemory {
  int64_t weights_bytes = 0;  // in the symmetric heap, as the next three
  int64_t moments_bytes = 0;  // 0 when they are kept on the host
  int64_t gradients_bytes = 0;
  int64_t vote_bytes = 0;
  // Private. ddp: the rounded weights; 0 in fp32, where the kernels read the master weights. Sharded modes: gathered
  // weights.
  int64_t compute_copy_bytes = 0;
  int64_t host_moments_bytes = 0;  // private, of the host

  void set_moments(const MomentsOptions& moments, int64_t length) {
    (moments.on_host ? host_moments_bytes : moments_bytes) = 2 * length * kernels::size_of(moments.dtype);
  }
};

StateMemory plan_state_memory(const runtime::ParamTable& table, const ParallelConfig& config, const StateTypes& types,
                              int world_size);

}  // namespace kintsugi::parallel
