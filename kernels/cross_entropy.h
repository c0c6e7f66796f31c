// Softmax cross-entropy over the vocabulary, one row a token.
//   N tokens   V vocabulary   targets (N) int32; kIgnoredTarget rows have loss 0 and gradient 0
#pragma once

#include "kernels/types.h"

namespace kintsugi::kernels {

inline constexpr int32_t kIgnoredTarget = -1;

struct CrossEntropyKernels {
  // losses[n] = logsumexp(logits[n,:]) - logits[n, targets[n]] (fp32). Reads only.
  KernelError (*forward)(float* losses, const void* logits, const int32_t* targets, int64_t N, int64_t V, DType dtype,
                         StreamHandle stream);
  // The same, and logits become the gradient of the SUM of losses in place: softmax - onehot.
  // (The division by the global count of valid tokens happens once, in the optimizer update.)
  KernelError (*forward_backward)(float* losses, void* logits_in_gradients_out, const int32_t* targets, int64_t N,
                                  int64_t V, DType dtype, StreamHandle stream);
};

namespace reference { const CrossEntropyKernels& cross_entropy(); }
namespace cpu { const CrossEntropyKernels& cross_entropy(); }
namespace cuda { const CrossEntropyKernels& cross_entropy(); }

}  // namespace kintsugi::kernels
