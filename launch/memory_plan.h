// Every byte of a rank's step, known before step 0: what the shared segment must hold, what is printed, and what is
// held against the memory really used at the end.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "comm/communicator.h"
#include "launch/run_config.h"
#include "launch/snapshot_notes.h"

namespace kintsugi::launch {

struct MemoryPlan {
  struct Item {
    std::string kind;  // "weights", "gradients", "moments", "snapshots", "compute copy", "activations", "batch"
    int64_t bytes;
    bool shared;  // in the symmetric heap, where peers and the agent can read it
  };
  std::vector<Item> items;
  int64_t num_parameters = 0;
  int64_t padding_elements = 0;  // of the flat space: total length minus parameters
  int64_t flops_per_token = 0;

  // The snapshots lie first in the heap.
  int num_snapshot_slots = 0;
  int64_t snapshot_slot_bytes = 0;

  int64_t heap_bytes() const;  // what SharedSegment::create_fd() must be given
  int64_t private_bytes() const;
  int64_t total_bytes() const { return heap_bytes() + private_bytes(); }
  // A table with one line a kind, for the start of the run.
  std::string to_string() const;
};

// config.validate(world_size) holds. The largest rank's plan: the same on all.
MemoryPlan plan_memory(const RunConfig& config, int world_size);

// Snapshot slots are the first allocations in a rank's heap, made alike by its worker and its agent. A slot holds
// the rank's shard_range() of the state of one step: weights, then m, then v, `range.count` floats each; its last bytes
// are the step's notes.
Result<std::vector<void*>> allocate_snapshot_slots(comm::SymmetricHeap& heap, const MemoryPlan& plan);
checkpoint::ShardView snapshot_view(const void* slot, checkpoint::ShardRange range);
SnapshotNotes& snapshot_notes(void* slot, const MemoryPlan& plan);

}  // namespace kintsugi::launch
