// AdamW over what a rank owns of the state, in several parts: between two of them a deliberate fault can strike, and
// the weights of a part that is done can leave for the peers while the next one is made. It knows where weight decay
// begins and ends in each part (kernels/optimizer.h), and keeps this where kernels read it. How the state is cut
// changes no bit. Not thread safe; one stream.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/optimizer.h"
#include "runtime/backend.h"
#include "runtime/base/status.h"
#include "runtime/model/param_table.h"
#include "runtime/model/train_state.h"

namespace kintsugi::parallel {

class OwnedUpdate {
 public:
  // `ranges` (TrainState::ranges) of a local space whose parts lie between `borders`: ascending, from 0 to its length.
  // Padding goes with the tensor before it: its weights, moments and gradients are zero and stay so.
  OwnedUpdate(const runtime::ParamTable& table, std::span<const runtime::StateRange> ranges,
              std::vector<int64_t> borders);
  static std::vector<int64_t> halves(int64_t length) { return {0, length / 2, length}; }
  int num_parts() const { return static_cast<int>(edges_.size()); }
  // Device memory that prepare_device() takes.
  int64_t device_bytes() const;
  // On a device, once, before the first part(): queues the copy of what the kernels read. This object stays in place.
  Status prepare_device(runtime::Backend& backend, runtime::Stream& stream);
  // Part `part` of `state`. `gradient` has as many elements. `copy`: the weights of type `dtype` that kernels read;
  // null: none. `scalars` lies where kernels read it when they run.
  Status part(int part, const runtime::TrainState& state, void* copy, kernels::DType dtype, const float* gradient,
              const kernels::AdamWScalars* scalars, const runtime::Backend& backend, runtime::Stream& stream) const;

 private:
  std::vector<int64_t> borders_;             // elements: part p is [borders_[p], borders_[p + 1])
  std::vector<std::vector<int64_t>> edges_;  // by part, counted from its begin
  std::vector<int64_t> first_edge_;          // by part, in device_edges_
  runtime::Buffer device_edges_;             // of all parts; empty on the CPU
};

}  // namespace kintsugi::parallel
