// The one matrix product behind the linear layers on the CPU. It has two implementations: oneDNN's, below, and
// IsaVariant::blocked_matmul (isa.h).
//   C (M, N) = A (M, K) B (K, N) [+ bias (N)] [+ C]
// A row of C has the same bits whatever M is and whatever the number of threads, from either implementation;
// the two differ from each other in the last bits. Which one serves a product depends on all but M.
#pragma once

#include "kernels/types.h"

namespace kintsugi::kernels::cpu {

struct Matmul {
  void* c;            // (M, N) row-major, of c_type
  const void* a;      // (M, K) row-major, or (K, M) when a_transposed; of ab_type
  const void* b;      // (K, N) row-major, or (N, K) when b_transposed; of ab_type
  const float* bias;  // (N) or null
  int64_t M, N, K;    // all > 0
  bool a_transposed, b_transposed;
  bool accumulate;  // add to what C holds
  DType ab_type, c_type;
};

// By oneDNN's brgemm kernels. ENOTSUP where oneDNN has none for this product on this machine (its other kernels give
// rows whose bits depend on M), ENOMEM, or EIO when oneDNN fails. Thread safe; primitives are cached per shape.
KernelError onednn_matmul(const Matmul& matmul);
// "oneDNN 2.6.3 brg:avx512_core", or null when oneDNN is absent or has no brgemm kernel for this machine.
const char* onednn_library();

}  // namespace kintsugi::kernels::cpu
