// Who takes part in one generation. A new generation follows every change; communicators belong to
// exactly one.
#pragma once

#include <cstdint>
#include <vector>

namespace kintsugi::comm {

struct Membership {
  int64_t generation = 0;  // grows by 1 with each change; never reused within a job
  int rank = 0;            // this process's, in [0, world_size)
  int world_size = 1;
};

// Some ranks of a generation that call collectives together: the shards of one replica, the ranks that hold the same
// shard. What a communicator of the group calls rank and world_size are a rank's place in `ranks` and their number.
// Several groups may have the same ranks, each on a channel of its own; then their collectives run side by side. On one
// channel a rank is in one group at most, but groups without a common rank share it (all replicas gather on one).
struct Group {
  std::vector<int> ranks;  // of the generation, ascending
  int channel = 0;         // of those that the memory was made with
};

}  // namespace kintsugi::comm
