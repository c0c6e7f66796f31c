// AdamW over what a rank owns of the state, in several parts: between two of them a deliberate fault can strike, and
// the weights of a part that is done can leave for the peers while the next one is made. Within a part it goes by
// pieces, each in one range of the state, so that all of a piece has its place in the whole model, by which bf16
// moments are rounded. It knows where weight decay begins and ends in each piece (kernels/optimizer.h), and keeps this
// where kernels read it. How the state is cut changes no bit. Not thread safe; one stream.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "comm/communicator.h"
#include "kernels/optimizer.h"
#include "parallel/moment_stage.h"
#include "parallel/state_memory.h"
#include "runtime/backend.h"
#include "runtime/base/status.h"
#include "runtime/model/param_table.h"
#include "runtime/model/train_state.h"

namespace kintsugi::parallel {

class OwnedUpdate {
 public:
  // `ranges` (TrainState::ranges) of a local space whose parts lie between `borders`: ascending multiples of 4, from 0
  // to its length. Padding within a range goes with the tensor before it; that between ranges is left alone. Weights,
  // moments and gradients of both are zero and stay so.
  OwnedUpdate(const runtime::ParamTable& table, std::span<const runtime::StateRange> ranges,
              const std::vector<int64_t>& borders, const MomentsOptions& moments);
  static std::vector<int64_t> halves(int64_t length) { return {0, length / 2, length}; }
  int num_parts() const { return static_cast<int>(first_piece_.size()) - 1; }
  // Device memory that prepare_device() and allocate_moments() take beside the moments.
  int64_t device_bytes() const;
  // Before the first part(): the moments of `state`, whose length is set, from the heap; or from the host, and then
  // this object owns them and their way to the device. All processes call it at the same place in the heap's order.
  Status allocate_moments(const StateMemory& memory, runtime::Backend& backend, comm::SymmetricHeap& heap,
                          runtime::TrainState& state);
  // On a device, once, before the first part(): queues the copy of what the kernels read. This object stays in place.
  Status prepare_device(runtime::Backend& backend, runtime::Stream& stream);
  // Part `part` of `state`. `gradient` has as many elements. `copy`: the weights of type `dtype` that kernels read;
  // null: none. `scalars` lies where kernels read it when they run.
  Status part(int part, const runtime::TrainState& state, void* copy, kernels::DType dtype,
              const kernels::Gradient& gradient, const kernels::AdamWScalars* scalars, const runtime::Backend& backend,
              runtime::Stream& stream) const;

 private:
  struct Piece {
    runtime::StateRange range;
    int64_t first_edge, num_edges;  // of edges_
  };
  int64_t edges_bytes() const;
  int64_t longest_piece() const;

  const MomentsOptions moments_;
  std::vector<size_t> first_piece_;  // by part, and one behind the last
  std::vector<Piece> pieces_;
  std::vector<int64_t> edges_;    // of all pieces, each counted from its begin
  runtime::Buffer device_edges_;  // empty on the CPU
  runtime::Buffer host_moments_;
  std::unique_ptr<MomentStage> stage_;
};

}  // namespace kintsugi::parallel
