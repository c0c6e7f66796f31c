// The product of GemmKernels that turns heads by their rows' positions while its sums lie in registers
// (rotary_linear.cuh). bf16. Internal to kernels/cuda. Operands as in kernels/gemm.h.
#pragma once

#include "kernels/gemm.h"

namespace kintsugi::kernels::cuda {

// Whether the call below runs a layer of `heads` heads of D columns and K summed ones. With fewer rows the library's
// products keep more of the device busy.
bool rotary_linear_applies(int64_t N, int64_t K, int64_t heads, int64_t D, DType dtype);

// y (N, heads D) = x (N, K) w (heads D, K)^T, turned. Where rotary_linear_applies(),
// with operands at multiples of 16 bytes; kNotSupported when the driver knows no tensor maps.
KernelError rotary_linear_forward(void* y, const void* x, const void* w, const HeadRotation& rotation, int64_t N,
                                  int64_t K, StreamHandle stream);

}  // namespace kintsugi::kernels::cuda
