// No attention over whole sequences on the device yet: every call says cudaErrorNotSupported.
#include "kernels/attention.h"

#include <cuda_runtime_api.h>

namespace kintsugi::kernels::cuda {

const AttentionKernels& attention() {
  static constexpr AttentionKernels kTable{
      [](void*, float*, const void*, const void*, const void*, const AttentionShape&, DType,
         StreamHandle) -> KernelError { return cudaErrorNotSupported; },
      [](void*, void*, void*, const void*, const void*, const float*, const void*, const void*, const void*,
         const AttentionShape&, void*, DType, StreamHandle) -> KernelError { return cudaErrorNotSupported; },
      [](const AttentionShape&, DType) -> int64_t { return 0; }};
  return kTable;
}

}  // namespace kintsugi::kernels::cuda
