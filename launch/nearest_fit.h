// Which settings would make a run fit that does not: the fewest that must change, and of those the cheapest first.
#pragma once

#include <functional>
#include <string>

#include "launch/run_config.h"

namespace kintsugi::launch {

// `fits` says whether a configuration that is valid at this number of ranks has the memory it needs; it is asked some
// hundred times at most. Tried, alone and together: training.recompute, training.micro_batch_size, parallelism.mode,
// optimizer.moments_dtype, optimizer.offload on a GPU, and what memory recovery holds (recovery.spares alone, or
// with recovery.snapshot_every and checkpoint.every). "training.recompute = \"block\" would fit", or that nothing
// would.
std::string nearest_fit(const RunConfig& config, int world_size, const std::function<bool(const RunConfig&)>& fits);

}  // namespace kintsugi::launch
