// Attention of new tokens against a paged KV cache: the decode step, one new token a sequence.
//   S sequences   H, K, D as in attention.h   P tokens in a kv_block   M block table width
// A layer's cache is k_cache and v_cache, each (num_kv_blocks, P, K, D) of T. Position p of sequence s
// lies in kv_block block_tables[s, p / P] (int32, (S, M)) at slot p % P. Slots at or beyond
// context_lens[s] are never read into a result, whatever they hold (NaN included).
// Method: Kwon et al., PagedAttention (arXiv:2309.06180).
#pragma once

#include "kernels/types.h"

namespace kintsugi::kernels {

struct PagedShape {
  int64_t S, H, K, D;
  int64_t kv_block_tokens;     // P
  int64_t block_table_width;   // M
  int64_t q_stride, o_stride;  // elements between consecutive sequences
  float scale;
};

struct PagedAttentionKernels {
  // o[s,h,:] over positions 0 .. context_lens[s]-1 (the new token's k and v already written); zeros when that is 0.
  // `workspace`: decode_workspace_bytes() of this shape or of one with more sequences. It holds zeros before its first
  // use, and between calls it is nobody else's. A sequence's result does not depend on what the others hold; its bits
  // not on how many there are either, on the device for up to 16.
  KernelError (*decode)(void* o, const void* q, const void* k_cache, const void* v_cache, const int32_t* block_tables,
                        const int32_t* context_lens, const PagedShape& shape, DType dtype, void* workspace,
                        StreamHandle stream);
  int64_t (*decode_workspace_bytes)(const PagedShape& shape, DType dtype);
  // Scatters N tokens' k and v rows (K, D), strides between tokens as given, into the cache at
  // slots[n] = kv_block * P + offset (int64; negative: skip the token).
  KernelError (*write_kv)(void* k_cache, void* v_cache, const void* k, const void* v, const int64_t* slots, int64_t N,
                          int64_t K, int64_t D, int64_t k_stride, int64_t v_stride, DType dtype, StreamHandle stream);
};

namespace reference { const PagedAttentionKernels& paged_attention(); }
namespace cpu { const PagedAttentionKernels& paged_attention(); }
namespace cuda { const PagedAttentionKernels& paged_attention(); }

}  // namespace kintsugi::kernels
