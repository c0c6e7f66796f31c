// The one Transformer: both families, forward in transformer_forward.cc, backward in transformer_backward.cc.
// Internal to runtime/model. Letters as in model_config.h; B sequences of T tokens, N = B T rows.
#pragma once

#include <vector>

#include "runtime/model/transformer_layout.h"
#include "runtime/model/transformer_plan.h"

namespace kintsugi::runtime {

class TransformerImpl final : public Transformer {
 public:
  TransformerImpl(const ModelConfig& config, const TransformerOptions& options, Backend& backend, Arena& arena);
  Status init(Stream& stream);

  const ParamTable& params() const override { return params_; }
  void set_finite_flags(int32_t* flags) override { finite_flags_ = flags; }
  Status forward_backward(const MicroBatch& batch, UnitAccess& access, LossSums* sums, Stream& stream) override;
  Status forward_loss(const MicroBatch& batch, UnitAccess& access, LossSums* sums, Stream& stream) override;
  Status forward_logits(void* logits, const int32_t* ids, const int32_t* positions, int64_t B, int64_t T,
                        bool last_only, UnitAccess& access, KvSink* sink, Stream& stream) override;
  Status decode(void* logits, const int32_t* ids, const int32_t* positions, int64_t S, const PagedCacheView& cache,
                UnitAccess& access, Stream& stream) override;

 private:
  // One forward pass. Exactly one kind of attention: over whole sequences (sink may take the keys and values), or,
  // when `cache` is given, of one new token a sequence against the cache.
  struct Pass {
    const int32_t* ids;
    const int32_t* positions;
    int64_t B, T;
    bool for_backward;  // keep every layer's activations
    const int32_t* document_starts = nullptr;
    KvSink* sink = nullptr;
    const PagedCacheView* cache = nullptr;
    int64_t N() const { return B * T; }
  };
  using OnUnit = std::function<Status(const UnitWeights&)>;

  // Raises the flag at `index` when one of n elements is not finite.
  Status look(int64_t index, const void* x, int64_t n, DType dtype, Stream& stream) const;
  Status check_batch(int64_t B, int64_t T) const;
  // A pass over a batch of training or evaluation.
  Result<Pass> begin_pass(const MicroBatch& batch, bool for_backward, Stream& stream);
  Status use_positions(int64_t T, Stream& stream);
  LayerActivations& layer(int64_t l, bool for_backward) { return a_.layers[for_backward ? static_cast<size_t>(l) : 0]; }
  char* offset(void* base, int64_t elements) const {
    return static_cast<char*>(base) + elements * kernels::size_of(options_.dtype);
  }
  const char* offset(const void* base, int64_t elements) const {
    return static_cast<const char*>(base) + elements * kernels::size_of(options_.dtype);
  }
  // Acquires `unit`, calls `body`, releases the unit whatever came out.
  template <class Body>
  Status with_unit(int unit, UnitAccess& access, Stream& stream, Body&& body);
  // The same for the weights of the head's matrix: its own unit's, or the token table's when tied.
  template <class Body>
  Status with_head_matrix(const UnitWeights& head, UnitAccess& access, Stream& stream, Body&& body);

  // Forward. `stream_up_to_norm` runs everything before the head's unit; final_norm and logits are the head's.
  Status run_blocks(const Pass& pass, UnitAccess& access, Stream& stream);
  Status block_forward(const Pass& pass, int64_t l, const UnitWeights& w, Stream& stream);
  Status qkv_forward(const Pass& pass, const UnitWeights& w, LayerActivations& a, Stream& stream);
  Status attention_forward(const Pass& pass, int64_t l, const UnitWeights& w, LayerActivations& a, Stream& stream);
  kernels::AttentionShape attention_shape_of(const Pass& pass, int64_t rows) const;
  // The rows of a sequence that attention is called for, its last ones beyond T where the prompt is padded for it.
  int64_t attention_rows(const Pass& pass) const;
  Status clear_behind_prompt(const Pass& pass, LayerActivations& a, Stream& stream);
  Status whole_attention(const Pass& pass, LayerActivations& a, Stream& stream);
  Status feed_forward(const Pass& pass, const UnitWeights& w, LayerActivations& a, Stream& stream);
  Status up_forward(const Pass& pass, const UnitWeights& w, LayerActivations& a, Stream& stream);
  Status final_norm(const Pass& pass, const UnitWeights& w, Stream& stream);
  Status logits_of(void* logits, const void* h, int64_t N, const UnitWeights& head, UnitAccess& access, Stream& stream);
  // A decode step in few launches, where the kernels have them.
  bool decodes_by_layer(int64_t S) const;
  Status decode_by_layer(void* logits, const Pass& pass, UnitAccess& access, Stream& stream);
  // The residual stream goes from one buffer to the other, because every block of a launch reads it while one writes
  // it.
  struct DecodeStreams {
    void* present;
    void* next;
  };
  Status decode_linear(void* y, DecodeStreams& streams, const void* branch, const float* norm, const void* matrix,
                       const float* bias, int64_t N, int64_t O, bool swiglu, Stream& stream);
  Status decode_block(const Pass& pass, int64_t l, const UnitWeights& w, DecodeStreams& streams, Stream& stream);
  Status decode_attention(const Pass& pass, int64_t l, const UnitWeights& w, LayerActivations& a, Stream& stream);
  kernels::PagedShape paged_shape(const Pass& pass) const;
  // y = norm(stream) where stream = branch + residual, or stream as it is when residual is null.
  struct NormOutputs {
    void* stream;
    void* y;
    float* mean;
    float* rstd;
  };
  Status norm_forward(const NormOutputs& out, const void* residual, const float* w, const float* b, int64_t N,
                      Stream& stream);

