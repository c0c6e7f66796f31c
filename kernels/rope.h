// Rotary position embedding (Su et al., arXiv:2104.09864), the half-split ("rotate_half") pairing of
// Hugging Face Llama: element d of a head pairs with d + D/2.
//   N tokens   H heads   D head size (even)   x: token n at x + n * stride, head h at + h D
#pragma once

#include "kernels/types.h"

namespace kintsugi::kernels {

struct RopeKernels {
  // Rotates in place by the angle of positions[n] (int32). cos_sin (max positions, D) fp32: D/2 cosines, then
  // D/2 sines. `inverse` rotates back: the backward pass of the gradient.
  KernelError (*rotate)(void* x, const int32_t* positions, const float* cos_sin, int64_t N, int64_t H, int64_t D,
                        int64_t stride, bool inverse, DType dtype, StreamHandle stream);
};

// Host helper, double arithmetic: the table for positions 0..max_positions-1 with base theta.
void fill_rope_table(float* cos_sin, int64_t max_positions, int64_t D, double theta);

namespace reference { const RopeKernels& rope(); }
namespace cpu { const RopeKernels& rope(); }
namespace cuda { const RopeKernels& rope(); }

}  // namespace kintsugi::kernels
