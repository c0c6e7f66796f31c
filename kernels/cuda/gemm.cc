#include "kernels/gemm.h"

#include <cuda_runtime_api.h>

#include "kernels/cuda/gemm_kernels.h"
#include "kernels/cuda/gemv.h"
#include "kernels/cuda/library_handles.h"
#include "kernels/cuda/matmul.h"

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

KernelError linear_forward(void* y, const void* x, const void* w, const float* bias, int64_t N, int64_t I, int64_t O,
                           DType dtype, StreamHandle stream) {
  if (N < 0 || I < 1 || O < 1) return cudaErrorInvalidValue;
  if (N == 0) return kKernelOk;
  if (gemv_applies(N, I, O, dtype) && aligned(x) && aligned(w)) return gemv(y, x, w, bias, N, I, O, dtype, stream);
  void* scratch = nullptr;
  if (const KernelError error = stream_scratch(&scratch, stream); error != kKernelOk) return error;
  void* added = const_cast<float*>(bias);  // read only
  if (bias != nullptr && dtype == DType::kBF16) {
    // The library adds a bias of the output's type only.
    if (O * size_of(dtype) > kBiasScratchBytes) return kNotSupported;
    void* rounded = static_cast<char*>(scratch) + stream_scratch_bytes();
    if (const cudaError_t error = round_to_bf16(rounded, bias, O, cuda_stream(stream)); error != cudaSuccess) {
      return error;
    }
    added = rounded;
  }
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

}  // namespace

const GemmKernels& gemm() {
  static constexpr GemmKernels kTable{linear_forward, linear_backward_input, linear_backward_weight,
                                      linear_backward_bias, cublaslt_version};
  return kTable;
}

}  // namespace kintsugi::kernels::cuda
