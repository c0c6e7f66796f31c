#include "kernels/gemm.h"

#include <cerrno>

#include "kernels/composed_linear.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/matmul.h"

namespace kintsugi::kernels::cpu {
namespace {

KernelError run(const Matmul& matmul) {
  if (matmul.M == 0 || matmul.N == 0) return kKernelOk;
  const KernelError error = matmul.K > 0 ? onednn_matmul(matmul) : ENOTSUP;
  return error == ENOTSUP ? best_isa().blocked_matmul(matmul) : error;
}

KernelError linear_forward(void* y, const void* x, const void* w, const float* bias, int64_t N, int64_t I, int64_t O,
                           DType dtype, StreamHandle) {
  return run({y, x, w, bias, N, O, I, false, true, false, dtype, dtype});
}

KernelError linear_backward_input(void* dx, const void* dy, const void* w, int64_t N, int64_t I, int64_t O,
                                  bool accumulate, DType dtype, StreamHandle) {
  return run({dx, dy, w, nullptr, N, I, O, false, false, accumulate, dtype, dtype});
}

KernelError linear_backward_weight(float* dw, const void* dy, const void* x, int64_t N, int64_t I, int64_t O,
                                   bool accumulate, DType dtype, StreamHandle) {
  return run({dw, dy, x, nullptr, O, I, N, true, false, accumulate, dtype, DType::kF32});
}

KernelError linear_backward_bias(float* dbias, const void* dy, int64_t N, int64_t O, bool accumulate, DType dtype,
                                 StreamHandle) {
  return best_isa().column_sums(dbias, dy, N, O, accumulate, dtype);
}

const char* library() {
  const char* name = onednn_library();
  return name != nullptr ? name : "built-in blocked";
}

using Composed = ComposedLinear<gemm, activation, rope>;

}  // namespace

const GemmKernels& gemm() {
  static constexpr GemmKernels kTable{linear_forward,
                                      linear_backward_input,
                                      linear_backward_weight,
                                      linear_backward_bias,
                                      Composed::gelu_forward,
                                      Composed::gelu_backward_input,
                                      Composed::swiglu_forward,
                                      Composed::swiglu_backward_input,
                                      Composed::rotary_forward,
                                      Composed::backward_weight_bias,
                                      library};
  return kTable;
}

}  // namespace kintsugi::kernels::cpu
