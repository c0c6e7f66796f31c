// The buffers of a Transformer, planned in one place: the same code counts the bytes and takes the memory.
// Internal to runtime/model. N rows (tokens); T is the compute dtype. Other letters as in model_config.h.
#pragma once

#include <functional>
#include <vector>

#include "runtime/model/transformer.h"

namespace kintsugi::runtime {

// What a block's forward leaves for its backward. With Recompute, members of several layers are the same memory.
struct LayerActivations {
  void* stream1;  // (N, C) T: the residual stream that enters the block
  void* h1;       // (N, C) T: its norm
  float* mean1;   // (N); LayerNorm only
  float* rstd1;   // (N)
  void* qkv_raw;  // (N, (H + 2K) D) T: before QK-norm; without QK-norm the same memory as qkv
  void* qkv;      // (N, (H + 2K) D) T: what attention reads, except v, which stays in qkv_raw
  float* q_rstd;  // (N, H); QK-norm only
  float* k_rstd;  // (N, K)
  float* lse;     // (B, H, T); training only
  void* o;        // (N, H D) T
  void* stream2;  // (N, C) T: the stream after attention
  void* h2;       // (N, C) T
  float* mean2;   // (N)
  float* rstd2;   // (N)
  void* up;       // (N, 2F) T llama: gate and up; (N, F) T gpt2. Backward turns it into its own gradient (llama)
  void* act;      // (N, F) T
};

struct Activations {
  std::vector<LayerActivations> layers;  // L of them for training; otherwise one that all layers use in turn
  void* stream;                          // (N, C) T: the stream that enters the final norm
  void* h;                               // (N, C) T
  float* mean;                           // (N)
  float* rstd;                           // (N)
  void* branch;  // (N, C) T: what attention or the feed-forward layer adds to the stream, before it is added
  void* logits;  // (logits_rows, V) T
  int64_t logits_rows;
  float* losses;        // (N)
  int32_t* positions;   // (N): n % T of the latest training batch
  void* document_mask;  // of the batch (kernels/attention.h); null without TransformerOptions::documents
  float* cos_sin;       // (max_seq_len, D); RoPE only
  // Without training: for the decode step's attention, zeros before its first use. Null when it needs none.
  void* decode_workspace;
  int64_t decode_workspace_bytes;
  // Backward.
  void* d_stream;  // (N, C) T
  void* d_branch;  // (N, C) T: the same memory as branch
  void* d_act;     // (N, F) T: the same memory as d_qkv
  void* d_qkv;     // (N, (H + 2K) D) T
  void* d_o;       // (N, H D) T
  void* workspace;
  int64_t workspace_bytes;
};

// The rows that a prompt's attention is padded to where a library builds anew for each number of them, a tenth of a
// second each: 64 and its doubles, and the middles between them. Attention is a small part of a prompt's work.
int64_t prompt_attention_rows(int64_t T);

// Calls `take` for every buffer, always in the same order, with its size in bytes.
Activations plan_activations(const ModelConfig& config, const TransformerOptions& options,
                             const kernels::KernelTable& kernels, const std::function<void*(int64_t)>& take);

}  // namespace kintsugi::runtime
