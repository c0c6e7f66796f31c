#include "kernels/activation.h"

#include "kernels/reference/activation_loops.h"

namespace kintsugi::kernels::reference {
namespace {

KernelError swiglu_fwd(void* y, const void* gate_up, int64_t N, int64_t F, DType dtype, StreamHandle) {
  return for_dtype(dtype,
                   [&]<class T>(T) { swiglu_forward(static_cast<T*>(y), static_cast<const T*>(gate_up), N, F); });
}

KernelError swiglu_bwd(void* d_gate_up, const void* dy, const void* gate_up, int64_t N, int64_t F, DType dtype,
                       StreamHandle) {
  return for_dtype(dtype, [&]<class T>(T) {
    swiglu_backward(static_cast<T*>(d_gate_up), static_cast<const T*>(dy), static_cast<const T*>(gate_up), N, F);
  });
}

KernelError gelu_fwd(void* y, const void* x, int64_t N, int64_t F, DType dtype, StreamHandle) {
  return for_dtype(dtype, [&]<class T>(T) { gelu_forward(static_cast<T*>(y), static_cast<const T*>(x), N * F); });
}

KernelError gelu_bwd(void* dx, const void* dy, const void* x, int64_t N, int64_t F, DType dtype, StreamHandle) {
  return for_dtype(dtype, [&]<class T>(T) {
    gelu_backward(static_cast<T*>(dx), static_cast<const T*>(dy), static_cast<const T*>(x), N * F);
  });
}

KernelError add_all(void* y, const void* a, const void* b, int64_t n, DType dtype, StreamHandle) {
  return for_dtype(dtype,
                   [&]<class T>(T) { add(static_cast<T*>(y), static_cast<const T*>(a), static_cast<const T*>(b), n); });
}

}  // namespace

const ActivationKernels& activation() {
  static constexpr ActivationKernels kTable{swiglu_fwd, swiglu_bwd, gelu_fwd, gelu_bwd, add_all};
  return kTable;
}

}  // namespace kintsugi::kernels::reference
