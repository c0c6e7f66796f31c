#include "runtime/model/transformer.h"

#include <fmt/format.h>

#include <algorithm>

#include "runtime/model/transformer_impl.h"

namespace kintsugi::runtime {
namespace {

Status check_options(const ModelConfig& config, const TransformerOptions& options) {
  KTG_RETURN_IF_ERROR(config.validate());
  if (options.max_seq_len < 1 || options.max_seq_len > config.max_seq_len) {
    return invalid_argument(fmt::format("sequences of {} tokens: must lie in 1 .. model.max_seq_len = {}",
                                        options.max_seq_len, config.max_seq_len));
  }
  if (options.max_tokens < 1) {
    return invalid_argument(fmt::format("at most {} tokens a call: must be at least 1", options.max_tokens));
  }
  return ok_status();
}

}  // namespace

Result<UnitAccess::Weights> FlatUnitAccess::acquire(int unit, Stream&) {
  const int64_t at = table_.units()[static_cast<size_t>(unit)].offset;
  return Weights{master_ + at, static_cast<const char*>(compute_) + at * kernels::size_of(dtype_)};
}

Status FlatUnitAccess::release(int, Stream&) { return ok_status(); }

Result<UnitAccess::Gradients> FlatUnitAccess::gradients(int unit, Stream&) {
  KTG_CHECK(gradients_ != nullptr) << "backward without a gradient buffer";
  return Gradients{gradients_ + table_.units()[static_cast<size_t>(unit)].offset, accumulate_};
}

Status FlatUnitAccess::gradients_ready(int, Stream&) { return ok_status(); }

std::vector<kernels::LinearShape> linear_layers(const ModelConfig& config, DType dtype, int64_t N, bool accumulate) {
  const int64_t C = config.dim, F = config.ffn_dim, V = config.vocab_size;
  const int64_t HD = config.num_heads * config.head_size(), KD = config.kv_heads() * config.head_size();
  const bool gpt2 = config.is_gpt2();
  return {{.N = N,
           .I = C,
           .O = HD + 2 * KD,
           .dtype = dtype,
           .bias = gpt2 || config.qkv_bias,
           .accumulate = accumulate,
           .rotary_after = gpt2 || config.qk_norm ? 0 : config.head_size()},
          {N, HD, C, dtype, gpt2, accumulate},
          {.N = N,
           .I = C,
           .O = gpt2 ? F : 2 * F,
           .dtype = dtype,
           .bias = gpt2,
           .accumulate = accumulate,
           .gelu_after = gpt2,
           .swiglu_after = !gpt2},
          {.N = N,
           .I = F,
           .O = C,
           .dtype = dtype,
           .bias = gpt2,
           .accumulate = accumulate,
           .gelu_before = gpt2,
           .swiglu_before = !gpt2},
          {N, C, V, dtype, false, accumulate}};
}

int64_t Transformer::activation_bytes(const ModelConfig& config, const TransformerOptions& options,
                                      const kernels::KernelTable& kernels) {
  int64_t total = 0;
  plan_activations(config, options, kernels, [&](int64_t size_bytes) -> void* {
    total += arena_bytes(size_bytes);
    return nullptr;
  });
  return total;
}

Result<std::unique_ptr<Transformer>> Transformer::create(const ModelConfig& config, const TransformerOptions& options,
                                                         Backend& backend, Arena& arena, Stream& stream) {
  KTG_RETURN_IF_ERROR(check_options(config, options));
  auto model = std::make_unique<TransformerImpl>(config, options, backend, arena);
  KTG_RETURN_IF_ERROR(model->init(stream));
  return std::unique_ptr<Transformer>(std::move(model));
}

TransformerImpl::TransformerImpl(const ModelConfig& config, const TransformerOptions& options, Backend& backend,
                                 Arena& arena)
    : config_(config),
      options_(options),
      backend_(backend),
      k_(backend.kernels()),
      params_(ParamTable::build(config)),
      layout_(ModelLayout::of(config, params_)),
      a_(plan_activations(config, options, backend.kernels(), [&](int64_t bytes) { return arena.take(bytes); })),
      host_positions_(static_cast<size_t>(options.max_tokens)) {
  for (int unit = 0; unit < params_.num_units(); ++unit) vectors_.push_back(packed_vectors(params_, unit));
}

Status TransformerImpl::init(Stream& stream) {
  if (a_.decode_workspace != nullptr) {
    KTG_RETURN_IF_ERROR(backend_.zero(a_.decode_workspace, a_.decode_workspace_bytes, stream));
  }
  if (a_.cos_sin == nullptr) return ok_status();
  std::vector<float> table(static_cast<size_t>(config_.max_seq_len * D()));
  kernels::fill_rope_table(table.data(), config_.max_seq_len, D(), config_.rope_theta);
  KTG_RETURN_IF_ERROR(backend_.copy(a_.cos_sin, table.data(), static_cast<int64_t>(table.size()) * 4, stream));
  return stream.synchronize(Deadline::after(std::chrono::seconds(60)));
}

Status TransformerImpl::look(int64_t index, const void* x, int64_t n, DType dtype, Stream& stream) const {
  if (finite_flags_ == nullptr) return ok_status();
  return stream.launched(k_.reduce->non_finite(finite_flags_ + index, x, n, dtype, stream.handle()), "look for NaN");
}

Status TransformerImpl::check_batch(int64_t B, int64_t T) const {
  if (B >= 1 && T >= 1 && T <= options_.max_seq_len && B * T <= options_.max_tokens) return ok_status();
  return invalid_argument(
      fmt::format("batch of {} x {} tokens: the model was planned for {} tokens in sequences of at most {}", B, T,
                  options_.max_tokens, options_.max_seq_len));
}

Status TransformerImpl::use_positions(int64_t T, Stream& stream) {
  if (T == positions_T_) return ok_status();
  positions_T_ = 0;
  for (size_t n = 0; n < host_positions_.size(); ++n) {
    host_positions_[n] = static_cast<int32_t>(static_cast<int64_t>(n) % T);
  }
  KTG_RETURN_IF_ERROR(
      backend_.copy(a_.positions, host_positions_.data(), static_cast<int64_t>(host_positions_.size()) * 4, stream));
  positions_T_ = T;
  return ok_status();
}

Result<TransformerImpl::Pass> TransformerImpl::begin_pass(const MicroBatch& batch, bool for_backward, Stream& stream) {
  KTG_RETURN_IF_ERROR(check_batch(batch.B, batch.T));
  if (batch.document_starts == nullptr) {
    KTG_RETURN_IF_ERROR(use_positions(batch.T, stream));
  } else if (!options_.documents || batch.positions == nullptr) {
    return invalid_argument(
        "a batch of several documents a sequence: the model was planned for one, or positions lack");
  }
  const Pass pass{.ids = batch.inputs,
                  .positions = batch.document_starts == nullptr ? a_.positions : batch.positions,
                  .B = batch.B,
                  .T = batch.T,
                  .for_backward = for_backward,
                  .document_starts = batch.document_starts};
  if (batch.document_starts != nullptr && a_.document_mask != nullptr) {
    KTG_RETURN_IF_ERROR(
        stream.launched(k_.attention->write_document_mask(a_.document_mask, attention_shape_of(pass, pass.T),
                                                          options_.dtype, stream.handle()),
                        "document_mask"));
  }
  return pass;
}

Status TransformerImpl::forward_backward(const MicroBatch& batch, UnitAccess& access, LossSums* sums, Stream& stream) {
  KTG_CHECK(options_.training) << "forward_backward of a model planned for inference";
  KTG_ASSIGN_OR_RETURN(const Pass pass, begin_pass(batch, /*for_backward=*/true, stream));
  KTG_RETURN_IF_ERROR(run_blocks(pass, access, stream));

  UnitAccess::Gradients table{nullptr, false};  // unit 0's, asked for early by a tied head
  Status done = with_unit(head_unit(), access, stream, [&](const UnitWeights& w) -> Status {
    KTG_RETURN_IF_ERROR(final_norm(pass, w, stream));
    return head_backward(batch, w, access, sums, &table, stream);
  });
  KTG_RETURN_IF_ERROR(done);
  for (int64_t l = L() - 1; l >= 0; --l) {
    const int unit = static_cast<int>(l) + 1;
    done = with_unit(unit, access, stream, [&](const UnitWeights& w) -> Status {
      KTG_ASSIGN_OR_RETURN(const UnitAccess::Gradients g, access.gradients(unit, stream));
      return block_backward(pass, l, w, g, stream);
    });
    KTG_RETURN_IF_ERROR(done);
    KTG_RETURN_IF_ERROR(access.gradients_ready(unit, stream));
  }
  const bool table_written = table.data != nullptr;
  if (!table_written) {
    KTG_ASSIGN_OR_RETURN(table, access.gradients(0, stream));
  }
  KTG_RETURN_IF_ERROR(embedding_backward(pass, table, table_written, stream));
  return access.gradients_ready(0, stream);
}

Status TransformerImpl::forward_loss(const MicroBatch& batch, UnitAccess& access, LossSums* sums, Stream& stream) {
  KTG_ASSIGN_OR_RETURN(const Pass pass, begin_pass(batch, /*for_backward=*/false, stream));
  KTG_RETURN_IF_ERROR(run_blocks(pass, access, stream));
  const Status done = with_unit(head_unit(), access, stream, [&](const UnitWeights& w) -> Status {
    KTG_RETURN_IF_ERROR(final_norm(pass, w, stream));
    for (int64_t n = 0; n < pass.N(); n += a_.logits_rows) {
      const int64_t rows = std::min(a_.logits_rows, pass.N() - n);
      KTG_RETURN_IF_ERROR(logits_of(a_.logits, offset(a_.h, n * C()), rows, w, access, stream));
      KTG_RETURN_IF_ERROR(stream.launched(k_.cross_entropy->forward(a_.losses + n, a_.logits, batch.targets + n, rows,
                                                                    V(), options_.dtype, stream.handle()),
                                          "cross_entropy.forward"));
    }
    return ok_status();
  });
  KTG_RETURN_IF_ERROR(done);
  return sum_losses(batch, sums, stream);
}

Status TransformerImpl::forward_logits(void* logits, const int32_t* ids, const int32_t* positions, int64_t B, int64_t T,
                                       bool last_only, UnitAccess& access, KvSink* sink, Stream& stream) {
  KTG_RETURN_IF_ERROR(check_batch(B, T));
  const Pass pass{.ids = ids, .positions = positions, .B = B, .T = T, .for_backward = false, .sink = sink};
  KTG_RETURN_IF_ERROR(run_blocks(pass, access, stream));
  return with_unit(head_unit(), access, stream, [&](const UnitWeights& w) -> Status {
    KTG_RETURN_IF_ERROR(final_norm(pass, w, stream));
    if (!last_only) return logits_of(logits, a_.h, pass.N(), w, access, stream);
    const int64_t row_bytes = C() * kernels::size_of(options_.dtype);
    for (int64_t b = 0; b < B; ++b) {
      const void* last = offset(a_.h, ((b + 1) * T - 1) * C());
      KTG_RETURN_IF_ERROR(backend_.copy(offset(a_.branch, b * C()), last, row_bytes, stream));
    }
    return logits_of(logits, a_.branch, B, w, access, stream);
  });
}

Status TransformerImpl::decode(void* logits, const int32_t* ids, const int32_t* positions, int64_t S,
                               const PagedCacheView& cache, UnitAccess& access, Stream& stream) {
  KTG_RETURN_IF_ERROR(check_batch(S, 1));
  const Pass pass{.ids = ids, .positions = positions, .B = S, .T = 1, .for_backward = false, .cache = &cache};
  if (decodes_by_layer(S)) return decode_by_layer(logits, pass, access, stream);
  KTG_RETURN_IF_ERROR(run_blocks(pass, access, stream));
  return with_unit(head_unit(), access, stream, [&](const UnitWeights& w) -> Status {
    KTG_RETURN_IF_ERROR(final_norm(pass, w, stream));
    return logits_of(logits, a_.h, S, w, access, stream);
  });
}

Status TransformerImpl::sum_losses(const MicroBatch& batch, LossSums* sums, Stream& stream) {
  const int64_t N = batch.B * batch.T;
  KTG_RETURN_IF_ERROR(stream.launched(k_.reduce->sum(&sums->loss, a_.losses, N, stream.handle()), "loss.sum"));
  return stream.launched(k_.reduce->count_valid(&sums->num_tokens, batch.targets, N, stream.handle()), "loss.count");
}

}  // namespace kintsugi::runtime
