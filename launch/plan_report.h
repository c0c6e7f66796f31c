// What a run would need, without starting anything: for the configured mode and its neighbours, at any number of ranks
// and for machines that are not here. Also the refusal of runs that cannot fit.
#pragma once

#include <cstdint>
#include <string>

#include "launch/run_config.h"

namespace kintsugi::launch {

struct PlanRequest {
  int world_size = 1;
  double gpu_gib = 0;   // memory of each GPU, one a rank; 0: the ranks compute on the CPU
  double host_gib = 0;  // memory of the host that all ranks share; 0: this machine's
  // What a rank computes and sends a second. 0: measured rates: on a GPU 530 TFLOP/s (an H200's at the 124M shape,
  // where attention counts in full) and 300 GB/s; on the CPU 0.2 TFLOP/s (a core's products) and 1.6 GB/s (8 ranks of
  // two cores, 64 MiB).
  double tflops = 0;
  double link_gb_s = 0;
};

// A table with a line a mode: memory by kind, whether it fits, what a rank sends a step, and how long a step takes when
// sums hide behind the computation as far as they can. Of a GPU's memory, what its libraries take is left out, and
// activations are counted as the CPU's kernels need them. kInvalidArgument when the configured mode cannot be.
Result<std::string> report_plan(const RunConfig& config, const PlanRequest& request);

// Memory of this host that its processes may use: the machine's, or the limit of this process's control group.
int64_t host_memory_bytes();

// kInvalidArgument when all ranks' memory on this host is more than it has: by how much, and which mode or setting
// would fit. Spares' own memory counts, too.
Status check_host_memory(const RunConfig& config, int world_size, int64_t host_bytes);

}  // namespace kintsugi::launch
