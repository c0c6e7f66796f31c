// Attention of our own, without tensor cores: what the library's is checked against, and what runs where the library
// does not serve a shape (fp32, odd head sizes, a build without cuDNN). Head sizes 1 ... 256. The same bits every time;
// the keys of a row are taken in blocks from position 0 on, so a row's bits depend on nothing behind it.
#pragma once

#include "kernels/attention.h"

namespace kintsugi::kernels::cuda {

inline constexpr int64_t kPlainAttentionMaxHeadSize = 256;

// As kernels/attention.h has them; cudaErrorInvalidValue for a shape out of range.
KernelError plain_attention_forward(void* o, float* lse, const void* q, const void* k, const void* v,
                                    const AttentionShape& shape, DType dtype, StreamHandle stream);
KernelError plain_attention_backward(void* dq, void* dk, void* dv, const void* d_o, const void* o, const float* lse,
                                     const void* q, const void* k, const void* v, const AttentionShape& shape,
                                     void* workspace, DType dtype, StreamHandle stream);
// sum_d do o of every row, in fp32.
int64_t plain_attention_workspace_bytes(const AttentionShape& shape);

}  // namespace kintsugi::kernels::cuda
