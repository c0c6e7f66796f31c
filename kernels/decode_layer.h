// A decode step's operations in few launches: for a handful of tokens a launch costs as much as the work in it.
// Optional: KernelTable::decode_layer is null where an implementation has none, and the families one by one do the
// same.
//   N sequences, one new token each   C width   H, K, D heads, key/value heads, head size   F feed-forward width
// bf16 only; sums in fp32. A row's bits depend on its own inputs alone, not on N, for N up to 16.
#pragma once

#include "kernels/paged_attention.h"
#include "kernels/types.h"

namespace kintsugi::kernels {

struct DecodeNorm {
  void* sum;             // (N, C): stream + branch; neither of them. Untouched where branch is null
  const void* stream;    // (N, C)
  const void* branch;    // (N, C), or null: the norm is of the stream as it is
  const float* weights;  // (C): of RMSNorm
  float eps;
  void* normed;   // (N, C): scratch
  void* product;  // (N, 2 O): scratch, with `swiglu` only
};

// What turns a raw row of q, k and v into what attention reads. q_norm and k_norm (D) fp32: RMSNorm of each head, or
// null both. cos_sin as RopeKernels'.
struct DecodeRotation {
  const float *q_norm, *k_norm;
  float eps;
  const float* cos_sin;
  const int32_t* positions;  // (N)
  const int64_t* slots;      // (N): of the new token's keys and values; negative: not written
};

struct DecodeLayerKernels {
  // Whether the calls below take these sizes.
  bool (*applies)(int64_t N, int64_t C, int64_t F, int64_t D);
  // y = rms_norm(stream + branch) w^T + bias. w (O, C), y (N, O); with `swiglu` w (2 O, C), the gate's rows first, and
  // y = silu(gate) * up. Reference: residual_rms_norm_forward, linear_forward, swiglu_forward.
  KernelError (*norm_linear)(void* y, const DecodeNorm& norm, const void* w, const float* bias, int64_t N, int64_t C,
                             int64_t O, bool swiglu, StreamHandle stream);
  // As PagedAttentionKernels::decode of raw q rows, with k and v of the new token (K, D) behind each q row: writes the
  // turned k and v to the cache. Reference: rms_norm_forward on heads, rotate, write_kv, decode.
  // Tables, lengths, positions, slots and the cache of earlier tokens are read before the launch in front has ended:
  // they must be complete before that one begins.
  KernelError (*attention)(void* o, const void* qkv, void* k_cache, void* v_cache, const int32_t* block_tables,
                           const int32_t* context_lens, const PagedShape& shape, const DecodeRotation& rotation,
                           void* workspace, StreamHandle stream);
};

namespace cuda {
const DecodeLayerKernels& decode_layer();
}

}  // namespace kintsugi::kernels
