// Attention by kernels of our own, for heads of 64 and 128 elements: faster there than the library's, but for its
// backward pass at 128 where it need not repeat itself. How: attention_tiles.cuh, attention_forward.cuh,
// attention_backward.cuh. Internal to kernels/cuda.
#pragma once

#include "kernels/attention.h"

namespace kintsugi::kernels::cuda {

// By shape alone: bf16, D = 64 or 128, no documents, rows at multiples of 16 bytes. All pointers must lie at such, too.
bool hopper_attention_applies(const AttentionShape& shape, DType dtype);

// As kernels/attention.h has them, in bf16. The forward pass uses the stream's scratch (library_handles.h). The
// backward pass repeats to the bit whatever shape.deterministic says; with shape.cos_sin dq and dk are turned back
// before they are rounded.
KernelError hopper_attention_forward(void* o, float* lse, const void* q, const void* k, const void* v,
                                     const AttentionShape& shape, StreamHandle stream);
int64_t hopper_attention_workspace_bytes(const AttentionShape& shape);
KernelError hopper_attention_backward(void* dq, void* dk, void* dv, const void* d_o, const void* o, const float* lse,
                                      const void* q, const void* k, const void* v, const AttentionShape& shape,
                                      void* workspace, StreamHandle stream);

}  // namespace kintsugi::kernels::cuda
