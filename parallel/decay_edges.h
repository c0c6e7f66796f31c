// Which elements of a buffer decay (kernels/optimizer.h), from the tensors that lie there. Pure arithmetic.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/model/param_table.h"
#include "runtime/model/train_state.h"

namespace kintsugi::parallel {

// Where decay begins and ends in elements [begin, end) of the local space, counted from begin. `ranges`, ascending, say
// what of the flat space lies in the local space. Padding goes with the tensor before it: its weights, moments and
// gradients are zero and stay so.
std::vector<int64_t> plan_decay_edges(const runtime::ParamTable& table, std::span<const runtime::StateRange> ranges,
                                      int64_t begin, int64_t end);

}  // namespace kintsugi::parallel
