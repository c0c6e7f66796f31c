// Forward and backward of both model families, written out by hand over planned buffers.
// It knows nothing of ranks: weights come from, and gradients go to, a UnitAccess, which the
// parallel modes implement (plain here, gathered on demand when sharded).
//   B sequences   T tokens each   N = B T   V vocabulary
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/backend.h"
#include "runtime/model/param_table.h"

namespace kintsugi::runtime {

// Weights and gradients of one unit at a time, in the order forward and backward use them.
//   acquire/release: forward 0, 1, ..., U-1; backward U-2, ..., 1. The head's unit U-1 is held once, for its forward
//   and
//     backward together; the embedding's backward reads no weights. With a tied table the head acquires unit 0 inside
//     its hold of U-1. Every acquire is followed by its release, after an error too.
//   gradients/gradients_ready: once a unit, U-1, ..., 1, 0. With a tied table the head asks for unit 0's gradients
//   first
//     (its own, written with `accumulate` as given) and the embedding adds to the same memory at the very end;
//     gradients_ready(0) still comes once, last.
class UnitAccess {
 public:
  virtual ~UnitAccess() = default;
  // The unit's master weights (fp32, vectors are read here) and its matrices in the compute dtype;
  // both point at the unit's first element (compute == master in fp32). Valid until release(). A mode that keeps the
  // vectors apart gives them as packed_vectors() lays them out; master is then null.
  struct Weights {
    const float* master;
    const void* compute;
    const float* vectors = nullptr;
  };
  virtual Result<Weights> acquire(int unit, Stream& stream) = 0;
  virtual Status release(int unit, Stream& stream) = 0;
  // Where backward writes the unit's gradient (fp32, sum over tokens, first element of the unit), and whether it must
  // add to what is there (gradient accumulation) or overwrite all of it. Padding is never touched.
  struct Gradients {
    float* data;
    bool accumulate;
    // Of the embedding's unit: given, (vocab_size) words that kernels write. Backward then leaves the rows of the token
    // table alone that no token of the step so far has named, and says here which have been: kernels::TableUpdate. Not
    // with a tied table.
    int32_t* used_rows = nullptr;
  };
  virtual Result<Gradients> gradients(int unit, Stream& stream) = 0;
  // The unit's gradient of this micro-step is complete on `stream`.
  virtual Status gradients_ready(int unit, Stream& stream) = 0;
};

// Plain access over whole flat buffers on one rank: tests, evaluation, inference. gradients may be null.
class FlatUnitAccess final : public UnitAccess {
 public:
  FlatUnitAccess(const ParamTable& table, const float* master, const void* compute, float* gradients, DType dtype)
      : table_(table), master_(master), compute_(compute), gradients_(gradients), dtype_(dtype) {}
  void set_accumulate(bool accumulate) { accumulate_ = accumulate; }
  Result<Weights> acquire(int unit, Stream& stream) override;
  Status release(int unit, Stream& stream) override;
  Result<Gradients> gradients(int unit, Stream& stream) override;
  Status gradients_ready(int unit, Stream& stream) override;

