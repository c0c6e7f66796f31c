// A decode step where the kernels have its operations fused (kernels/decode_layer.h): five launches a block.
#include <utility>

#include "runtime/model/transformer_impl.h"

namespace kintsugi::runtime {

bool TransformerImpl::decodes_by_layer(int64_t S) const {
  return k_.decode_layer != nullptr && options_.dtype == DType::kBF16 && !config_.is_gpt2() &&
         k_.decode_layer->applies(S, C(), F(), D());
}

// y = rms_norm(stream + branch) w^T, the sum kept as the new stream.
Status TransformerImpl::decode_linear(void* y, DecodeStreams& streams, const void* branch, const float* norm,
                                      const void* matrix, const float* bias, int64_t N, int64_t O, bool swiglu,
                                      Stream& stream) {
  const kernels::DecodeNorm in{streams.next,    streams.present, branch, norm, static_cast<float>(config_.norm_eps),
                               a_.layers[0].h1, a_.layers[0].up};
  const kernels::KernelError error =
      k_.decode_layer->norm_linear(y, in, matrix, bias, N, C(), O, swiglu, stream.handle());
  if (branch != nullptr) std::swap(streams.present, streams.next);
  return stream.launched(error, "norm and product");
}

Status TransformerImpl::decode_by_layer(void* logits, const Pass& pass, UnitAccess& access, Stream& stream) {
  DecodeStreams streams{a_.layers[0].stream1, a_.stream};
  // A plain launch, which begins when all before it has ended: what attention reads ahead of its turn is complete then.
  KTG_RETURN_IF_ERROR(with_unit(0, access, stream, [&](const UnitWeights& w) {
    return stream.launched(k_.embedding->forward(streams.present, pass.ids, w.matrix(layout_.token_table), nullptr,
                                                 nullptr, pass.N(), C(), options_.dtype, stream.handle()),
                           "embedding.forward");
  }));
  for (int64_t l = 0; l < L(); ++l) {
    KTG_RETURN_IF_ERROR(with_unit(static_cast<int>(l) + 1, access, stream,
                                  [&](const UnitWeights& w) { return decode_block(pass, l, w, streams, stream); }));
  }
  return with_unit(head_unit(), access, stream, [&](const UnitWeights& w) {
    return with_head_matrix(w, access, stream, [&](const void* matrix) {
      return decode_linear(logits, streams, a_.branch, w.vector(layout_.norm_w), matrix, nullptr, pass.N(), V(), false,
                           stream);
    });
  });
}

// What attention or the feed-forward layer adds waits in `branch` for the next norm, as in block_forward().
Status TransformerImpl::decode_block(const Pass& pass, int64_t l, const UnitWeights& w, DecodeStreams& streams,
                                     Stream& stream) {
  LayerActivations& a = a_.layers[0];
  const BlockLayout& at = layout_.block;
  const int64_t N = pass.N();
  KTG_RETURN_IF_ERROR(decode_linear(a.qkv_raw, streams, l == 0 ? nullptr : a_.branch, w.vector(at.norm1_w),
                                    w.matrix(at.qkv_w), w.vector(at.qkv_b), N, QKV(), false, stream));
  KTG_RETURN_IF_ERROR(decode_attention(pass, l, w, a, stream));
  KTG_RETURN_IF_ERROR(stream.launched(k_.gemm->linear_forward(a_.branch, a.o, w.matrix(at.o_w), w.vector(at.o_b), N,
                                                              H() * D(), C(), options_.dtype, stream.handle()),
                                      "o.forward"));
  KTG_RETURN_IF_ERROR(decode_linear(a.act, streams, a_.branch, w.vector(at.norm2_w), w.matrix(at.up_w),
                                    w.vector(at.up_b), N, F(), true, stream));
  return stream.launched(k_.gemm->linear_forward(a_.branch, a.act, w.matrix(at.down_w), w.vector(at.down_b), N, F(),
                                                 C(), options_.dtype, stream.handle()),
                         "down.forward");
}

kernels::PagedShape TransformerImpl::paged_shape(const Pass& pass) const {
  const PagedCacheView& cache = *pass.cache;
  const float scale = attention_shape(config_, options_, pass.B, pass.T).scale;
  return {pass.N(), H(), K(), D(), cache.kv_block_tokens(), cache.block_table_width(), QKV(), H() * D(), scale};
}

Status TransformerImpl::decode_attention(const Pass& pass, int64_t l, const UnitWeights& w, LayerActivations& a,
                                         Stream& stream) {
  const PagedCacheView& cache = *pass.cache;
  const kernels::PagedShape shape = paged_shape(pass);
  const kernels::DecodeRotation rotation{w.vector(layout_.block.q_norm),
                                         w.vector(layout_.block.k_norm),
                                         static_cast<float>(config_.norm_eps),
                                         a_.cos_sin,
                                         pass.positions,
                                         cache.new_slots()};
  return stream.launched(
      k_.decode_layer->attention(a.o, a.qkv_raw, cache.k_cache(l), cache.v_cache(l), cache.block_tables(),
                                 cache.context_lens(), shape, rotation, a_.decode_workspace, stream.handle()),
      "attention.decode");
}

}  // namespace kintsugi::runtime
