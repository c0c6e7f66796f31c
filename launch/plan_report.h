// What a run would need, without starting anything: for the configured mode and its neighbours, at any number of ranks
// and for machines that are not here. Also the refusal of runs that cannot fit.
#pragma once

#include <cstdint>
#include <string>

#include "launch/run_config.h"

namespace kintsugi::launch {

struct PlanRequest {
  int world_size = 1;
  double gpu_gib = 0;   // memory of each GPU, one a rank; 0: an H200's when config.device is "cuda", else none
  double host_gib = 0;  // memory of the host that all ranks share; 0: this machine's
  // What a rank computes and sends a second. 0: on a GPU the rates of step_estimate.h and 300 GB/s, which nobody has
  // measured; on the CPU 0.2 TFLOP/s (a core's products) and 1.6 GB/s (8 ranks of two cores, 64 MiB).
  double tflops = 0;
  double link_gb_s = 0;
};

// A table with a line a mode: memory by kind, whether it fits, what a rank sends a step, and how long a step takes when
// sums hide behind the computation as far as they can. For GPUs a second one: the configured mode with every type and
// place of the moments and every recomputation, and what would fit when the configured settings do not. Sizes are those
// of the GPU's kernels in a build with CUDA, whether a GPU is here or not. kInvalidArgument when the configured mode
// cannot be.
Result<std::string> report_plan(const RunConfig& config, const PlanRequest& request);

// kInvalidArgument when all ranks' memory on this host is more than it has: by how much, and which mode or setting
// would fit. Spares' own memory counts, too.
Status check_host_memory(const RunConfig& config, int world_size, int64_t host_bytes);

}  // namespace kintsugi::launch
