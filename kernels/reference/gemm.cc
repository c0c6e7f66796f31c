#include "kernels/gemm.h"

#include "kernels/composed_linear.h"
#include "kernels/reference/gemm_loops.h"

namespace kintsugi::kernels::reference {
namespace {

KernelError forward(void* y, const void* x, const void* w, const float* bias, int64_t N, int64_t I, int64_t O,
                    DType dtype, StreamHandle) {
  return for_dtype(dtype, [&]<class T>(T) {
    linear_forward(static_cast<T*>(y), static_cast<const T*>(x), static_cast<const T*>(w), bias, N, I, O);
  });
}

KernelError backward_input(void* dx, const void* dy, const void* w, int64_t N, int64_t I, int64_t O, bool accumulate,
                           DType dtype, StreamHandle) {
  return for_dtype(dtype, [&]<class T>(T) {
    linear_backward_input(static_cast<T*>(dx), static_cast<const T*>(dy), static_cast<const T*>(w), N, I, O,
                          accumulate);
  });
}

KernelError backward_weight(float* dw, const void* dy, const void* x, int64_t N, int64_t I, int64_t O, bool accumulate,
                            DType dtype, StreamHandle) {
  return for_dtype(dtype, [&]<class T>(T) {
    linear_backward_weight(dw, static_cast<const T*>(dy), static_cast<const T*>(x), N, I, O, accumulate);
  });
}

KernelError backward_bias(float* dbias, const void* dy, int64_t N, int64_t O, bool accumulate, DType dtype,
                          StreamHandle) {
  return for_dtype(dtype,
                   [&]<class T>(T) { linear_backward_bias(dbias, static_cast<const T*>(dy), N, O, accumulate); });
}

const char* library() { return "reference loops"; }

using Composed = ComposedLinear<gemm, activation, rope>;

}  // namespace

const GemmKernels& gemm() {
  static constexpr GemmKernels kTable{forward,
                                      backward_input,
                                      backward_weight,
                                      backward_bias,
                                      Composed::gelu_forward,
                                      Composed::gelu_backward_input,
                                      Composed::swiglu_forward,
                                      Composed::swiglu_backward_input,
                                      Composed::rotary_forward,
                                      Composed::backward_weight_bias,
                                      library};
  return kTable;
}

}  // namespace kintsugi::kernels::reference
