// Who holds which part of the state, and how a part lies in a snapshot slot. Pure arithmetic over the configuration:
// the trainer, the agent's writer and the memory plan of a rank all come to the same.
//
// A slot holds weights, then m, then v, `slot_length` elements each, of the types that they have in the state. In
// data-parallel runs every rank holds the whole state, so a slot has only the rank's even share of it. In sharded runs
// a slot is the rank's whole local state, padding included, because nobody else may hold it.
#pragma once

#include <cstdint>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "launch/run_config.h"
#include "runtime/model/param_table.h"
#include "runtime/model/train_state.h"

namespace kintsugi::launch {

struct StateLayout {
  std::vector<runtime::StateRange> held;     // by the rank, where it lies in its state's buffers
  std::vector<runtime::StateRange> written;  // of that, what the rank brings to checkpoints and digests: all ranks
                                             // together each element once
  int64_t slot_length = 0;                   // elements of each of a slot's three buffers
  int64_t slot_begin = 0;                    // the slot's first element in the state's buffers
  kernels::DType moments_dtype = kernels::DType::kF32;

  int64_t slot_bytes() const {
    return slot_length * (static_cast<int64_t>(sizeof(float)) + 2 * kernels::size_of(moments_dtype));
  }
};

// config.validate(world_size) holds.
StateLayout state_layout(const RunConfig& config, const runtime::ParamTable& table, int rank, int world_size);
// Whether a rank's slots hold all of its state that other ranks lack: then all can go back to them.
bool slots_hold_state(const RunConfig& config);
// Which ranks hold the same state as each, itself included (bit r: rank r); empty: all do.
std::vector<uint64_t> state_holders(const RunConfig& config, int world_size);
// Channels that a rank's segment must have.
int num_channels(const RunConfig& config, int world_size);
// What every rank brings, by rank.
std::vector<std::vector<runtime::StateRange>> state_cover(const RunConfig& config, const runtime::ParamTable& table,
                                                          int world_size);

// What of a slot goes into the rank's shard file.
checkpoint::ShardView snapshot_view(const void* slot, const StateLayout& layout);

}  // namespace kintsugi::launch
