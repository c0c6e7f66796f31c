// RMSNorm (Zhang & Sennrich, arXiv:1910.07467) and LayerNorm (Ba et al., arXiv:1607.06450) over rows.
//   N rows   C width   x, y and gradients (N, C) T   weights, biases and their gradients (C) fp32
// "Row" n starts at base + (n / inner) * outer_stride + (n % inner) * C elements: inner = 1 and
// outer_stride = C for plain rows; inner = heads for QK-norm inside a packed QKV buffer.
// Weight gradients are sums over rows in fixed blocks: the same bits whatever the number of threads.
#pragma once

#include "kernels/types.h"

namespace kintsugi::kernels {

struct RowLayout {
  int64_t inner = 1;
  int64_t outer_stride = 0;  // elements; ignored when inner == 1 and 0: then rows are dense
};

struct NormKernels {
  // y = x * rstd * w, rstd[n] = 1/sqrt(mean_c(x^2) + eps), kept (N, fp32). y may alias x. Same layout for x and y.
  KernelError (*rms_norm_forward)(void* y, float* rstd, const void* x, const float* w, int64_t N, int64_t C,
                                  RowLayout layout, float eps, DType dtype, StreamHandle stream);
  // sum = x + residual, then as above on sum (dense rows). sum may alias x or residual.
  KernelError (*residual_rms_norm_forward)(void* sum, void* y, float* rstd, const void* x, const void* residual,
                                           const float* w, int64_t N, int64_t C, float eps, DType dtype,
                                           StreamHandle stream);
  // dx = gradient through the norm of x, plus dresidual (same layout) unless null; dx may alias dy or dresidual.
  // dw += when accumulate_dw. workspace: backward_workspace_bytes(N, C).
  KernelError (*rms_norm_backward)(void* dx, float* dw, const void* dy, const void* x, const float* w, const float* rstd,
                                   const void* dresidual, int64_t N, int64_t C, RowLayout layout, bool accumulate_dw,
                                   void* workspace, DType dtype, StreamHandle stream);
  // y = (x - mean) * rstd * w + b; mean and rstd kept (N, fp32 each). y may alias x.
  KernelError (*layer_norm_forward)(void* y, float* mean, float* rstd, const void* x, const float* w, const float* b,
                                    int64_t N, int64_t C, float eps, DType dtype, StreamHandle stream);
  KernelError (*residual_layer_norm_forward)(void* sum, void* y, float* mean, float* rstd, const void* x,
                                             const void* residual, const float* w, const float* b, int64_t N, int64_t C,
                                             float eps, DType dtype, StreamHandle stream);
  KernelError (*layer_norm_backward)(void* dx, float* dw, float* db, const void* dy, const void* x, const float* w,
                                     const float* mean, const float* rstd, const void* dresidual, int64_t N, int64_t C,
                                     bool accumulate_dw, void* workspace, DType dtype, StreamHandle stream);
  int64_t (*backward_workspace_bytes)(int64_t N, int64_t C);
};

namespace reference { const NormKernels& norm(); }
namespace cpu { const NormKernels& norm(); }
namespace cuda { const NormKernels& norm(); }

}  // namespace kintsugi::kernels
