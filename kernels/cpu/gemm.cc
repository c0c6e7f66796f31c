#include "kernels/gemm.h"

#include <cerrno>

#include "kernels/activation.h"
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

KernelError linear_gelu_forward(void* y, void* up, const void* x, const void* w, const float* bias, int64_t N,
                                int64_t I, int64_t O, DType dtype, StreamHandle stream) {
  const KernelError error = linear_forward(up, x, w, bias, N, I, O, dtype, stream);
  return error != kKernelOk ? error : activation().gelu_forward(y, up, N, O, dtype, stream);
}

KernelError linear_gelu_backward_input(void* d_up, const void* dy, const void* w, const void* up, int64_t N, int64_t I,
                                       int64_t O, DType dtype, StreamHandle stream) {
  const KernelError error = linear_backward_input(d_up, dy, w, N, I, O, false, dtype, stream);
  return error != kKernelOk ? error : activation().gelu_backward(d_up, d_up, up, N, I, dtype, stream);
}

KernelError linear_backward_weight_bias(float* dw, float* dbias, const void* dy, const void* x, int64_t N, int64_t I,
                                        int64_t O, bool accumulate, DType dtype, StreamHandle stream) {
  const KernelError error = linear_backward_weight(dw, dy, x, N, I, O, accumulate, dtype, stream);
  return error != kKernelOk ? error : linear_backward_bias(dbias, dy, N, O, accumulate, dtype, stream);
}

const char* library() {
  const char* name = onednn_library();
  return name != nullptr ? name : "built-in blocked";
}

}  // namespace

const GemmKernels& gemm() {
  static constexpr GemmKernels kTable{
      linear_forward,      linear_backward_input,      linear_backward_weight,      linear_backward_bias,
      linear_gelu_forward, linear_gelu_backward_input, linear_backward_weight_bias, library};
  return kTable;
}

}  // namespace kintsugi::kernels::cpu
