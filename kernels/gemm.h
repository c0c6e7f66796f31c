// Linear layers: the three matrix products of y = x W^T + b.
//   N rows (tokens)   I input width   O output width
//   x (N, I) T   w (O, I) T   y, dy (N, O) T   dx (N, I) T   dw (O, I) fp32   bias, dbias (O) fp32
// T is the call's DType. Operations: 2 N I O each. A row of y or dx has the same bits whatever N is
// and whatever the number of threads (prefill and training forward, 1 and 8 ranks rely on it). On the device that
// holds for products of one (N, I, O) only, because the library picks another order of summation for another N; with
// bf16 the bias is rounded to bf16 there, before it is added in fp32, and a product to bf16, before it is added to dx.
// Operands that do not start at a multiple of 16 bytes, or rows that are none, run slower.
#pragma once

#include "kernels/types.h"

namespace kintsugi::kernels {

// One linear layer of a step: its three products are worth preparing for.
struct LinearShape {
  int64_t N, I, O;
  DType dtype;
  bool bias;
  bool accumulate;             // weight gradients are added to, too
  bool gelu_after = false;     // linear_gelu_forward runs it
  bool gelu_before = false;    // linear_gelu_backward_input runs its backward pass
  bool swiglu_after = false;   // linear_swiglu_forward runs it; O is 2 F
  bool swiglu_before = false;  // linear_swiglu_backward_input runs its backward pass; I is F
  int64_t rotary_after = 0;    // above 0: linear_rotary_forward runs it, for heads of so many columns
};

// What linear_rotary_forward does to its sums: of `heads` heads of D columns side by side the first `turned` are turned
// by their row's position. positions, cos_sin and D as in kernels/rope.h.
struct HeadRotation {
  const int32_t* positions;
  const float* cos_sin;
  int64_t turned, heads, D;
};

struct GemmKernels {
  // y[n,o] = sum_i x[n,i] w[o,i] (+ bias[o] unless null).
  KernelError (*linear_forward)(void* y, const void* x, const void* w, const float* bias, int64_t N, int64_t I,
                                int64_t O, DType dtype, StreamHandle stream);
  // dx[n,i] = sum_o dy[n,o] w[o,i]; added to dx when `accumulate`.
  KernelError (*linear_backward_input)(void* dx, const void* dy, const void* w, int64_t N, int64_t I, int64_t O,
                                       bool accumulate, DType dtype, StreamHandle stream);
  // dw[o,i] = sum_n dy[n,o] x[n,i], in fp32; added to dw when `accumulate`.
  KernelError (*linear_backward_weight)(float* dw, const void* dy, const void* x, int64_t N, int64_t I, int64_t O,
                                        bool accumulate, DType dtype, StreamHandle stream);
  // dbias[o] = sum_n dy[n,o]; added to dbias when `accumulate`.
  KernelError (*linear_backward_bias)(float* dbias, const void* dy, int64_t N, int64_t O, bool accumulate, DType dtype,
                                      StreamHandle stream);
  // The same with GELU's tanh form behind the layer: up = x w^T + bias, which the backward pass wants, and y =
  // gelu(up). Like linear_forward and ActivationKernels::gelu_forward, except that the device takes GELU before it
  // rounds up.
  KernelError (*linear_gelu_forward)(void* y, void* up, const void* x, const void* w, const float* bias, int64_t N,
                                     int64_t I, int64_t O, DType dtype, StreamHandle stream);
  // The layer behind that GELU: d_up[n,i] = gelu'(up[n,i]) sum_o dy[n,o] w[o,i], up and d_up (N, I). d_up may not be
  // up.
  KernelError (*linear_gelu_backward_input)(void* d_up, const void* dy, const void* w, const void* up, int64_t N,
                                            int64_t I, int64_t O, DType dtype, StreamHandle stream);
  // The layer in front of SwiGLU: gate_up (N, 2 F) = x w^T + bias, w (2 F, I), the gate's rows first, which the
  // backward pass wants, and y (N, F) = silu(gate) up. Like linear_forward and ActivationKernels::swiglu_forward; on
  // the device, without a bias and from 1,024 rows on, a row has the same bits whatever N is.
  KernelError (*linear_swiglu_forward)(void* y, void* gate_up, const void* x, const void* w, const float* bias,
                                       int64_t N, int64_t I, int64_t F, DType dtype, StreamHandle stream);
  // The layer behind it, w (O, F): with d_act[n,f] = sum_o dy[n,o] w[o,f], d_gate_up (N, 2 F) as from
  // ActivationKernels::swiglu_backward. d_gate_up may be gate_up. d_act (N, F): memory for implementations that store
  // it, in T; where the device need not, it is not rounded to T either.
  KernelError (*linear_swiglu_backward_input)(void* d_gate_up, void* d_act, const void* dy, const void* w,
                                              const void* gate_up, int64_t N, int64_t F, int64_t O, DType dtype,
                                              StreamHandle stream);
  // The layer in front of attention: y (N, heads D) = x w^T + bias, w (heads D, I), then turned. Like linear_forward
  // and RopeKernels::rotate: what is turned was rounded to T. On the device, in bf16 without a bias and from 1,024 rows
  // on, a row has the same bits whatever N is.
  KernelError (*linear_rotary_forward)(void* y, const void* x, const void* w, const float* bias,
                                       const HeadRotation& rotation, int64_t N, int64_t I, DType dtype,
                                       StreamHandle stream);
  // linear_backward_weight and linear_backward_bias at once: dy is read once where the library can.
  KernelError (*linear_backward_weight_bias)(float* dw, float* dbias, const void* dy, const void* x, int64_t N,
                                             int64_t I, int64_t O, bool accumulate, DType dtype, StreamHandle stream);
  // "oneDNN 2.6.3 brg:avx512_core_bf16", "built-in blocked": for the start-up banner and reports.
  const char* (*library)();
};

namespace reference {
const GemmKernels& gemm();
}
namespace cpu {
const GemmKernels& gemm();
}
namespace cuda {
const GemmKernels& gemm();
}

}  // namespace kintsugi::kernels
