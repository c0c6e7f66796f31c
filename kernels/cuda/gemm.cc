// No matrix products on the device yet: every call says cudaErrorNotSupported.
#include "kernels/gemm.h"

#include <cuda_runtime_api.h>

namespace kintsugi::kernels::cuda {

const GemmKernels& gemm() {
  static constexpr GemmKernels kTable{[](void*, const void*, const void*, const float*, int64_t, int64_t, int64_t,
                                         DType, StreamHandle) -> KernelError { return cudaErrorNotSupported; },
                                      [](void*, const void*, const void*, int64_t, int64_t, int64_t, bool, DType,
                                         StreamHandle) -> KernelError { return cudaErrorNotSupported; },
                                      [](float*, const void*, const void*, int64_t, int64_t, int64_t, bool, DType,
                                         StreamHandle) -> KernelError { return cudaErrorNotSupported; },
                                      [](float*, const void*, int64_t, int64_t, bool, DType,
                                         StreamHandle) -> KernelError { return cudaErrorNotSupported; },
                                      []() -> const char* { return "none"; }};
  return kTable;
}

}  // namespace kintsugi::kernels::cuda
