#include "kernels/gemm.h"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "kernels/activation.h"
#include "kernels/composed_linear.h"
#include "kernels/cuda/gemm_kernels.h"
#include "kernels/cuda/gemv.h"
#include "kernels/cuda/library_handles.h"
#include "kernels/cuda/matmul.h"
#include "kernels/cuda/rotary_linear.h"
#include "kernels/cuda/swiglu_linear.h"

namespace kintsugi::kernels::cuda {
namespace {

cudaStream_t cuda_stream(StreamHandle stream) { return static_cast<cudaStream_t>(stream); }

bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

KernelError run(GemmProblem problem, Operands operands, void* scratch, StreamHandle stream) {
  problem.aligned = aligned(operands.a) && aligned(operands.b) && aligned(operands.d) && aligned(operands.bias) &&
                    aligned(operands.up);
  Matmul matmul;
  const cublasStatus_t described = matmul.init(problem, operands);
  if (described != CUBLAS_STATUS_SUCCESS) return cublas_error(described);
  cublasLtMatmulAlgo_t algorithm;
  if (const KernelError error = algorithm_for(&algorithm, problem, matmul); error != kKernelOk) return error;
  return cublas_error(matmul.run(operands, algorithm, scratch, stream_scratch_bytes(), cuda_stream(stream)));
}

// *added: what the library can add to an output of `dtype`: the bias itself, or its copy in bf16.
KernelError bias_operand(void** added, void* scratch, const float* bias, int64_t O, DType dtype, StreamHandle stream) {
  *added = const_cast<float*>(bias);  // read only
  if (bias == nullptr || dtype == DType::kF32) return kKernelOk;
  if (O * size_of(dtype) > kBiasScratchBytes) return kNotSupported;
  *added = static_cast<char*>(scratch) + stream_scratch_bytes();
  return round_to_bf16(*added, bias, O, cuda_stream(stream));
}

KernelError linear_forward(void* y, const void* x, const void* w, const float* bias, int64_t N, int64_t I, int64_t O,
                           DType dtype, StreamHandle stream) {
  if (N < 0 || I < 1 || O < 1) return cudaErrorInvalidValue;
  if (N == 0) return kKernelOk;
  if (gemv_applies(N, I, O, dtype) && aligned(x) && aligned(w)) return gemv(y, x, w, bias, N, I, O, dtype, stream);
  void *scratch = nullptr, *added = nullptr;
  if (const KernelError error = stream_scratch(&scratch, stream); error != kKernelOk) return error;
  if (const KernelError error = bias_operand(&added, scratch, bias, O, dtype, stream); error != kKernelOk) return error;
  const GemmEpilogue epilogue = bias != nullptr ? GemmEpilogue::kBias : GemmEpilogue::kNone;
  return run({GemmOp::kForward, N, I, O, dtype, false, epilogue}, {y, w, x, added}, scratch, stream);
}

KernelError linear_backward_input(void* dx, const void* dy, const void* w, int64_t N, int64_t I, int64_t O,
                                  bool accumulate, DType dtype, StreamHandle stream) {
  if (N < 0 || I < 1 || O < 1) return cudaErrorInvalidValue;
  if (N == 0) return kKernelOk;
  void* scratch = nullptr;
  if (const KernelError error = stream_scratch(&scratch, stream); error != kKernelOk) return error;
  return run({GemmOp::kBackwardInput, N, I, O, dtype, accumulate}, {dx, w, dy}, scratch, stream);
}

KernelError linear_backward_weight(float* dw, const void* dy, const void* x, int64_t N, int64_t I, int64_t O,
                                   bool accumulate, DType dtype, StreamHandle stream) {
  if (N < 0 || I < 1 || O < 1) return cudaErrorInvalidValue;
  if (N == 0) {
    if (accumulate) return kKernelOk;
    return cudaMemsetAsync(dw, 0, static_cast<size_t>(O * I) * sizeof(float), cuda_stream(stream));
  }
  void* scratch = nullptr;
  if (const KernelError error = stream_scratch(&scratch, stream); error != kKernelOk) return error;
  return run({GemmOp::kBackwardWeight, N, I, O, dtype, accumulate}, {dw, x, dy}, scratch, stream);
}

KernelError linear_backward_bias(float* dbias, const void* dy, int64_t N, int64_t O, bool accumulate, DType dtype,
                                 StreamHandle stream) {
  if (N < 0 || O < 1) return cudaErrorInvalidValue;
  if (N == 0) {
    if (accumulate) return kKernelOk;
    return cudaMemsetAsync(dbias, 0, static_cast<size_t>(O) * sizeof(float), cuda_stream(stream));
  }
  void* scratch = nullptr;
  if (const KernelError error = stream_scratch(&scratch, stream); error != kKernelOk) return error;
  if (column_sum_scratch_bytes(N, O) > stream_scratch_bytes()) return kNotSupported;
  return column_sum(dbias, dy, N, O, accumulate, dtype, static_cast<float*>(scratch), cuda_stream(stream));
}

// The library's GELU wants bf16, whole 16 bytes a row, and every operand at a multiple of them.
bool gelu_may_be_fused(int64_t width, DType dtype, std::initializer_list<const void*> operands) {
  return dtype == DType::kBF16 && width % 8 == 0 &&
         std::all_of(operands.begin(), operands.end(), [](const void* p) { return aligned(p); });
}

KernelError linear_gelu_forward(void* y, void* up, const void* x, const void* w, const float* bias, int64_t N,
                                int64_t I, int64_t O, DType dtype, StreamHandle stream) {
  if (N >= 1 && I >= 1 && O >= 1 && !gemv_applies(N, I, O, dtype) && bias != nullptr &&
      gelu_may_be_fused(O, dtype, {y, up, x, w})) {
    void *scratch = nullptr, *added = nullptr;
    if (const KernelError error = stream_scratch(&scratch, stream); error != kKernelOk) return error;
    KernelError error = bias_operand(&added, scratch, bias, O, dtype, stream);
    if (error == kKernelOk) {
      error = run({GemmOp::kForward, N, I, O, dtype, false, GemmEpilogue::kBiasGelu}, {y, w, x, added, up}, scratch,
                  stream);
    }
    if (error != kNotSupported) return error;
  }
  const KernelError error = linear_forward(up, x, w, bias, N, I, O, dtype, stream);
  return error != kKernelOk || N == 0 ? error : activation().gelu_forward(y, up, N, O, dtype, stream);
}

KernelError linear_gelu_backward_input(void* d_up, const void* dy, const void* w, const void* up, int64_t N, int64_t I,
                                       int64_t O, DType dtype, StreamHandle stream) {
  if (N >= 1 && I >= 1 && O >= 1 && gelu_may_be_fused(I, dtype, {d_up, dy, w, up})) {
    void* scratch = nullptr;
    if (const KernelError error = stream_scratch(&scratch, stream); error != kKernelOk) return error;
    const KernelError error = run({GemmOp::kBackwardInput, N, I, O, dtype, false, GemmEpilogue::kGeluGradient},
                                  {d_up, w, dy, nullptr, const_cast<void*>(up)}, scratch, stream);
    if (error != kNotSupported) return error;
  }
  const KernelError error = linear_backward_input(d_up, dy, w, N, I, O, false, dtype, stream);
  return error != kKernelOk || N == 0 ? error : activation().gelu_backward(d_up, d_up, up, N, I, dtype, stream);
}

using Composed = ComposedLinear<gemm, activation, rope>;

KernelError linear_swiglu_forward(void* y, void* gate_up, const void* x, const void* w, const float* bias, int64_t N,
                                  int64_t I, int64_t F, DType dtype, StreamHandle stream) {
  if (swiglu_linear_applies(N, F, I, dtype) && bias == nullptr && aligned(y) && aligned(gate_up) && aligned(x) &&
      aligned(w)) {
    const KernelError error = swiglu_linear_forward(y, gate_up, x, w, N, I, F, stream);
    if (error != kNotSupported) return error;
  }
  return Composed::swiglu_forward(y, gate_up, x, w, bias, N, I, F, dtype, stream);
}

KernelError linear_swiglu_backward_input(void* d_gate_up, void* d_act, const void* dy, const void* w,
                                         const void* gate_up, int64_t N, int64_t F, int64_t O, DType dtype,
                                         StreamHandle stream) {
  if (swiglu_linear_applies(N, F, O, dtype) && aligned(d_gate_up) && aligned(dy) && aligned(w) && aligned(gate_up)) {
    const KernelError error = swiglu_linear_backward_input(d_gate_up, dy, w, gate_up, N, F, O, stream);
    if (error != kNotSupported) return error;
  }
  return Composed::swiglu_backward_input(d_gate_up, d_act, dy, w, gate_up, N, F, O, dtype, stream);
}

KernelError linear_rotary_forward(void* y, const void* x, const void* w, const float* bias,
                                  const HeadRotation& rotation, int64_t N, int64_t I, DType dtype,
                                  StreamHandle stream) {
  if (rotary_linear_applies(N, I, rotation.heads, rotation.D, dtype) && bias == nullptr && aligned(y) && aligned(x) &&
      aligned(w) && aligned(rotation.cos_sin)) {
    const KernelError error = rotary_linear_forward(y, x, w, rotation, N, I, stream);
    if (error != kNotSupported) return error;
  }
  return Composed::rotary_forward(y, x, w, bias, rotation, N, I, dtype, stream);
}

KernelError linear_backward_weight_bias(float* dw, float* dbias, const void* dy, const void* x, int64_t N, int64_t I,
                                        int64_t O, bool accumulate, DType dtype, StreamHandle stream) {
  // The library overwrites a bias gradient.
  if (N >= 1 && I >= 1 && O >= 1 && !accumulate && dtype == DType::kBF16 && aligned(dbias)) {
    void* scratch = nullptr;
    if (const KernelError error = stream_scratch(&scratch, stream); error != kKernelOk) return error;
    const KernelError error = run({GemmOp::kBackwardWeight, N, I, O, dtype, false, GemmEpilogue::kBiasGradient},
                                  {dw, x, dy, dbias}, scratch, stream);
    if (error != kNotSupported) return error;
  }
  const KernelError error = linear_backward_weight(dw, dy, x, N, I, O, accumulate, dtype, stream);
  return error != kKernelOk ? error : linear_backward_bias(dbias, dy, N, O, accumulate, dtype, stream);
}

}  // namespace

const GemmKernels& gemm() {
  static constexpr GemmKernels kTable{
      linear_forward,        linear_backward_input,       linear_backward_weight, linear_backward_bias,
      linear_gelu_forward,   linear_gelu_backward_input,  linear_swiglu_forward,  linear_swiglu_backward_input,
      linear_rotary_forward, linear_backward_weight_bias, cublaslt_version};
  return kTable;
}

}  // namespace kintsugi::kernels::cuda
