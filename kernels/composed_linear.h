// The calls of GemmKernels that are two calls in a row: for implementations without a fused form.
//   GemmKernels{..., Composed::gelu_forward, ...} where Composed = ComposedLinear<gemm, activation, rope>;
#pragma once

#include "kernels/activation.h"
#include "kernels/gemm.h"
#include "kernels/rope.h"

namespace kintsugi::kernels {

// kGemm, kActivation and kRope: the implementation's getters. Contracts as in gemm.h.
template <const GemmKernels& (*kGemm)(), const ActivationKernels& (*kActivation)(), const RopeKernels& (*kRope)()>
struct ComposedLinear {
  static KernelError gelu_forward(void* y, void* up, const void* x, const void* w, const float* bias, int64_t N,
                                  int64_t I, int64_t O, DType dtype, StreamHandle stream) {
    const KernelError error = kGemm().linear_forward(up, x, w, bias, N, I, O, dtype, stream);
    return error != kKernelOk ? error : kActivation().gelu_forward(y, up, N, O, dtype, stream);
  }

  static KernelError gelu_backward_input(void* d_up, const void* dy, const void* w, const void* up, int64_t N,
                                         int64_t I, int64_t O, DType dtype, StreamHandle stream) {
    const KernelError error = kGemm().linear_backward_input(d_up, dy, w, N, I, O, false, dtype, stream);
    return error != kKernelOk ? error : kActivation().gelu_backward(d_up, d_up, up, N, I, dtype, stream);
  }

  static KernelError swiglu_forward(void* y, void* gate_up, const void* x, const void* w, const float* bias, int64_t N,
                                    int64_t I, int64_t F, DType dtype, StreamHandle stream) {
    const KernelError error = kGemm().linear_forward(gate_up, x, w, bias, N, I, 2 * F, dtype, stream);
    return error != kKernelOk ? error : kActivation().swiglu_forward(y, gate_up, N, F, dtype, stream);
  }

  static KernelError swiglu_backward_input(void* d_gate_up, void* d_act, const void* dy, const void* w,
                                           const void* gate_up, int64_t N, int64_t F, int64_t O, DType dtype,
                                           StreamHandle stream) {
    const KernelError error = kGemm().linear_backward_input(d_act, dy, w, N, F, O, false, dtype, stream);
    return error != kKernelOk ? error : kActivation().swiglu_backward(d_gate_up, d_act, gate_up, N, F, dtype, stream);
  }

  static KernelError rotary_forward(void* y, const void* x, const void* w, const float* bias,
                                    const HeadRotation& rotation, int64_t N, int64_t I, DType dtype,
                                    StreamHandle stream) {
    const int64_t O = rotation.heads * rotation.D;
    const KernelError error = kGemm().linear_forward(y, x, w, bias, N, I, O, dtype, stream);
    return error != kKernelOk ? error
                              : kRope().rotate(y, rotation.positions, rotation.cos_sin, N, rotation.turned, rotation.D,
                                               O, false, dtype, stream);
  }

  static KernelError backward_weight_bias(float* dw, float* dbias, const void* dy, const void* x, int64_t N, int64_t I,
                                          int64_t O, bool accumulate, DType dtype, StreamHandle stream) {
    const KernelError error = kGemm().linear_backward_weight(dw, dy, x, N, I, O, accumulate, dtype, stream);
    return error != kKernelOk ? error : kGemm().linear_backward_bias(dbias, dy, N, O, accumulate, dtype, stream);
  }
};

}  // namespace kintsugi::kernels
