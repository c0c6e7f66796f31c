// No paged attention on the device yet: every call says cudaErrorNotSupported.
#include "kernels/paged_attention.h"

#include <cuda_runtime_api.h>

namespace kintsugi::kernels::cuda {

const PagedAttentionKernels& paged_attention() {
  static constexpr PagedAttentionKernels kTable{
      [](void*, const void*, const void*, const void*, const int32_t*, const int32_t*, const PagedShape&, DType,
         StreamHandle) -> KernelError { return cudaErrorNotSupported; },
      [](void*, void*, const void*, const void*, const int64_t*, int64_t, int64_t, int64_t, int64_t, int64_t, DType,
         StreamHandle) -> KernelError { return cudaErrorNotSupported; }};
  return kTable;
}

}  // namespace kintsugi::kernels::cuda
