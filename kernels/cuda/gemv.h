// Matrix products of a few rows: y = x W^T + b with N tokens of a decode step, where reading W once is the whole cost.
//   N rows (tokens)   I input width   O output width
// Reference: reference::gemm().linear_forward. Memory bound: moves 2 I O bytes of weights.
#pragma once

#include "kernels/decode_layer.h"
#include "kernels/types.h"

namespace kintsugi::kernels::cuda {

// The rows that gemv() takes with any w, and with a small one. With more rows every multiprocessor reads as many bytes of
// x as of w, and the second-level cache sets the pace: cuBLASLt's larger tiles do better, unless the launch is the cost.
inline constexpr int64_t kFewGemvRows = 16;
inline constexpr int64_t kMaxGemvRows = 32;
inline constexpr int64_t kSmallGemvBytes = 16 << 20;

// Whether gemv() computes this product: bf16, N from 1 to as above, I a multiple of 8.
bool gemv_applies(int64_t N, int64_t I, int64_t O, DType dtype);

// y (N, O), x (N, I), w (O, I) bf16, x and w 16-byte aligned; bias (O) fp32 or null. Sums in fp32 in an order that
// depends on I alone: a row has the same bits whatever the other rows are and however many.
// Reads w before earlier work on the stream is done (launch.cuh): no kernel that lets its successor begin early may
// write it. Asynchronous; cudaErrorInvalidValue where gemv_applies() is false.
KernelError gemv(void* y, const void* x, const void* w, const float* bias, int64_t N, int64_t I, int64_t O, DType dtype,
                 StreamHandle stream);

// DecodeLayerKernels::norm_linear. Where gemv_applies() is false the product is cuBLASLt's.
KernelError norm_gemv(void* y, const DecodeNorm& norm, const void* w, const float* bias, int64_t N, int64_t C,
                      int64_t O, bool swiglu, StreamHandle stream);

}  // namespace kintsugi::kernels::cuda
