// AdamW (Loshchilov & Hutter, arXiv:1711.05101), elementwise over any slice of a flat buffer.
#pragma once

#include "kernels/types.h"

namespace kintsugi::kernels {

// Scalars of one update, in memory that the backend's kernels can read, so that the clip factor
// never passes through the host on a device.
struct AdamWScalars {
  float lr;
  float beta1, beta2, eps;
  float weight_decay;             // applied where the call says `decay`
  float bias_correction1;         // 1 - beta1^step, step counted from 1
  float bias_correction2;         // 1 - beta2^step
  float gradient_scale;           // clip factor / global token count
  int32_t skip;                   // non-zero: leave everything as it is
};

struct OptimizerKernels {
  // g = gradient_scale * grad; m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2;
  // w -= lr * ( (m/bc1) / (sqrt(v/bc2) + eps) + (decay ? weight_decay * w : 0) ), w read before the update.
  // w, m, v, grad (n) fp32. compute_copy: w rounded to `copy_dtype`, or null. Bits depend on nothing but the element.
  KernelError (*adamw)(float* w, float* m, float* v, void* compute_copy, const float* grad, int64_t n,
                       const AdamWScalars* scalars, bool decay, DType copy_dtype, StreamHandle stream);
};

namespace reference { const OptimizerKernels& optimizer(); }
namespace cpu { const OptimizerKernels& optimizer(); }

}  // namespace kintsugi::kernels
