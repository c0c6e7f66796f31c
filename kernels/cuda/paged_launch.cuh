// What a launch of paged decode attention is made from. Internal to kernels/cuda.
#pragma once

#include "kernels/cuda/paged_decode_item.cuh"

namespace kintsugi::kernels::cuda {

struct PagedLaunch {
  PagedArguments arguments{};
  dim3 grid;  // (S * splits, K * head_groups): of items
};

// At most so many splits of a sequence, for contexts of any length.
int64_t most_paged_splits(const PagedShape& shape);

// Without the rotation. cudaErrorInvalidValue for what the kernels do not take.
KernelError prepare_paged(PagedLaunch* launch, void* o, const void* q, const void* k_cache, const void* v_cache,
                          const int32_t* block_tables, const int32_t* context_lens, const PagedShape& shape,
                          DType dtype, void* workspace);

}  // namespace kintsugi::kernels::cuda
