// Memsets of a recorded graph as kernels. Libraries clear counters of some bytes in front of most matrix products; a
// graph's memset node waits about 2.5 us longer between two kernels than a kernel does, some hundred times a step.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace kintsugi::kernels::cuda {

inline constexpr int64_t kMaxFillBytes = 64 << 10;  // more is better done by a memset

// Replaces each memset node of one row and at most kMaxFillBytes by a kernel node that stores the same bytes in the
// same place of the graph; *replaced: how many. Before instantiation. The same results.
cudaError_t replace_small_memsets(cudaGraph_t graph, int64_t* replaced);

}  // namespace kintsugi::kernels::cuda
