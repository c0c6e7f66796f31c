// Generates tokens for a batch of sequences on one device: prefill, decode over the paged KV cache, sampling.
// The scheduler (scheduler.h) decides before each step what runs, so sequences join and leave at any time.
//
// What depends on what. A sequence's logits, and so its tokens, have the same bits alone and in any batch, at any
// kv_block size, with any number of threads, and after a preemption: matrix products work row by row, attention
// sequence by sequence, and sampling by (seed, stream, position). Prefill has the bits of the training
// forward pass; decode sums attention in another order, so against a full forward pass it is equal up to rounding.
//
// Where a device runs ahead of the host, tokens are drawn on it and each decode step feeds the next (device_decode.h):
// the next step is queued before the host has read the tokens of the last. A sequence that turns out to have ended in
// the meantime leaves the batch then, and what the step in between made of it is dropped.
// On a GPU the statements above about bits hold for batches of up to 16 sequences; prefill has the bits of a training
// forward pass of the same shape.
//
// One thread at a time. All memory is allocated in create().
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "runtime/backend.h"
#include "runtime/decode/decode_batch.h"
#include "runtime/decode/device_decode.h"
#include "runtime/decode/kv_cache.h"
#include "runtime/decode/sampler.h"
#include "runtime/decode/scheduler.h"
#include "runtime/model/transformer.h"

namespace kintsugi::runtime {

enum class DrawTokens {
  kAuto,    // kDevice on a backend that runs ahead of the host, kHost elsewhere
  kHost,    // logits come to the host, which draws: TokenEvent has them
  kDevice,  // on the stream, by the same rules
};

struct EngineOptions {
  DType dtype = DType::kF32;
  int64_t max_batch = 1;         // sequences that run at once
  int64_t max_context = 0;       // positions of the longest sequence; 0: the model's max_seq_len
  int64_t kv_block_tokens = 16;  // P
  int64_t num_kv_blocks = 0;     // 0: as many as max_batch sequences of max_context can use
  bool poison_unused = kPoisonKvByDefault;
  DrawTokens draw = DrawTokens::kAuto;
  bool use_graphs = true;  // decode steps as recorded graphs, where the backend records and draws
};

// Bytes that an Engine allocates, beside the weights.
struct EngineMemoryPlan {
  int64_t kv_cache = 0;
  int64_t num_kv_blocks = 0;
  int64_t activations = 0;
  int64_t inputs_and_logits = 0;
  int64_t total() const { return kv_cache + activations + inputs_and_logits; }
};

enum class FinishReason {
  kEndId,      // the last token is one of Request::end_ids
  kMaxTokens,  // Request::max_new_tokens were made
  kContext,    // the last token stands where the model has no position
};
const char* to_string(FinishReason reason);  // "end", "length", "context"

// One new token. Valid during the callback.
struct TokenEvent {
  int64_t sequence;  // as add() returned
  int64_t index;     // among the sequence's new tokens, from 0
  int32_t id;
  std::span<const float> logits;  // (V) that it was drawn from; empty where the device draws
  std::optional<FinishReason> finish;
};

struct Request {
  std::vector<int32_t> prompt;
  int64_t max_new_tokens = 1;
  SamplingParams sampling;
  std::vector<int32_t> end_ids;
  // Called once for each new token in order. Returns false to end the sequence with this token.
  std::function<bool(const TokenEvent&)> on_token;
};

struct EngineStats {
  int64_t prefill_tokens = 0, prefill_ns = 0;  // prompts, again after a preemption
  int64_t decode_tokens = 0, decode_ns = 0;    // tokens decoded, again after a preemption; sampling included
  int64_t decode_steps = 0;
  int64_t preemptions = 0;
};

class Engine {
 public:
  // kInvalidArgument naming the option that is out of range.
  static Result<EngineMemoryPlan> plan(const ModelConfig& model, const EngineOptions& options, const Backend& backend);
  // `backend` and `access` (the weights) outlive the engine. kInvalidArgument, kResourceExhausted.
  static Result<std::unique_ptr<Engine>> create(const ModelConfig& model, const EngineOptions& options,
                                                Backend& backend, UnitAccess& access);
  // Gives back the blocks of sequences still in flight.
  ~Engine();

  // Queues a sequence; returns its id. kInvalidArgument: an empty prompt, one longer than the context, an id
  // outside the vocabulary, sampling parameters out of range. kResourceExhausted: even alone it needs more
  // kv_blocks than there are; a sequence of prompt p and n new tokens needs blocks for p + n - 1 tokens.
  Result<int64_t> add(Request request);
  // One decision of the scheduler: prefills a sequence or decodes one token of each running one. On an error the
  // sequence it concerns has ended, named in the message.
  Status step();
  // Steps until every sequence has ended, or the first error.
  Status run();
  // Ends a sequence without a further event. Unknown ids are ignored.
  Status cancel(int64_t sequence);

  bool idle() const { return sequences_.empty(); }
  const KvBlockPool& kv_blocks() const { return cache_->pool(); }
  const EngineStats& stats() const { return stats_; }

 private:
  struct Sequence {
    Request request;
    std::vector<int32_t> tokens;  // the prompt's and the new ones
    int64_t num_cached = 0;       // of these, in the cache
    bool running = false;
    BlockTable table;
    int64_t num_prompt() const { return static_cast<int64_t>(request.prompt.size()); }
    int64_t num_tokens() const { return static_cast<int64_t>(tokens.size()); }
  };

  Engine(const ModelConfig& model, const EngineOptions& options, Backend& backend, UnitAccess& access)
      : model_config_(model), options_(options), backend_(backend), access_(access) {}
  Status allocate(const EngineMemoryPlan& plan);
  Decision next_decision() const;
  Status prefill(int64_t id);
  Status decode(const std::vector<int64_t>& ids);
  Status preempt(int64_t id);
  // Brings `rows` rows of logits to host_logits_.
  Status fetch_logits(int64_t rows);
  // Draws the sequence's next token from host_logits_ row `row`, and takes it.
  Status append_token(int64_t id, int64_t row);
  // `token` is the sequence's next: tells the caller, ends the sequence if it is over.
  Status take_token(int64_t id, int32_t token, std::span<const float> logits);
  // The sequence has ended because of `why`; the error names it.
  Status fail(int64_t id, const Status& why);

  // Where the device draws.
  Status decode_on_device(const std::vector<int64_t>& ids);
  // Queues the step after those in flight if it is certain to come, then takes the oldest one's tokens.
  Status advance_device();
  bool next_step_is_certain() const;
  // A token that the device drew, or what its negative number means.
  Status take_drawn(int64_t id, int32_t drawn);
  Status end(int64_t id);

  const ModelConfig model_config_;
  const EngineOptions options_;  // max_context and num_kv_blocks resolved
  Backend& backend_;
  UnitAccess& access_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<Transformer> model_;
  std::unique_ptr<KvCache> cache_;
  std::unique_ptr<DecodeBatch> batch_;
  std::unique_ptr<PrefillSink> sink_;
  std::unique_ptr<DeviceDecode> device_;  // null: the host draws
  std::vector<int64_t> on_device_;        // by row: the batch whose steps are in flight
  void* logits_ = nullptr;                // (max_batch, V) of the compute dtype
  float* logits_f32_ = nullptr;           // the same in fp32; logits_ itself when that is the dtype
  std::vector<float> host_logits_;        // (max_batch, V); empty where the device draws
  Sampler sampler_;
  std::map<int64_t, Sequence> sequences_;  // by id: in order of arrival
  int64_t next_id_ = 0;
  EngineStats stats_;
};

}  // namespace kintsugi::runtime
