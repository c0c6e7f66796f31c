#include "parallel/gradient_stack.h"

#include <algorithm>

#include "comm/reduction_tree.h"

namespace kintsugi::parallel {

GradientStack plan_gradient_stack(int64_t num_shards, int rank, int world_size) {
  const comm::LeafRange owned = comm::owned_leaves(num_shards, rank, world_size);
  GradientStack stack;
  stack.num_buffers = 0;
  int depth = 0;
  for (int64_t shard = owned.begin; shard < owned.end; ++shard) {
    // The stack after a prefix of the range is that prefix's maximal subtrees.
    const int after = static_cast<int>(comm::maximal_subtrees(num_shards, {owned.begin, shard + 1}).size());
    stack.shards.push_back({.buffer = depth, .merges = depth + 1 - after});
    stack.num_buffers = std::max(stack.num_buffers, depth + 1);
    depth = after;
  }
  stack.num_parts = depth;
  return stack;
}

int max_gradient_buffers(int64_t num_shards, int world_size) {
  int most = 1;
  for (int r = 0; r < world_size; ++r) {
    most = std::max(most, plan_gradient_stack(num_shards, r, world_size).num_buffers);
  }
  return most;
}

}  // namespace kintsugi::parallel
