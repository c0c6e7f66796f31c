#include "runtime/model/transformer_impl.h"

namespace kintsugi::runtime {
namespace {

// Where the gradient of a tensor goes; null for a tensor that the model does not have.
float* at_offset(UnitAccess::Gradients g, int64_t offset) { return offset == kAbsent ? nullptr : g.data + offset; }

}  // namespace

Status TransformerImpl::weight_backward(const void* dy, const void* x, const Linear& linear, UnitAccess::Gradients g,
                                        int64_t N, Stream& stream) {
  const kernels::GemmKernels& k = *k_.gemm;
  float* dw = at_offset(g, linear.w);
  float* db = at_offset(g, linear.b);
  const DType dtype = options_.dtype;
  const kernels::StreamHandle s = stream.handle();
  return stream.launched(
      db == nullptr ? k.linear_backward_weight(dw, dy, x, N, linear.I, linear.O, g.accumulate, dtype, s)
                    : k.linear_backward_weight_bias(dw, db, dy, x, N, linear.I, linear.O, g.accumulate, dtype, s),
      "linear.backward_weight");
}

Status TransformerImpl::linear_backward(void* dx, const void* dy, const void* x, const Linear& linear,
                                        const UnitWeights& w, UnitAccess::Gradients g, int64_t N, Stream& stream) {
  KTG_RETURN_IF_ERROR(weight_backward(dy, x, linear, g, N, stream));
  return stream.launched(k_.gemm->linear_backward_input(dx, dy, w.matrix(linear.w), N, linear.I, linear.O, false,
                                                        options_.dtype, stream.handle()),
                         "linear.backward_input");
}

Status TransformerImpl::norm_backward(const NormOutputs& forward, int64_t w_offset, int64_t b_offset,
                                      const UnitWeights& w, UnitAccess::Gradients g, const void* d_residual, int64_t N,
                                      Stream& stream) {
  const kernels::NormKernels& k = *k_.norm;
  const kernels::KernelError error =
      config_.is_gpt2()
          ? k.layer_norm_backward(a_.d_stream, at_offset(g, w_offset), at_offset(g, b_offset), a_.d_branch,
                                  forward.stream, w.vector(w_offset), forward.mean, forward.rstd, d_residual, N, C(),
                                  g.accumulate, a_.workspace, options_.dtype, stream.handle())
          : k.rms_norm_backward(a_.d_stream, at_offset(g, w_offset), a_.d_branch, forward.stream, w.vector(w_offset),
                                forward.rstd, d_residual, N, C(), kernels::RowLayout{}, g.accumulate, a_.workspace,
                                options_.dtype, stream.handle());
  return stream.launched(error, "norm.backward");
}

Status TransformerImpl::head_backward(const MicroBatch& batch, const UnitWeights& w, UnitAccess& access, LossSums* sums,
                                      UnitAccess::Gradients* table, Stream& stream) {
  const int64_t N = batch.B * batch.T;
  const DType dtype = options_.dtype;
  KTG_RETURN_IF_ERROR(logits_of(a_.logits, a_.h, N, w, access, stream));
  KTG_RETURN_IF_ERROR(stream.launched(
      k_.cross_entropy->forward_backward(a_.losses, a_.logits, batch.targets, N, V(), dtype, stream.handle()),
      "cross_entropy.forward_backward"));
  KTG_RETURN_IF_ERROR(sum_losses(batch, sums, stream));
  KTG_RETURN_IF_ERROR(look(head_unit(), a_.losses, N, DType::kF32, stream));

  KTG_ASSIGN_OR_RETURN(const UnitAccess::Gradients g, access.gradients(head_unit(), stream));
  UnitAccess::Gradients matrix_gradients = g;
  int64_t matrix_offset = layout_.head_w;
  if (matrix_offset == kAbsent) {
    KTG_ASSIGN_OR_RETURN(*table, access.gradients(0, stream));
    matrix_gradients = *table;
    matrix_offset = layout_.token_table;
  }
  KTG_RETURN_IF_ERROR(
      stream.launched(k_.gemm->linear_backward_weight(matrix_gradients.data + matrix_offset, a_.logits, a_.h, N, C(),
                                                      V(), matrix_gradients.accumulate, dtype, stream.handle()),
                      "head.backward_weight"));
  KTG_RETURN_IF_ERROR(with_head_matrix(w, access, stream, [&](const void* matrix) {
    return stream.launched(
        k_.gemm->linear_backward_input(a_.d_branch, a_.logits, matrix, N, C(), V(), false, dtype, stream.handle()),
        "head.backward_input");
  }));
  KTG_RETURN_IF_ERROR(
      norm_backward({a_.stream, a_.h, a_.mean, a_.rstd}, layout_.norm_w, layout_.norm_b, w, g, nullptr, N, stream));
  KTG_RETURN_IF_ERROR(look(params_.num_units() + head_unit(), a_.d_stream, N * C(), dtype, stream));
  return access.gradients_ready(head_unit(), stream);
}

// Brings back what backward reads of this block and forward did not keep: the same kernels over the same numbers, so
// the same bits. `branch` is free here, because d_branch has been used up.
Status TransformerImpl::recompute(const Pass& pass, int64_t l, const UnitWeights& w, LayerActivations& a,
                                  Stream& stream) {
  if (options_.recompute == Recompute::kNone) return ok_status();
  const BlockLayout& at = layout_.block;
  const bool block = options_.recompute == Recompute::kBlock;
  KTG_RETURN_IF_ERROR(norm_forward({a.stream1, a.h1, a.mean1, a.rstd1}, nullptr, w.vector(at.norm1_w),
                                   w.vector(at.norm1_b), pass.N(), stream));
  if (block) {
    KTG_RETURN_IF_ERROR(attention_forward(pass, l, w, a, stream));
  } else if (options_.recompute == Recompute::kAttention) {
    KTG_RETURN_IF_ERROR(whole_attention(pass, a, stream));
  }
  KTG_RETURN_IF_ERROR(norm_forward({a.stream2, a.h2, a.mean2, a.rstd2}, block ? a.stream1 : nullptr,
                                   w.vector(at.norm2_w), w.vector(at.norm2_b), pass.N(), stream));
  if (block) return up_forward(pass, w, a, stream);
  if (config_.is_gpt2()) return ok_status();
  return stream.launched(k_.activation->swiglu_forward(a.act, a.up, pass.N(), F(), options_.dtype, stream.handle()),
                         "activation.forward");
}

// d_stream enters as the gradient of the block's output and leaves as that of its input.
Status TransformerImpl::block_backward(const Pass& pass, int64_t l, const UnitWeights& w, UnitAccess::Gradients g,
                                       Stream& stream) {
  LayerActivations& a = layer(l, true);
  const BlockLayout& at = layout_.block;
  KTG_RETURN_IF_ERROR(recompute(pass, l, w, a, stream));
  KTG_RETURN_IF_ERROR(feed_forward_backward(pass, w, g, a, stream));
  KTG_RETURN_IF_ERROR(
      norm_backward({a.stream2, a.h2, a.mean2, a.rstd2}, at.norm2_w, at.norm2_b, w, g, a_.d_stream, pass.N(), stream));
  KTG_RETURN_IF_ERROR(attention_backward(pass, w, g, a, stream));
  KTG_RETURN_IF_ERROR(
      norm_backward({a.stream1, a.h1, a.mean1, a.rstd1}, at.norm1_w, at.norm1_b, w, g, a_.d_stream, pass.N(), stream));
  return look(params_.num_units() + l + 1, a_.d_stream, pass.N() * C(), options_.dtype, stream);
}

Status TransformerImpl::feed_forward_backward(const Pass& pass, const UnitWeights& w, UnitAccess::Gradients g,
                                              LayerActivations& a, Stream& stream) {
  const BlockLayout& at = layout_.block;
  const int64_t N = pass.N();
  const Linear up{at.up_w, at.up_b, C(), UP()}, down{at.down_w, at.down_b, F(), C()};
  if (config_.is_gpt2()) {
    KTG_RETURN_IF_ERROR(weight_backward(a_.d_stream, a.act, down, g, N, stream));
    KTG_RETURN_IF_ERROR(
        stream.launched(k_.gemm->linear_gelu_backward_input(a_.d_act, a_.d_stream, w.matrix(down.w), a.up, N, F(), C(),
                                                            options_.dtype, stream.handle()),
                        "down.backward_input"));
    return linear_backward(a_.d_branch, a_.d_act, a.h2, up, w, g, N, stream);
  }
  KTG_RETURN_IF_ERROR(weight_backward(a_.d_stream, a.act, down, g, N, stream));
  // SwiGLU's gradient replaces its input, which nobody needs again.
  KTG_RETURN_IF_ERROR(
      stream.launched(k_.gemm->linear_swiglu_backward_input(a.up, a_.d_act, a_.d_stream, w.matrix(down.w), a.up, N, F(),
                                                            C(), options_.dtype, stream.handle()),
                      "down.backward_input"));
  return linear_backward(a_.d_branch, a.up, a.h2, up, w, g, N, stream);
}

Status TransformerImpl::attention_backward(const Pass& pass, const UnitWeights& w, UnitAccess::Gradients g,
                                           LayerActivations& a, Stream& stream) {
  const BlockLayout& at = layout_.block;
  const int64_t N = pass.N(), k_at = H() * D(), v_at = (H() + K()) * D();
  const DType dtype = options_.dtype;
  const kernels::StreamHandle s = stream.handle();
  KTG_RETURN_IF_ERROR(linear_backward(a_.d_o, a_.d_stream, a.o, {at.o_w, at.o_b, H() * D(), C()}, w, g, N, stream));
  kernels::AttentionShape shape = attention_shape_of(pass, pass.T);
  shape.positions = pass.positions;
  shape.cos_sin = a_.cos_sin;
  KTG_CHECK(k_.attention->backward_workspace_bytes(shape, dtype) <= a_.workspace_bytes)
      << pass.B << " x " << pass.T << " tokens";
  KTG_RETURN_IF_ERROR(stream.launched(
      k_.attention->backward(a_.d_qkv, offset(a_.d_qkv, k_at), offset(a_.d_qkv, v_at), a_.d_o, a.o, a.lse, a.qkv,
                             offset(a.qkv, k_at), offset(a.qkv_raw, v_at), shape, a_.workspace, dtype, s),
      "attention.backward"));
  if (config_.qk_norm) {
    void* d_k = offset(a_.d_qkv, k_at);
    KTG_RETURN_IF_ERROR(stream.launched(
        k_.norm->rms_norm_backward(a_.d_qkv, at_offset(g, at.q_norm), a_.d_qkv, a.qkv_raw, w.vector(at.q_norm),
                                   a.q_rstd, nullptr, N * H(), D(), {H(), QKV()}, g.accumulate, a_.workspace, dtype, s),
        "q_norm.backward"));
    KTG_RETURN_IF_ERROR(stream.launched(
        k_.norm->rms_norm_backward(d_k, at_offset(g, at.k_norm), d_k, offset(a.qkv_raw, k_at), w.vector(at.k_norm),
                                   a.k_rstd, nullptr, N * K(), D(), {K(), QKV()}, g.accumulate, a_.workspace, dtype, s),
        "k_norm.backward"));
  }
  return linear_backward(a_.d_branch, a_.d_qkv, a.h1, {at.qkv_w, at.qkv_b, C(), QKV()}, w, g, N, stream);
}

Status TransformerImpl::embedding_backward(const Pass& pass, UnitAccess::Gradients g, bool table_written,
                                           Stream& stream) {
  KTG_CHECK(g.used_rows == nullptr || !table_written) << "rows left out of a table that the head's gradient fills";
  const kernels::TableUpdate tokens{table_written || g.accumulate, g.used_rows};
  KTG_RETURN_IF_ERROR(table_backward(g.data + layout_.token_table, pass.ids, pass.N(), V(), tokens, stream));
  if (layout_.position_table == kAbsent) return ok_status();
  return table_backward(g.data + layout_.position_table, pass.positions, pass.N(), config_.max_seq_len, {g.accumulate},
                        stream);
}

Status TransformerImpl::table_backward(float* dtable, const int32_t* ids, int64_t N, int64_t rows,
                                       const kernels::TableUpdate& update, Stream& stream) {
  const kernels::EmbeddingKernels& k = *k_.embedding;
  KTG_RETURN_IF_ERROR(stream.launched(k.index(a_.workspace, ids, N, rows, update, stream.handle()), "embedding.index"));
  return stream.launched(
      k.backward(dtable, a_.d_stream, ids, a_.workspace, N, C(), rows, update, options_.dtype, stream.handle()),
      "embedding.backward");
}

}  // namespace kintsugi::runtime