 private:
  const ParamTable& table_;
  const float* master_;
  const void* compute_;
  float* gradients_;
  DType dtype_;
  bool accumulate_ = false;
};

// All arrays lie in memory that the backend's kernels read.
struct MicroBatch {
  const int32_t* inputs;   // (B, T) ids in [0, V)
  const int32_t* targets;  // (B, T) ids, or kIgnoredTarget
  int64_t B, T;
  // Several documents in a sequence (TransformerOptions::documents): (B, T) each, as mark_documents() of
  // runtime/data/dataset.h gives them. Null: a sequence is one document, token t's position is t.
  const int32_t* document_starts = nullptr;
  const int32_t* positions = nullptr;
};

using kernels::LossSums;

// Receives each layer's keys and values (N, K, D rows of the compute dtype, strides in elements between tokens,
// RoPE and QK-norm applied) during prefill: the paged cache's write.
class KvSink {
 public:
  virtual ~KvSink() = default;
  virtual Status write(int64_t layer, const void* k, const void* v, int64_t N, int64_t k_stride, int64_t v_stride,
                       Stream& stream) = 0;
};

// One layer's paged cache for the decode step: the fields of kernels::PagedAttentionKernels.
class PagedCacheView {
 public:
  virtual ~PagedCacheView() = default;
  virtual void* k_cache(int64_t layer) const = 0;
  virtual void* v_cache(int64_t layer) const = 0;
  virtual const int32_t* block_tables() const = 0;  // (S, M)
  virtual const int32_t* context_lens() const = 0;  // (S), the new token counted
  virtual const int64_t* new_slots() const = 0;     // (S), where the new token's k, v go
  virtual int64_t kv_block_tokens() const = 0;
  virtual int64_t block_table_width() const = 0;
};

// What backward computes again instead of keeping it from forward. The gradients have the same bits in each case.
enum class Recompute {
  kNone,
  kNormsAndActivations,  // outputs of norms and of SwiGLU: cheap to repeat (GELU is part of a matrix product)
  kAttention,            // these, and attention's output
  kBlock,                // everything but the residual stream that enters each block
};
// "none", "norms_and_activations", "attention", "block".
Result<Recompute> parse_recompute(std::string_view name);

struct TransformerOptions {
  DType dtype = DType::kF32;  // activations and matmul operands
  int64_t max_tokens = 0;     // the most B * T of any call
  int64_t max_seq_len = 0;    // the longest T of any call
  bool training = true;       // plan buffers for backward
  int64_t max_decode = 0;     // the most sequences of a decode(); 0: only where decode needs no workspace
  bool one_length = false;    // every forward_backward() has sequences of max_seq_len: no workspace for others
  Recompute recompute = Recompute::kNone;
  bool deterministic = true;  // false: attention's backward may sum in an order that varies
  bool documents = false;     // batches may hold several documents a sequence
};

// The linear layers of a forward and backward over N tokens, each kind once.
std::vector<kernels::LinearShape> linear_layers(const ModelConfig& config, DType dtype, int64_t N, bool accumulate);

// The attention of a forward and backward over B sequences of T tokens.
kernels::AttentionShape attention_shape(const ModelConfig& config, const TransformerOptions& options, int64_t B,
                                        int64_t T);

class Transformer {
 public:
  // Bytes of activations and workspace that create() will take from its arena, exactly; for the memory plan.
  // Workspace is the kernels' own affair, so the answer depends on the backend's table.
  static int64_t activation_bytes(const ModelConfig& config, const TransformerOptions& options,
                                  const kernels::KernelTable& kernels = kernels::cpu::kernels());
  // Takes all buffers from `arena`, which keeps the memory alive. `backend` and `arena` outlive the model.
  // kInvalidArgument when the configuration or the options do not fit together.
  static Result<std::unique_ptr<Transformer>> create(const ModelConfig& config, const TransformerOptions& options,
                                                     Backend& backend, Arena& arena, Stream& stream);
  virtual ~Transformer() = default;

  virtual const ParamTable& params() const = 0;
  // Where numbers stop being finite, for those who look for it: with U units, flags[u] becomes 1 when what unit u hands
  // on in forward (the last one: the losses) holds an infinity or NaN, flags[U + u] when the gradient that leaves it in
  // backward does. 2 U flags in memory that kernels write; the caller clears them. Null: nothing is looked at.
  virtual void set_finite_flags(int32_t* flags) = 0;
  // All calls return kInvalidArgument when the batch exceeds the options, and kAborted between two operations once the
  // stream's stop token says so: buffers then hold a half-done step, and the next call simply overwrites them.
  // No call takes memory from the backend.
  // Gradient of the SUM of token losses into `access`. `sums` lies in memory that the backend's kernels write (device
  // memory, or Backend::allocate_host()'s); it is filled when the stream reaches it.
  virtual Status forward_backward(const MicroBatch& batch, UnitAccess& access, LossSums* sums, Stream& stream) = 0;
  virtual Status forward_loss(const MicroBatch& batch, UnitAccess& access, LossSums* sums, Stream& stream) = 0;
  // logits (N, V) of the compute dtype, the same bits as inside forward_backward; `last_only` writes (B, V), the last
  // position's. positions (N) int32. sink may be null. This is prefill.
  virtual Status forward_logits(void* logits, const int32_t* ids, const int32_t* positions, int64_t B, int64_t T,
                                bool last_only, UnitAccess& access, KvSink* sink, Stream& stream) = 0;
  // One new token for each of S sequences: logits (S, V). positions (S) int32.
  virtual Status decode(void* logits, const int32_t* ids, const int32_t* positions, int64_t S,
                        const PagedCacheView& cache, UnitAccess& access, Stream& stream) = 0;
};

}  // namespace kintsugi::runtime
