// Activations of the feed-forward layer. Memory bound.
//   N rows   F hidden width
#pragma once

#include "kernels/types.h"

namespace kintsugi::kernels {

struct ActivationKernels {
  // SwiGLU (Shazeer, arXiv:2002.05202): gate_up (N, 2F) T, the gate's F columns first.
  // y[n,f] = silu(gate) * up, silu(a) = a / (1 + exp(-a)). Moves 3 N F elements.
  KernelError (*swiglu_forward)(void* y, const void* gate_up, int64_t N, int64_t F, DType dtype, StreamHandle stream);
  // d_gate_up (N, 2F) from dy (N, F); d_gate_up may alias gate_up.
  KernelError (*swiglu_backward)(void* d_gate_up, const void* dy, const void* gate_up, int64_t N, int64_t F, DType dtype,
                                 StreamHandle stream);
  // GELU, tanh form (Hendrycks & Gimpel, arXiv:1606.08415), as GPT-2: x, y (N, F).
  KernelError (*gelu_forward)(void* y, const void* x, int64_t N, int64_t F, DType dtype, StreamHandle stream);
  // dx may alias dy.
  KernelError (*gelu_backward)(void* dx, const void* dy, const void* x, int64_t N, int64_t F, DType dtype,
                               StreamHandle stream);
  // y = a + b elementwise, n elements; y may alias either.
  KernelError (*add)(void* y, const void* a, const void* b, int64_t n, DType dtype, StreamHandle stream);
};

namespace reference { const ActivationKernels& activation(); }
namespace cpu { const ActivationKernels& activation(); }
namespace cuda { const ActivationKernels& activation(); }

}  // namespace kintsugi::kernels
