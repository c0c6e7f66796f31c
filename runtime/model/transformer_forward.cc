#include "runtime/model/transformer_impl.h"

namespace kintsugi::runtime {

Status TransformerImpl::run_blocks(const Pass& pass, UnitAccess& access, Stream& stream) {
  KTG_RETURN_IF_ERROR(with_unit(0, access, stream, [&](const UnitWeights& w) {
    const bool learned = layout_.position_table != kAbsent;
    return stream.launched(
        k_.embedding->forward(layer(0, pass.for_backward).stream1, pass.ids, w.matrix(layout_.token_table),
                              learned ? pass.positions : nullptr, learned ? w.matrix(layout_.position_table) : nullptr,
                              pass.N(), C(), options_.dtype, stream.handle()),
        "embedding.forward");
  }));
  KTG_RETURN_IF_ERROR(look(0, layer(0, pass.for_backward).stream1, pass.N() * C(), options_.dtype, stream));
  for (int64_t l = 0; l < L(); ++l) {
    KTG_RETURN_IF_ERROR(with_unit(static_cast<int>(l) + 1, access, stream,
                                  [&](const UnitWeights& w) { return block_forward(pass, l, w, stream); }));
  }
  return ok_status();
}

Status TransformerImpl::norm_forward(const NormOutputs& out, const void* residual, const float* w, const float* b,
                                     int64_t N, Stream& stream) {
  const auto eps = static_cast<float>(config_.norm_eps);
  const kernels::NormKernels& k = *k_.norm;
  kernels::KernelError error;
  if (config_.is_gpt2()) {
    error = residual == nullptr
                ? k.layer_norm_forward(out.y, out.mean, out.rstd, out.stream, w, b, N, C(), eps, options_.dtype,
                                       stream.handle())
                : k.residual_layer_norm_forward(out.stream, out.y, out.mean, out.rstd, a_.branch, residual, w, b, N,
                                                C(), eps, options_.dtype, stream.handle());
  } else {
    error = residual == nullptr ? k.rms_norm_forward(out.y, out.rstd, out.stream, w, N, C(), kernels::RowLayout{}, eps,
                                                     options_.dtype, stream.handle())
                                : k.residual_rms_norm_forward(out.stream, out.y, out.rstd, a_.branch, residual, w, N,
                                                              C(), eps, options_.dtype, stream.handle());
  }
  return stream.launched(error, "norm.forward");
}

// A block's last addition waits in `branch` until the next norm, which adds and normalises in one pass over memory.
Status TransformerImpl::block_forward(const Pass& pass, int64_t l, const UnitWeights& w, Stream& stream) {
  LayerActivations& a = layer(l, pass.for_backward);
  const BlockLayout& at = layout_.block;
  const void* before = l == 0 ? nullptr : layer(l - 1, pass.for_backward).stream2;
  KTG_RETURN_IF_ERROR(norm_forward({a.stream1, a.h1, a.mean1, a.rstd1}, before, w.vector(at.norm1_w),
                                   w.vector(at.norm1_b), pass.N(), stream));
  KTG_RETURN_IF_ERROR(attention_forward(pass, l, w, a, stream));
  KTG_RETURN_IF_ERROR(norm_forward({a.stream2, a.h2, a.mean2, a.rstd2}, a.stream1, w.vector(at.norm2_w),
                                   w.vector(at.norm2_b), pass.N(), stream));
  KTG_RETURN_IF_ERROR(feed_forward(pass, w, a, stream));
  KTG_RETURN_IF_ERROR(look(l + 1, a.stream2, pass.N() * C(), options_.dtype, stream));
  return look(l + 1, a_.branch, pass.N() * C(), options_.dtype, stream);
}

// q, k and v of a block: the product, then RMSNorm of q's and k's heads where the model has it, then RoPE.
Status TransformerImpl::qkv_forward(const Pass& pass, const UnitWeights& w, LayerActivations& a, Stream& stream) {
  const BlockLayout& at = layout_.block;
  const int64_t N = pass.N();
  const DType dtype = options_.dtype;
  const kernels::StreamHandle s = stream.handle();
  const void* matrix = w.matrix(at.qkv_w);
  const float* bias = w.vector(at.qkv_b);
  // q's heads and k's lie side by side: one call turns both.
  const kernels::HeadRotation rotation{pass.positions, a_.cos_sin, H() + K(), H() + 2 * K(), D()};
  const bool turned = a_.cos_sin != nullptr;
  if (turned && !config_.qk_norm) {
    return stream.launched(k_.gemm->linear_rotary_forward(a.qkv, a.h1, matrix, bias, rotation, N, C(), dtype, s),
                           "qkv.forward");
  }
  KTG_RETURN_IF_ERROR(
      stream.launched(k_.gemm->linear_forward(a.qkv_raw, a.h1, matrix, bias, N, C(), QKV(), dtype, s), "qkv.forward"));
  if (config_.qk_norm) {
    const auto eps = static_cast<float>(config_.norm_eps);
    KTG_RETURN_IF_ERROR(stream.launched(k_.norm->rms_norm_forward(a.qkv, a.q_rstd, a.qkv_raw, w.vector(at.q_norm),
                                                                  N * H(), D(), {H(), QKV()}, eps, dtype, s),
                                        "q_norm.forward"));
    KTG_RETURN_IF_ERROR(
        stream.launched(k_.norm->rms_norm_forward(offset(a.qkv, H() * D()), a.k_rstd, offset(a.qkv_raw, H() * D()),
                                                  w.vector(at.k_norm), N * K(), D(), {K(), QKV()}, eps, dtype, s),
                        "k_norm.forward"));
  }
  return turned ? stream.launched(k_.rope->rotate(a.qkv, rotation.positions, rotation.cos_sin, N, rotation.turned, D(),
                                                  QKV(), false, dtype, s),
                                  "rope.forward")
                : ok_status();
}

Status TransformerImpl::attention_forward(const Pass& pass, int64_t l, const UnitWeights& w, LayerActivations& a,
                                          Stream& stream) {
  const BlockLayout& at = layout_.block;
  const int64_t N = pass.N();
  const DType dtype = options_.dtype;
  const kernels::StreamHandle s = stream.handle();
  KTG_RETURN_IF_ERROR(qkv_forward(pass, w, a, stream));
  const void* keys = offset(a.qkv, H() * D());
  const void* values = offset(a.qkv_raw, (H() + K()) * D());
  if (pass.cache != nullptr) {
    const PagedCacheView& cache = *pass.cache;
    KTG_RETURN_IF_ERROR(
        stream.launched(k_.paged_attention->write_kv(cache.k_cache(l), cache.v_cache(l), keys, values,
                                                     cache.new_slots(), N, K(), D(), QKV(), QKV(), dtype, s),
                        "write_kv"));
    KTG_RETURN_IF_ERROR(stream.launched(
        k_.paged_attention->decode(a.o, a.qkv, cache.k_cache(l), cache.v_cache(l), cache.block_tables(),
                                   cache.context_lens(), paged_shape(pass), dtype, a_.decode_workspace, s),
        "attention.decode"));
  } else {
    if (pass.sink != nullptr) KTG_RETURN_IF_ERROR(pass.sink->write(l, keys, values, N, QKV(), QKV(), stream));
    if (l == 0) KTG_RETURN_IF_ERROR(clear_behind_prompt(pass, a, stream));
    KTG_RETURN_IF_ERROR(whole_attention(pass, a, stream));
  }
  return stream.launched(
      k_.gemm->linear_forward(a_.branch, a.o, w.matrix(at.o_w), w.vector(at.o_b), N, H() * D(), C(), dtype, s),
      "o.forward");
}

kernels::AttentionShape TransformerImpl::attention_shape_of(const Pass& pass, int64_t rows) const {
  kernels::AttentionShape shape = attention_shape(config_, options_, pass.B, rows);
  shape.document_starts = pass.document_starts;
  if (pass.document_starts != nullptr) shape.document_mask = a_.document_mask;
  return shape;
}

int64_t TransformerImpl::attention_rows(const Pass& pass) const {
  const bool prompt = !options_.training && pass.B == 1 && pass.document_starts == nullptr;
  const bool padded = prompt && k_.attention->built_by_shape(attention_shape_of(pass, pass.T), options_.dtype);
  return padded ? std::min(prompt_attention_rows(pass.T), options_.max_tokens) : pass.T;
}

// Attention weighs what lies behind the prompt with 0, which makes NaN of an infinity. Later layers leave it alone.
Status TransformerImpl::clear_behind_prompt(const Pass& pass, LayerActivations& a, Stream& stream) {
  const int64_t begin = pass.N() * QKV(), count = attention_rows(pass) * pass.B * QKV() - begin;
  if (count == 0) return ok_status();
  const int64_t element = kernels::size_of(options_.dtype);
  KTG_RETURN_IF_ERROR(backend_.zero(offset(a.qkv, begin), count * element, stream));
  return a.qkv == a.qkv_raw ? ok_status() : backend_.zero(offset(a.qkv_raw, begin), count * element, stream);
}

Status TransformerImpl::whole_attention(const Pass& pass, LayerActivations& a, Stream& stream) {
  const void* keys = offset(a.qkv, H() * D());
  const void* values = offset(a.qkv_raw, (H() + K()) * D());
  return stream.launched(
      k_.attention->forward(a.o, pass.for_backward ? a.lse : nullptr, a.qkv, keys, values,
                            attention_shape_of(pass, attention_rows(pass)), options_.dtype, stream.handle()),
      "attention.forward");
}

Status TransformerImpl::feed_forward(const Pass& pass, const UnitWeights& w, LayerActivations& a, Stream& stream) {
  const BlockLayout& at = layout_.block;
  KTG_RETURN_IF_ERROR(up_forward(pass, w, a, stream));
  return stream.launched(k_.gemm->linear_forward(a_.branch, a.act, w.matrix(at.down_w), w.vector(at.down_b), pass.N(),
                                                 F(), C(), options_.dtype, stream.handle()),
                         "down.forward");
}

// GELU or SwiGLU comes with the product.
Status TransformerImpl::up_forward(const Pass& pass, const UnitWeights& w, LayerActivations& a, Stream& stream) {
  const BlockLayout& at = layout_.block;
  const kernels::GemmKernels& k = *k_.gemm;
  const DType dtype = options_.dtype;
  const kernels::StreamHandle s = stream.handle();
  return stream.launched(config_.is_gpt2() ? k.linear_gelu_forward(a.act, a.up, a.h2, w.matrix(at.up_w),
                                                                   w.vector(at.up_b), pass.N(), C(), F(), dtype, s)
                                           : k.linear_swiglu_forward(a.act, a.up, a.h2, w.matrix(at.up_w),
                                                                     w.vector(at.up_b), pass.N(), C(), F(), dtype, s),
                         "up.forward");
}

Status TransformerImpl::final_norm(const Pass& pass, const UnitWeights& w, Stream& stream) {
  return norm_forward({a_.stream, a_.h, a_.mean, a_.rstd}, layer(L() - 1, pass.for_backward).stream2,
                      w.vector(layout_.norm_w), w.vector(layout_.norm_b), pass.N(), stream);
}

Status TransformerImpl::logits_of(void* logits, const void* h, int64_t N, const UnitWeights& head, UnitAccess& access,
                                  Stream& stream) {
  return with_head_matrix(head, access, stream, [&](const void* matrix) {
    return stream.launched(
        k_.gemm->linear_forward(logits, h, matrix, nullptr, N, C(), V(), options_.dtype, stream.handle()),
        "head.forward");
  });
}

}  // namespace kintsugi::runtime
