// Ranks as threads of one process: for tests, and for a job of one rank. Peers' heaps are plain memory.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "comm/communicator.h"

namespace kintsugi::comm {

class LocalWorld {
 public:
  virtual ~LocalWorld() = default;
  // One world per generation; heaps are made once per rank and reused across worlds.
  static std::shared_ptr<LocalWorld> create(int world_size, int64_t generation, std::vector<SymmetricHeap*> heaps,
                                            int num_channels = 1);
  static std::unique_ptr<SymmetricHeap> create_heap(int64_t capacity_bytes);
  // Call once per rank. The communicator keeps the world alive.
  virtual Result<std::unique_ptr<Communicator>> join(int rank, const CommConfig& config, StopToken stop) = 0;
  // The same, with a communicator for each of `groups` instead of one for all ranks on channel 0 (as
  // create_host_communicators()).
  virtual Result<std::vector<std::unique_ptr<Communicator>>> join(int rank, std::span<const Group> groups,
                                                                  const CommConfig& config, StopToken stop) = 0;
};

}  // namespace kintsugi::comm
