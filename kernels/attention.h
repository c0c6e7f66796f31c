// Causal self-attention over whole sequences, grouped queries (GQA). No T x T matrix is written:
// keys are taken in fixed blocks from position 0 on with a running maximum and sum, so a query
// row's bits depend on its own position and the keys up to it only, not on T or B.
// Method: Dao et al., FlashAttention (arXiv:2205.14135) and FlashAttention-2 (arXiv:2307.08691).
//   B batch   T tokens   H query heads   K key/value heads (H % K == 0)   D head size
// Token n = b T + t of q starts at q + n * q_stride elements, its head h at + h D; likewise k, v, o
// and the gradients with their own strides, so q, k and v may lie packed in one buffer.
#pragma once

#include "kernels/types.h"

namespace kintsugi::kernels {

struct AttentionShape {
  int64_t B, T, H, K, D;
  int64_t q_stride, k_stride, v_stride, o_stride;  // elements between consecutive tokens
  float scale;                                     // softmax(scale * q k^T), usually 1/sqrt(D)
  bool deterministic = true;                       // false: the backward pass may sum in an order that varies
  // Several documents packed in a sequence: (B, T), for each token the position in its sequence at which its document
  // begins, in memory that the kernels read. A token attends to its own document only. Null: a sequence is one
  // document.
  const int32_t* document_starts = nullptr;
  // With documents: what write_document_mask() made of their starts. Null where document_mask_bytes() is 0; elsewhere
  // null takes slower kernels.
  const void* document_mask = nullptr;
  // How q and k were turned before (rotate() of kernels/rope.h, whose arguments these are): the backward pass turns
  // their gradients back. Null: not at all.
  const int32_t* positions = nullptr;  // (B T)
  const float* cos_sin = nullptr;
};

// For questions about the shape of a batch of several documents: the pointers are not null, and nobody may read them.
inline AttentionShape with_documents(AttentionShape shape) {
  static constexpr int32_t kNobodyReadsThis = 0;
  shape.document_starts = &kNobodyReadsThis;
  shape.document_mask = &kNobodyReadsThis;
  return shape;
}

struct AttentionKernels {
  // o[b,t,h,:] = sum_{s<=t} softmax_s(scale q.k_s) v_s, s from the start of t's document on.   lse (B, H, T) fp32: log
  // of the softmax's denominator, kept for the backward pass; may be null. 2 B H T^2 D operations (causal half
  // counted).
  KernelError (*forward)(void* o, float* lse, const void* q, const void* k, const void* v, const AttentionShape& shape,
                         DType dtype, StreamHandle stream);
  // Gradients of q, k, v (overwritten; strides those of q, k, v) from d_o (stride o_stride); with shape.cos_sin those
  // of q and k before they were turned. workspace: at least backward_workspace_bytes(shape, dtype).
  KernelError (*backward)(void* dq, void* dk, void* dv, const void* d_o, const void* o, const float* lse, const void* q,
                          const void* k, const void* v, const AttentionShape& shape, void* workspace, DType dtype,
                          StreamHandle stream);
  // Answers without a device, too: a plan of memory is printed before there is one.
  int64_t (*backward_workspace_bytes)(const AttentionShape& shape, DType dtype);
  // What the library's kernels read in place of document_starts: on the device a number for every pair of tokens, about
  // 2 B T T bytes, which all layers' calls on one batch share. 0: nothing. document_mask_bytes() answers without a
  // device.
  int64_t (*document_mask_bytes)(const AttentionShape& shape, DType dtype);
  KernelError (*write_document_mask)(void* mask, const AttentionShape& shape, DType dtype, StreamHandle stream);
  // Builds what calls of exactly this shape need the first time, so that none of them does: on the device about 0.1 s a
  // shape, whose calls can then be recorded into a graph; nothing elsewhere. Blocks.
  KernelError (*prepare)(const AttentionShape& shape, DType dtype, bool with_backward);
  // Whether prepare() builds something for shapes like this one: calls of many lengths then better share a few.
  bool (*built_by_shape)(const AttentionShape& shape, DType dtype);
  // What serves the shape, for banners and reports: "our own", "cuDNN 9.14.0", "plain (why not the faster one)".
  // What cuDNN refuses is known after prepare() or the first call.
  // The text stays for the life of the process.
  const char* (*library)(const AttentionShape& shape, DType dtype);
};

namespace reference {
const AttentionKernels& attention();
}
namespace cpu {
const AttentionKernels& attention();
}
namespace cuda {
const AttentionKernels& attention();
}

}  // namespace kintsugi::kernels
