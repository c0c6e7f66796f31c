// AdamW (Loshchilov & Hutter, arXiv:1711.05101), elementwise over any slice of a flat buffer.
#pragma once

#include "kernels/gradient.h"
#include "kernels/types.h"

namespace kintsugi::kernels {

// Scalars of one update, in memory that the backend's kernels can read, so that the clip factor
// never passes through the host on a device.
struct AdamWScalars {
  float lr;
  float beta1, beta2, eps;
  float weight_decay;      // applied where the call says `decay`
  float bias_correction1;  // 1 - beta1^step, step counted from 1
  float bias_correction2;  // 1 - beta2^step
  float gradient_scale;    // clip factor / global token count
  int32_t skip;            // non-zero: leave everything as it is
  int64_t step = 0;        // with `seed`: which random bits round bf16 moments
  uint64_t seed = 0;
};

// The first and second moments of a call's elements. In bf16 they are rounded stochastically
// (kernels/stochastic_rounding.h); the step itself is made with the fp32 values before rounding.
struct Moments {
  void* m;
  void* v;
  DType dtype = DType::kF32;
  int64_t first_index = 0;  // place of element 0 in the whole model; bf16 only
};

struct OptimizerKernels {
  // g = gradient_scale * grad; m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2;
  // w -= lr * ( (m/bc1) / (sqrt(v/bc2) + eps) + (decay ? weight_decay * w : 0) ), w read before the update.
  // w, grad (n) fp32; m, v (n) of moments.dtype. compute_copy: w rounded to `copy_dtype`, or null. Bits depend on
  // nothing but the element. decay_edges (num_edges, even, ascending, in [0, n]): elements in [edges[0], edges[1]),
  // [edges[2], edges[3]), ... decay, the others do not. One call covers a whole flat buffer. `scalars` and
  // `decay_edges` lie in memory that the kernels read when they run.
  KernelError (*adamw)(float* w, const Moments& moments, void* compute_copy, const Gradient& grad, int64_t n,
                       const AdamWScalars* scalars, const int64_t* decay_edges, int64_t num_edges, DType copy_dtype,
                       StreamHandle stream);
};

namespace reference {
const OptimizerKernels& optimizer();
}
namespace cpu {
const OptimizerKernels& optimizer();
}
namespace cuda {
const OptimizerKernels& optimizer();
}

// The ranges [begin, end) of [0, n) that decay and do not decay, in ascending order: body(begin, end, decay).
template <class Body>
void for_decay_ranges(int64_t n, const int64_t* decay_edges, int64_t num_edges, Body&& body) {
  int64_t begin = 0;
  for (int64_t i = 0; i <= num_edges; ++i) {
    const int64_t end = i < num_edges ? decay_edges[i] : n;
    if (begin < end) body(begin, end, i % 2 == 1);
    begin = end;
  }
}

}  // namespace kintsugi::kernels
