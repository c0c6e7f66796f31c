// Products of GemmKernels that compute SwiGLU, or its backward pass, from their sums while these lie in registers
// (swiglu_linear.cuh). bf16. Internal to kernels/cuda. Operands as in kernels/gemm.h.
#pragma once

#include "kernels/types.h"

namespace kintsugi::kernels::cuda {

// Whether the two below run a layer of F columns of SwiGLU and K summed ones. With fewer rows the library's products
// keep more of the device busy.
bool swiglu_linear_applies(int64_t N, int64_t F, int64_t K, DType dtype);

// gate_up (N, 2 F) = x (N, K) w (2 F, K)^T, y (N, F) = silu(gate) up. Where swiglu_linear_applies(), with operands at
// multiples of 16 bytes; kNotSupported when the driver knows no tensor maps.
KernelError swiglu_linear_forward(void* y, void* gate_up, const void* x, const void* w, int64_t N, int64_t K, int64_t F,
                                  StreamHandle stream);
// d_gate_up (N, 2 F) from gate_up, which may be the same array, and dy (N, K) w (K, F).
KernelError swiglu_linear_backward_input(void* d_gate_up, const void* dy, const void* w, const void* gate_up, int64_t N,
                                         int64_t F, int64_t K, StreamHandle stream);

}  // namespace kintsugi::kernels::cuda
