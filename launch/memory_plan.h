// Every byte of a rank's step, known before step 0: what the shared segment must hold, what is printed, and what is
// held against the memory really used at the end.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "launch/run_config.h"
#include "launch/snapshot_notes.h"
#include "launch/state_layout.h"
#include "runtime/backend.h"

namespace kintsugi::launch {

struct MemoryPlan {
  enum class Place {
    kShared,       // the rank's segment of host memory, where peers and the agent can read it
    kHost,         // host memory of the worker
    kDeviceState,  // GPU: the heap that peers read
    kDevice,       // GPU: the worker's alone
  };
  struct Item {
    // "weights", "gradients", "moments", "snapshots", "compute copy", "activations", "libraries", "batch", ...
    std::string kind;
    int64_t bytes;
    Place place;
  };
  std::vector<Item> items;
  int64_t num_parameters = 0;
  int64_t padding_elements = 0;  // of the flat space: total length minus parameters
  int64_t flops_per_token = 0;

  // The snapshots lie first in the heap.
  int num_snapshot_slots = 0;
  int64_t snapshot_slot_bytes = 0;

  int64_t heap_bytes() const { return bytes_in(Place::kShared); }  // what SharedSegment::create_fd() must be given
  int64_t private_bytes() const { return bytes_in(Place::kHost); }
  int64_t state_heap_bytes() const { return bytes_in(Place::kDeviceState); }  // what a comm::DeviceHeap must be given
  int64_t device_bytes() const { return state_heap_bytes() + bytes_in(Place::kDevice); }
  int64_t total_bytes() const { return heap_bytes() + private_bytes(); }  // of the host
  int64_t bytes_in(Place place) const;
  // A table with one line a kind, for the start of the run.
  std::string to_string() const;
};

// config.validate(world_size) holds. The largest rank's plan: the same on all. On a GPU what the kernels need follows
// from the backend; without one (an agent has none) the items of Place::kDevice are left out.
MemoryPlan plan_memory(const RunConfig& config, int world_size, const runtime::Backend* backend = nullptr);

// Of the state's heap on a GPU, for the one communicator that makes sums in fixed order; 0 where none does. Taken by
// whoever makes the communicators, before the state, and kept from one generation to the next.
int64_t fixed_order_staging_bytes(const RunConfig& config, int world_size);

// A GPU that need not be here: a plan for config.device = "cuda".
struct PlanDevice {
  const kernels::KernelTable* kernels = nullptr;  // asked for sizes alone
  int64_t library_bytes = 0;
  int gpus_on_host = 1;
};
MemoryPlan plan_memory(const RunConfig& config, int world_size, const PlanDevice& device);

// Of all ranks on one host: each rank's segment, and what its worker and each of its spares take for themselves.
int64_t host_bytes_of_job(const RunConfig& config, int world_size);
// Memory of this host that its processes may use: the machine's, or the limit of this process's control group.
int64_t host_memory_bytes();

// Who has memory of one GPU, beside the spares that recovery.spares asks for: ranks of a host take its GPUs in turn.
struct DeviceSharers {
  int num_ranks = 1;
  bool spare = false;  // the process that asks is none of them but a spare
};
int ranks_on_device(int local_rank, int ranks_on_host, int num_devices);

// On a GPU, before more than `taken_bytes` of the plan is taken: kResourceExhausted says what the plan needs, what is
// free, by how much that is too little, and which settings would fit (nearest_fit.h), the host's memory included.
//
// What is free is not enough to go by where ranks share the GPU: they arrive in any order, so each could find room that
// a later one needs. So two things must hold, and neither counts memory twice that a sister has taken already:
// - what this process has yet to take is free now, whoever holds the rest;
// - the plans of all ranks that share the GPU, each with what the driver keeps for a process, are within its memory.
//   This asks nothing of what is in use, so all ranks come to the same verdict, but for what the driver keeps: that is
//   at most what this process finds in use.
// What others than the job hold cannot be told from what sisters hold. At least theirs is what is in use beyond all
// that this process and its sisters could have taken by now (a spare has ranks and spares for sisters); a setting is
// said to fit when all of them fit beside that.
// A spare holds a copy of all that its worker holds on the GPU, so that it takes over at once. Spares start once the
// ranks have their memory, and ranks never make room for them: a run trains without. Of those that a GPU's ranks ask
// for (recovery.spares each) all fit beside the ranks, or none starts: one that took what a rank without a spare has
// just left would keep its replacement out.
Status check_device_memory(const RunConfig& config, int world_size, const runtime::Backend& backend,
                           int64_t taken_bytes, const DeviceSharers& sharers);

// Lines below the plan: who shares the GPU, what they need together, and where that is too much for spares what would
// make room for them. Empty for a rank that has a GPU for itself and no spares.
Result<std::string> describe_device_sharing(const RunConfig& config, int world_size, const runtime::Backend& backend,
                                            int num_ranks);

// Snapshot slots are the first allocations in a rank's heap, made alike by its worker and its agent. A slot holds
// what state_layout() says of the state of one step; its last bytes are the step's notes.
Result<std::vector<void*>> allocate_snapshot_slots(comm::SymmetricHeap& heap, const MemoryPlan& plan);
SnapshotNotes& snapshot_notes(void* slot, const MemoryPlan& plan);

}  // namespace kintsugi::launch