  // Backward.
  Status head_backward(const MicroBatch& batch, const UnitWeights& w, UnitAccess& access, LossSums* sums,
                       UnitAccess::Gradients* table, Stream& stream);
  Status recompute(const Pass& pass, int64_t l, const UnitWeights& w, LayerActivations& a, Stream& stream);
  Status block_backward(const Pass& pass, int64_t l, const UnitWeights& w, UnitAccess::Gradients g, Stream& stream);
  Status feed_forward_backward(const Pass& pass, const UnitWeights& w, UnitAccess::Gradients g, LayerActivations& a,
                               Stream& stream);
  Status attention_backward(const Pass& pass, const UnitWeights& w, UnitAccess::Gradients g, LayerActivations& a,
                            Stream& stream);
  Status embedding_backward(const Pass& pass, UnitAccess::Gradients g, bool table_written, Stream& stream);
  Status table_backward(float* dtable, const int32_t* ids, int64_t N, int64_t rows, const kernels::TableUpdate& update,
                        Stream& stream);
  // Gradients of y = x W^T + b at the offsets `w` and `b` of a unit: dx overwritten, dW and db as `g` says.
  struct Linear {
    int64_t w, b;
    int64_t I, O;
  };
  Status weight_backward(const void* dy, const void* x, const Linear& linear, UnitAccess::Gradients g, int64_t N,
                         Stream& stream);
  Status linear_backward(void* dx, const void* dy, const void* x, const Linear& linear, const UnitWeights& w,
                         UnitAccess::Gradients g, int64_t N, Stream& stream);
  // d_stream += gradient through the norm whose output's gradient is d_branch.
  Status norm_backward(const NormOutputs& forward, int64_t w_offset, int64_t b_offset, const UnitWeights& w,
                       UnitAccess::Gradients g, const void* d_residual, int64_t N, Stream& stream);
  Status sum_losses(const MicroBatch& batch, LossSums* sums, Stream& stream);

  const ModelConfig config_;
  const TransformerOptions options_;
  Backend& backend_;
  const kernels::KernelTable& k_;
  const ParamTable params_;
  const ModelLayout layout_;
  std::vector<std::vector<PackedVector>> vectors_;  // by unit
  Activations a_;
  std::vector<int32_t> host_positions_;
  int32_t* finite_flags_ = nullptr;
  int64_t positions_T_ = 0;  // the T that positions were written for

  int64_t C() const { return config_.dim; }
  int64_t F() const { return config_.ffn_dim; }
  int64_t H() const { return config_.num_heads; }
  int64_t K() const { return config_.kv_heads(); }
  int64_t D() const { return config_.head_size(); }
  int64_t V() const { return config_.vocab_size; }
  int64_t L() const { return config_.num_layers; }
  int64_t QKV() const { return (H() + 2 * K()) * D(); }
  int64_t UP() const { return config_.is_gpt2() ? F() : 2 * F(); }
  int head_unit() const { return params_.num_units() - 1; }
};

template <class Body>
Status TransformerImpl::with_unit(int unit, UnitAccess& access, Stream& stream, Body&& body) {
  KTG_ASSIGN_OR_RETURN(const UnitAccess::Weights weights, access.acquire(unit, stream));
  const Status outcome = body(UnitWeights{weights.master, weights.compute, options_.dtype, weights.vectors,
                                          &vectors_[static_cast<size_t>(unit)]});
  const Status released = access.release(unit, stream);
  return outcome.ok() ? released : outcome;
}

template <class Body>
Status TransformerImpl::with_head_matrix(const UnitWeights& head, UnitAccess& access, Stream& stream, Body&& body) {
  if (layout_.head_w != kAbsent) return body(head.matrix(layout_.head_w));
  return with_unit(0, access, stream, [&](const UnitWeights& w) { return body(w.matrix(layout_.token_table)); });
}

}  // namespace kintsugi::runtime
