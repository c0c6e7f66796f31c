#include "parallel/state_memory.h"

#include "parallel/gradient_stack.h"
#include "parallel/sharded/shard_plan.h"
#include "parallel/vote.h"

namespace kintsugi::parallel {

StateMemory plan_state_memory(const runtime::ParamTable& table, const ParallelConfig& config, const StateTypes& types,
                              int world_size) {
  if (config.sharded()) return ShardPlan(table, config, types, /*rank=*/0, world_size).memory();
  const int64_t length = table.total_length();
  const int64_t flat_bytes = length * static_cast<int64_t>(sizeof(float));
  const int64_t buffers = config.fixed_order() ? max_gradient_buffers(config.virtual_shards, world_size) : 1;
  StateMemory memory;
  memory.weights_bytes = flat_bytes;
  memory.set_moments(types.moments, length);
  memory.gradients_bytes = buffers * flat_bytes;
  memory.vote_bytes = Vote(table.units(), *Mesh::of_run(config, world_size), config, 0).memory_bytes();
  memory.compute_copy_bytes = types.compute == kernels::DType::kF32 ? 0 : length * kernels::size_of(types.compute);
  return memory;
}

}  // namespace kintsugi::parallel
