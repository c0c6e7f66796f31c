// Sums, conversions and checks over flat buffers, in orders that never change.
#pragma once

#include "kernels/gradient.h"
#include "kernels/types.h"

namespace kintsugi::kernels {

struct ReduceKernels {
  // partials[b - first] = sum of x[i]^2 over i in [b*block, min((b+1)*block, n)), in double, for b in
  // [first, first + count); 0 for a block behind n. x begins at element first*block. Not finite input gives a not
  // finite partial.
  KernelError (*sum_squares)(double* partials, const Gradient& x, int64_t first, int64_t count, int64_t block, int64_t n,
                             StreamHandle stream);
  // *sum = x[0] + x[1] + ... in double: ascending on the CPU, on the device in a fixed order of its own.
  KernelError (*sum)(double* sum, const float* x, int64_t n, StreamHandle stream);
  // dst[i] = a[i] + b[i], fp32. dst may alias either.
  KernelError (*add)(float* dst, const float* a, const float* b, int64_t n, StreamHandle stream);
  // dst[i] = srcs[0][i] (+) srcs[1][i] (+) ... (+) srcs[count-1][i], grouped as the binary tree
  // ((0+1)+(2+3))+((4+5)+(6+7)) when count is a power of two; for other counts the right-most
  // group is smaller: tree(lo, hi) = tree(lo, lo+p) + tree(lo+p, hi), p = the largest power of two < hi-lo.
  // dst may be one of srcs. count in [1, 64]. One pass over memory.
  KernelError (*tree_sum)(float* dst, const float* const* srcs, int64_t count, int64_t n, StreamHandle stream);
  // dst (copy_dtype) = x rounded to nearest even.
  KernelError (*convert)(void* dst, const float* x, int64_t n, DType dst_dtype, StreamHandle stream);
  // dst fp32 = x (of dtype).
  KernelError (*convert_to_f32)(float* dst, const void* x, int64_t n, DType dtype, StreamHandle stream);
  // *count = how many of targets[0..n) are not kIgnoredTarget (cross_entropy.h).
  KernelError (*count_valid)(int64_t* count, const int32_t* targets, int64_t n, StreamHandle stream);
  // *digest = the 64-bit fingerprint of x's bits that digest.h defines: the same from every implementation.
  KernelError (*digest)(uint64_t* digest, const float* x, int64_t n, uint64_t seed, StreamHandle stream);
  // *flag = 1 when some x[i] is infinite or NaN; otherwise *flag stays as it is.
  KernelError (*non_finite)(int32_t* flag, const void* x, int64_t n, DType dtype, StreamHandle stream);
};

namespace reference { const ReduceKernels& reduce(); }
namespace cpu { const ReduceKernels& reduce(); }
namespace cuda { const ReduceKernels& reduce(); }

}  // namespace kintsugi::kernels
