// Fixed order on one rank: the gradients of its virtual shards, summed as a binary counter counts. Each shard's
// gradient is written into the buffer on top of a stack; then, while the two topmost buffers are siblings of the
// reduction tree, the upper one is added to the lower. After the last shard buffer j holds the rank's j-th maximal
// subtree, in ascending order: what Communicator::all_reduce_fixed takes. (Pairwise summation: Higham, Accuracy and
// Stability, section 4.2.) Pure arithmetic.
#pragma once

#include <cstdint>
#include <vector>

namespace kintsugi::parallel {

struct GradientStack {
  struct Shard {
    int buffer;  // where the shard's gradient is written
    int merges;  // then so many times: buffer[top - 1] += buffer[top], top counted down
  };
  std::vector<Shard> shards;  // by micro-step
  int num_parts = 1;          // buffers in use after the last shard
  int num_buffers = 1;        // the most in use at once
};

// `rank` of `world_size` owns its range of `num_shards` (comm::owned_leaves).
GradientStack plan_gradient_stack(int64_t num_shards, int rank, int world_size);
// Buffers that the neediest rank takes: heaps are laid out alike on all.
int max_gradient_buffers(int64_t num_shards, int world_size);

}  // namespace kintsugi::parallel
