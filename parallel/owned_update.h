// AdamW over the part of the state that a rank owns, in two halves, so that a deliberate fault can strike between them.
// It knows where weight decay begins and ends in that part (kernels/optimizer.h), and keeps this where kernels read it.
// Not thread safe; one stream.
#pragma once

#include <array>
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
  // `ranges` (TrainState::ranges) of a local space of `length` elements. Padding goes with the tensor before it: its
  // weights, moments and gradients are zero and stay so.
  OwnedUpdate(const runtime::ParamTable& table, std::span<const runtime::StateRange> ranges, int64_t length);
  // Device memory that prepare_device() takes.
  int64_t device_bytes() const;
  // On a device, once, before the first half(): queues the copy of what the kernels read. This object stays in place.
  Status prepare_device(runtime::Backend& backend, runtime::Stream& stream);
  // Half 0 or 1 of `state`. `gradient` has as many elements. `copy`: the weights of type `dtype` that kernels read;
  // null: none. `scalars` lies where kernels read it when they run.
  Status half(int half, const runtime::TrainState& state, void* copy, kernels::DType dtype, const float* gradient,
              const kernels::AdamWScalars* scalars, const runtime::Backend& backend, runtime::Stream& stream) const;

 private:
  std::array<int64_t, 3> borders_;             // elements: half h is [borders_[h], borders_[h + 1])
  std::array<std::vector<int64_t>, 2> edges_;  // by half, counted from its begin
  runtime::Buffer device_edges_;               // of both halves; empty on the CPU
};

}  // namespace kintsugi::parallel
