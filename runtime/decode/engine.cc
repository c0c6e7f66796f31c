#include "runtime/decode/engine.h"

#include <algorithm>

#include "runtime/base/log.h"

namespace kintsugi::runtime {
namespace {

int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

int64_t block_table_width(const EngineOptions& options) {
  return KvBlockPool::blocks_for(options.max_context, options.kv_block_tokens);
}

TransformerOptions transformer_options(const EngineOptions& options) {
  return {.dtype = options.dtype,
          .max_tokens = std::max(options.max_context, options.max_batch),
          .max_seq_len = options.max_context,
          .training = false,
          .max_decode = options.max_batch};
}

bool device_draws(const EngineOptions& options, const Backend& backend) {
  return options.draw == DrawTokens::kDevice || (options.draw == DrawTokens::kAuto && backend.asynchronous());
}

int64_t inputs_and_logits_bytes(const ModelConfig& model, const EngineOptions& options, const Backend& backend) {
  const int64_t logits = options.max_batch * model.vocab_size;
  if (device_draws(options, backend)) {
    return DeviceDecode::planned_bytes(options.max_batch, block_table_width(options)) +
           PrefillSink::planned_bytes(options.max_context) + aligned(logits * kernels::size_of(options.dtype));
  }
  return DecodeBatch::planned_bytes(options.max_batch, block_table_width(options)) +
         PrefillSink::planned_bytes(options.max_context) + aligned(logits * kernels::size_of(options.dtype)) +
         (options.dtype == DType::kF32 ? 0 : aligned(logits * 4));
}

// Fills in what 0 stands for; kInvalidArgument for what cannot be.
Result<EngineOptions> resolve(const ModelConfig& model, EngineOptions options) {
  constexpr int64_t kMaxBatch = 65536;
  if (options.max_batch < 1 || options.max_batch > kMaxBatch) {
    return invalid_argument("max_batch = " + std::to_string(options.max_batch) + ": must be from 1 to " +
                            std::to_string(kMaxBatch));
  }
  if (options.max_context == 0) options.max_context = model.max_seq_len;
  if (options.max_context < 1 || options.max_context > model.max_seq_len) {
    return invalid_argument("max_context = " + std::to_string(options.max_context) + ": must be from 1 to " +
                            std::to_string(model.max_seq_len) + ", the model's max_seq_len");
  }
  if (options.kv_block_tokens < 1) {
    return invalid_argument("kv_block = " + std::to_string(options.kv_block_tokens) + ": must be at least 1 token");
  }
  if (options.num_kv_blocks == 0) options.num_kv_blocks = options.max_batch * block_table_width(options);
  return options;
}

}  // namespace

const char* to_string(FinishReason reason) {
  switch (reason) {
    case FinishReason::kEndId:
      return "end";
    case FinishReason::kMaxTokens:
      return "length";
    case FinishReason::kContext:
      return "context";
  }
  return "unknown";
}

Result<EngineMemoryPlan> Engine::plan(const ModelConfig& model, const EngineOptions& requested,
                                      const Backend& backend) {
  KTG_ASSIGN_OR_RETURN(const EngineOptions options, resolve(model, requested));
  EngineMemoryPlan plan;
  plan.num_kv_blocks = options.num_kv_blocks;
  KTG_ASSIGN_OR_RETURN(
      plan.kv_cache,
      KvCacheShape::of(model, options.kv_block_tokens, options.num_kv_blocks, options.dtype).planned_bytes());
  plan.activations = Transformer::activation_bytes(model, transformer_options(options), backend.kernels());
  plan.inputs_and_logits = inputs_and_logits_bytes(model, options, backend);
  return plan;
}

Result<std::unique_ptr<Engine>> Engine::create(const ModelConfig& model, const EngineOptions& requested,
                                               Backend& backend, UnitAccess& access) {
  KTG_ASSIGN_OR_RETURN(const EngineMemoryPlan memory, plan(model, requested, backend));
  KTG_ASSIGN_OR_RETURN(const EngineOptions options, resolve(model, requested));
  std::unique_ptr<Engine> engine(new Engine(model, options, backend, access));
  KTG_RETURN_IF_ERROR(engine->allocate(memory));
  return engine;
}

Status Engine::allocate(const EngineMemoryPlan& memory) {
  KTG_ASSIGN_OR_RETURN(stream_, backend_.create_stream());
  KTG_ASSIGN_OR_RETURN(cache_, KvCache::create(KvCacheShape::of(model_config_, options_.kv_block_tokens,
                                                                options_.num_kv_blocks, options_.dtype),
                                               options_.poison_unused, backend_, *stream_));
  KTG_ASSIGN_OR_RETURN(Buffer buffer, backend_.allocate(memory.activations + memory.inputs_and_logits, "inference"));
  arena_ = std::make_unique<Arena>(std::move(buffer));
  KTG_ASSIGN_OR_RETURN(model_,
                       Transformer::create(model_config_, transformer_options(options_), backend_, *arena_, *stream_));
  sink_ = std::make_unique<PrefillSink>(*cache_, options_.max_context, *arena_, backend_);
  const int64_t num_logits = options_.max_batch * model_config_.vocab_size;
  logits_ = arena_->take(num_logits * kernels::size_of(options_.dtype));
  if (device_draws(options_, backend_)) {
    KTG_ASSIGN_OR_RETURN(device_, DeviceDecode::create(*cache_, *model_, access_, model_config_, logits_,
                                                       {.max_batch = options_.max_batch,
                                                        .block_table_width = block_table_width(options_),
                                                        .dtype = options_.dtype,
                                                        .use_graphs = options_.use_graphs},
                                                       *arena_, backend_, *stream_));
    return stream_->synchronize(Deadline::never());  // only queued kernels, which end
  }
  batch_ = std::make_unique<DecodeBatch>(*cache_, options_.max_batch, block_table_width(options_), *arena_);
  logits_f32_ =
      options_.dtype == DType::kF32 ? static_cast<float*>(logits_) : static_cast<float*>(arena_->take(num_logits * 4));
  host_logits_.resize(static_cast<size_t>(num_logits));
  return stream_->synchronize(Deadline::never());  // only queued kernels, which end
}

Engine::~Engine() {
  // Steps in flight use what goes now. A device that does not end them is lost, and so is its memory.
  if (device_ != nullptr) {
    const Status status = stream_->synchronize(Deadline::after(std::chrono::seconds(60)));
    if (!status.ok()) log().warn("decode steps in flight: {}", status.to_string());
  }
  while (!sequences_.empty()) {
    const int64_t id = sequences_.begin()->first;
    if (const Status status = end(id); !status.ok()) log().warn("sequence {}: {}", id, status.to_string());
  }
}

Result<int64_t> Engine::add(Request request) {
  const int64_t num_prompt = static_cast<int64_t>(request.prompt.size());
  const int64_t vocab = model_config_.vocab_size;
  if (num_prompt == 0) return invalid_argument("the prompt is empty: the model needs at least one token to go on from");
  if (num_prompt > options_.max_context) {
    return invalid_argument("the prompt has " + std::to_string(num_prompt) + " tokens, the context holds " +
                            std::to_string(options_.max_context));
  }
  const auto outside = [vocab](int32_t id) { return id < 0 || id >= vocab; };
  if (const auto bad = std::find_if(request.prompt.begin(), request.prompt.end(), outside);
      bad != request.prompt.end()) {
    return invalid_argument("token " + std::to_string(bad - request.prompt.begin()) + " of the prompt is id " +
                            std::to_string(*bad) + ": the vocabulary has ids 0 to " + std::to_string(vocab - 1));
  }
  if (request.max_new_tokens < 1) {
    return invalid_argument("max_tokens = " + std::to_string(request.max_new_tokens) + ": must be at least 1");
  }
  KTG_RETURN_IF_ERROR(request.sampling.validate());
  // The last new token is never fed back, so it needs no slot.
  const int64_t room = options_.max_context - num_prompt;
  const int64_t num_slots = num_prompt + std::min(request.max_new_tokens - 1, room);
  const int64_t needed = KvBlockPool::blocks_for(num_slots, options_.kv_block_tokens);
  if (needed > options_.num_kv_blocks) {
    return resource_exhausted("the sequence needs " + std::to_string(needed) + " kv_blocks of " +
                              std::to_string(options_.kv_block_tokens) + " tokens for " + std::to_string(num_slots) +
                              " tokens, the pool has " + std::to_string(options_.num_kv_blocks));
  }
  Sequence& sequence = sequences_[next_id_];
  sequence.tokens = request.prompt;
  sequence.request = std::move(request);
  return next_id_++;
}

Decision Engine::next_decision() const {
  std::vector<SequenceView> waiting, running;
  for (const auto& [id, sequence] : sequences_) {
    (sequence.running ? running : waiting)
        .push_back({id, sequence.num_tokens(), sequence.num_cached, sequence.table.size()});
  }
  return decide(waiting, running, cache_->pool().num_free(), {options_.max_batch, options_.kv_block_tokens});
}

Status Engine::step() {
  if (device_ != nullptr && device_->in_flight() > 0) {
    const int64_t begin_ns = monotonic_ns();
    const Status status = advance_device();
    stats_.decode_ns += monotonic_ns() - begin_ns;
    return status;
  }
  const Decision decision = next_decision();
  for (const int64_t id : decision.preempt) KTG_RETURN_IF_ERROR(preempt(id));
  const int64_t begin_ns = monotonic_ns();
  switch (decision.action) {
    case Decision::Action::kIdle:
      return ok_status();
    case Decision::Action::kPrefill:
      KTG_RETURN_IF_ERROR(prefill(decision.run[0]));
      stats_.prefill_ns += monotonic_ns() - begin_ns;
      return ok_status();
    case Decision::Action::kDecode:
      KTG_RETURN_IF_ERROR(device_ != nullptr ? decode_on_device(decision.run) : decode(decision.run));
      stats_.decode_ns += monotonic_ns() - begin_ns;
      return ok_status();
    case Decision::Action::kBlocked:
      break;  // add() refuses what cannot fit alone
  }
  KTG_CHECK(false) << decision.reason;
  return ok_status();
}

Status Engine::run() {
  while (!idle()) KTG_RETURN_IF_ERROR(step());
  return ok_status();
}

Status Engine::cancel(int64_t sequence) { return sequences_.contains(sequence) ? end(sequence) : ok_status(); }

Status Engine::prefill(int64_t id) {
  Sequence& sequence = sequences_.at(id);
  // All tokens known so far: after a preemption these are more than the prompt, and decoding over them comes next.
  KTG_CHECK(cache_->grow(sequence.table, sequence.num_tokens())) << "sequence " << id;
  sequence.running = true;
  const int64_t T = sequence.num_prompt();
  KTG_RETURN_IF_ERROR(sink_->begin(sequence.request.prompt, T, sequence.table, *stream_));
  KTG_RETURN_IF_ERROR(
      model_->forward_logits(logits_, sink_->ids(), sink_->positions(), 1, T, true, access_, sink_.get(), *stream_));
  sequence.num_cached = T;
  stats_.prefill_tokens += T;
  if (sequence.num_cached < sequence.num_tokens()) return stream_->synchronize(Deadline::never());
  if (device_ != nullptr) {
    KTG_ASSIGN_OR_RETURN(const int32_t drawn, device_->draw(sequence.request.sampling, T - 1));
    return take_drawn(id, drawn);
  }
  KTG_RETURN_IF_ERROR(fetch_logits(1));
  return append_token(id, 0);
}

Status Engine::decode(const std::vector<int64_t>& ids) {
  batch_->clear();
  for (const int64_t id : ids) {
    Sequence& sequence = sequences_.at(id);
    KTG_CHECK(cache_->grow(sequence.table, sequence.num_cached + 1)) << "sequence " << id;
    batch_->add(sequence.tokens[sequence.num_cached], sequence.num_cached, sequence.table);
  }
  KTG_RETURN_IF_ERROR(batch_->upload(backend_, *stream_));
  KTG_RETURN_IF_ERROR(
      model_->decode(logits_, batch_->ids(), batch_->positions(), batch_->size(), *batch_, access_, *stream_));
  KTG_RETURN_IF_ERROR(fetch_logits(batch_->size()));
  stats_.decode_tokens += batch_->size();
  stats_.decode_steps += 1;
  Status first_error;
  for (size_t row = 0; row < ids.size(); ++row) {
    Sequence& sequence = sequences_.at(ids[row]);
    ++sequence.num_cached;
    if (sequence.num_cached < sequence.num_tokens()) continue;  // a token made before the preemption
    const Status status = append_token(ids[row], static_cast<int64_t>(row));
    if (!status.ok() && first_error.ok()) first_error = status;
  }
  return first_error;
}

Status Engine::preempt(int64_t id) {
  Sequence& sequence = sequences_.at(id);
  KTG_RETURN_IF_ERROR(cache_->release(sequence.table, *stream_));
  sequence.running = false;
  sequence.num_cached = 0;
  ++stats_.preemptions;
  return ok_status();
}

Status Engine::fetch_logits(int64_t rows) {
  const int64_t count = rows * model_config_.vocab_size;
  if (options_.dtype != DType::kF32) {
    KTG_RETURN_IF_ERROR(stream_->launched(
        backend_.kernels().reduce->convert_to_f32(logits_f32_, logits_, count, options_.dtype, stream_->handle()),
        "logits to fp32"));
  }
  KTG_RETURN_IF_ERROR(backend_.copy(host_logits_.data(), logits_f32_, count * 4, *stream_));
  return stream_->synchronize(Deadline::never());  // only queued kernels, which end
}

Status Engine::append_token(int64_t id, int64_t row) {
  Sequence& sequence = sequences_.at(id);
  const std::span<const float> logits(host_logits_.data() + row * model_config_.vocab_size,
                                      static_cast<size_t>(model_config_.vocab_size));
  const int64_t position = sequence.num_tokens();
  Result<int32_t> token = sampler_.sample(logits, sequence.request.sampling, position);
  return token.ok() ? take_token(id, *token, logits) : fail(id, token.status());
}

Status Engine::fail(int64_t id, const Status& why) {
  const int64_t position = sequences_.at(id).num_tokens();
  KTG_RETURN_IF_ERROR(end(id));
  return why.with_context("sequence " + std::to_string(id) + ", position " + std::to_string(position));
}

Status Engine::take_token(int64_t id, int32_t token, std::span<const float> logits) {
  Sequence& sequence = sequences_.at(id);
  const Request& request = sequence.request;
  TokenEvent event{id, sequence.num_tokens() - sequence.num_prompt(), token, logits, std::nullopt};
  sequence.tokens.push_back(token);
  if (std::find(request.end_ids.begin(), request.end_ids.end(), token) != request.end_ids.end()) {
    event.finish = FinishReason::kEndId;
  } else if (event.index + 1 >= request.max_new_tokens) {
    event.finish = FinishReason::kMaxTokens;
  } else if (sequence.num_tokens() > options_.max_context) {
    event.finish = FinishReason::kContext;
  }
  const bool wanted = !request.on_token || request.on_token(event);
  return event.finish.has_value() || !wanted ? end(id) : ok_status();
}

Status Engine::decode_on_device(const std::vector<int64_t>& ids) {
  KTG_RETURN_IF_ERROR(device_->clear());
  for (const int64_t id : ids) {
    Sequence& sequence = sequences_.at(id);
    KTG_CHECK(cache_->grow(sequence.table, sequence.num_cached + 1)) << "sequence " << id;
    device_->add(sequence.tokens[sequence.num_cached], sequence.num_cached, sequence.table, sequence.request.sampling);
  }
  on_device_ = ids;
  KTG_RETURN_IF_ERROR(device_->launch());
  return advance_device();
}

Status Engine::advance_device() {
  if (device_->in_flight() < DeviceDecode::kMostInFlight && next_step_is_certain()) {
    for (size_t row = 0; row < on_device_.size(); ++row) {
      Sequence& sequence = sequences_.at(on_device_[row]);
      const int64_t blocks = sequence.table.size();
      KTG_CHECK(cache_->grow(sequence.table, sequence.num_cached + 2)) << "sequence " << on_device_[row];
      if (sequence.table.size() != blocks) {
        KTG_RETURN_IF_ERROR(device_->update_table(static_cast<int64_t>(row), sequence.table));
      }
    }
    KTG_RETURN_IF_ERROR(device_->launch());
  }
  KTG_ASSIGN_OR_RETURN(const std::span<const int32_t> drawn, device_->collect());
  Status first_error;
  int64_t taken = 0;
  for (size_t row = 0; row < on_device_.size(); ++row) {
    const auto found = sequences_.find(on_device_[row]);
    if (found == sequences_.end()) continue;  // it ended while this step was in flight
    ++taken;
    Sequence& sequence = found->second;
    ++sequence.num_cached;
    if (sequence.num_cached < sequence.num_tokens()) continue;  // a token made before the preemption
    const Status status = take_drawn(on_device_[row], drawn[row]);
    if (!status.ok() && first_error.ok()) first_error = status;
  }
  stats_.decode_tokens += taken;
  stats_.decode_steps += taken > 0 ? 1 : 0;
  return first_error;
}

// The tokens in flight are not known yet. The step after them is, when they cannot end a sequence but by being an end
// id, and the scheduler would go on with the same batch.
bool Engine::next_step_is_certain() const {
  std::vector<SequenceView> waiting, running;
  for (const int64_t id : on_device_) {
    const auto found = sequences_.find(id);
    if (found == sequences_.end()) return false;
    const Sequence& sequence = found->second;
    const int64_t made = sequence.num_tokens() + 1 - sequence.num_prompt();
    if (sequence.num_cached + 1 != sequence.num_tokens() || made >= sequence.request.max_new_tokens ||
        sequence.num_tokens() + 1 > options_.max_context) {
      return false;
    }
  }
  for (const auto& [id, sequence] : sequences_) {
    const int64_t ahead = sequence.running ? 1 : 0;
    (sequence.running ? running : waiting)
        .push_back({id, sequence.num_tokens() + ahead, sequence.num_cached + ahead, sequence.table.size()});
  }
  const Decision next =
      decide(waiting, running, cache_->pool().num_free(), {options_.max_batch, options_.kv_block_tokens});
  return next.action == Decision::Action::kDecode && next.preempt.empty() && next.run == on_device_;
}

Status Engine::take_drawn(int64_t id, int32_t drawn) {
  if (drawn >= 0) return take_token(id, drawn, {});
  return fail(id, failed_precondition("the model's logit of token " + std::to_string(-1 - drawn) +
                                      " is not finite: the weights or the computation are broken"));
}

Status Engine::end(int64_t id) {
  Sequence& sequence = sequences_.at(id);
  const Status status = cache_->release(sequence.table, *stream_);
  sequences_.erase(id);
  return status;
}

}  // namespace kintsugi::runtime
