#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <random>
#include <string_view>

#include "launch/infer_commands.h"
#include "launch/infer_memory.h"
#include "launch/infer_model.h"
#include "launch/infer_output.h"
#include "launch/infer_prompts.h"
#include "runtime/decode/engine.h"
#include "runtime/decode/utf8_stream.h"

namespace kintsugi::launch {
namespace {

using runtime::Engine;

// One continuation and what has been made of it.
struct Continuation {
  const Prompt* prompt;
  uint32_t sample;  // of this prompt: the random numbers' stream
  std::vector<int32_t> ids = {};
  std::string text = {};
  runtime::Utf8Stream characters = {};
  const char* finish = "stopped";
};

std::string header(size_t index, size_t count, const Continuation& continuation) {
  constexpr size_t kShown = 60;
  std::string line = continuation.prompt->text.substr(0, kShown);
  std::replace_if(
      line.begin(), line.end(), [](unsigned char c) { return c < ' '; }, ' ');
  runtime::Utf8Stream characters;
  line = characters.push(line) + (continuation.prompt->text.size() > kShown ? "..." : "");
  return fmt::format("{}[{}/{}] {}\n", index == 0 ? "" : "\n", index + 1, count, line);
}

std::string json_line(const Continuation& continuation, const GenerateOptions& options, uint64_t seed) {
  nlohmann::ordered_json line;
  line["prompt"] = continuation.prompt->text;
  line["sample"] = continuation.sample;
  if (!options.ids) line["text"] = continuation.text;
  line["ids"] = continuation.ids;
  line["finish"] = continuation.finish;
  if (options.temperature > 0) line["seed"] = seed;
  return line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

uint64_t draw_seed() {
  std::random_device device;
  return (static_cast<uint64_t>(device()) << 32) | device();
}

std::string rate(int64_t tokens, int64_t ns) {
  return grouped(ns > 0 ? static_cast<int64_t>(static_cast<double>(tokens) * 1e9 / static_cast<double>(ns)) : 0);
}

// One call of `infer generate`. Each phase reports its own error and returns an exit code.
class Generation {
 public:
  explicit Generation(const GenerateOptions& options)
      : options_(options),
        sampling_{.temperature = options.temperature, .top_k = options.top_k, .top_p = options.top_p} {}

  int read_options();
  int load();
  int allocate();
  int run();

 private:
  int64_t longest_prompt() const;
  runtime::EngineOptions engine_options() const;
  OrderedOutput create_output() const;
  runtime::Request request(size_t index, OrderedOutput& output);
  std::string visible(Continuation& continuation, const runtime::TokenEvent& event) const;
  void print_summary() const;

  const GenerateOptions& options_;
  runtime::SamplingParams sampling_;
  std::vector<Prompt> prompts_;
  std::unique_ptr<InferenceModel> model_;
  std::vector<int32_t> end_ids_;
  std::vector<Continuation> continuations_;
  std::unique_ptr<Engine> engine_;
};

int Generation::read_options() {
  if (const Status status = sampling_.validate(); !status.ok()) return report_error(status, kExitUsage);
  Result<std::vector<Prompt>> prompts = read_prompts(FileSystem::posix(), options_);
  if (!prompts.ok()) return report_error(prompts.status(), kExitUsage);
  prompts_ = std::move(prompts).value();
  return kExitOk;
}

int Generation::load() {
  std::vector<std::string> notes;
  const CheckpointOptions& from = options_.checkpoint;
  auto model = load_model(FileSystem::posix(), {from.path, from.dtype, from.num_threads, from.device}, &notes);
  print_notes(notes);
  if (!model.ok()) return report_error(model.status(), kExitBadConfig);
  model_ = std::move(model).value();
  std::fprintf(stderr, "%s\n", model_->description().c_str());
  return kExitOk;
}

int Generation::allocate() {
  if (const Status status = encode_prompts(prompts_, options_.ids, model_->tokenizer.get()); !status.ok()) {
    return report_error(status, kExitUsage);
  }
  auto ends = find_end_ids(options_.end_ids, model_->tokenizer.get(), model_->config().vocab_size);
  if (!ends.ok()) return report_error(ends.status(), kExitUsage);
  end_ids_ = std::move(ends).value();
  for (const Prompt& prompt : prompts_) {
    for (int64_t sample = 0; sample < options_.samples; ++sample) {
      continuations_.push_back({.prompt = &prompt, .sample = static_cast<uint32_t>(sample)});
    }
  }
  const auto plan = Engine::plan(model_->config(), engine_options(), *model_->backend);
  if (!plan.ok()) return report_error(plan.status(), kExitUsage);
  std::fprintf(stderr, "memory: weights %s, kv cache %s (%s kv_blocks of %s tokens), activations %s\n",
               bytes_text(model_->weights.size_bytes()).c_str(), bytes_text(plan->kv_cache).c_str(),
               grouped(plan->num_kv_blocks).c_str(), grouped(options_.kv_block_tokens).c_str(),
               bytes_text(plan->activations + plan->inputs_and_logits).c_str());
  auto engine = Engine::create(model_->config(), engine_options(), *model_->backend, *model_->weights.access);
  if (engine.status().code() == StatusCode::kResourceExhausted) {
    const std::string would_fit = smaller_generation(
        model_->config(), {engine_options(), longest_prompt(), options_.max_tokens}, *model_->backend);
    return report_error(resource_exhausted(engine.status().message() + "; " + would_fit), kExitUsage);
  }
  if (!engine.ok()) return report_error(engine.status(), kExitUsage);
  engine_ = std::move(engine).value();
  return kExitOk;
}

int64_t Generation::longest_prompt() const {
  int64_t longest = 1;
  for (const Prompt& prompt : prompts_) longest = std::max(longest, static_cast<int64_t>(prompt.ids.size()));
  return longest;
}

// Blocks and positions that the continuations need, and no more.
runtime::EngineOptions Generation::engine_options() const {
  const int64_t max_seq_len = model_->config().max_seq_len;
  const int64_t longest = longest_prompt() + options_.max_tokens - 1;
  runtime::EngineOptions engine;
  engine.dtype = model_->dtype;
  engine.max_batch = std::min<int64_t>(options_.max_batch, static_cast<int64_t>(continuations_.size()));
  engine.max_context = std::min(longest, max_seq_len);
  engine.kv_block_tokens = options_.kv_block_tokens;
  engine.num_kv_blocks = options_.num_kv_blocks;
  return engine;
}

int Generation::run() {
  sampling_.seed = options_.seed.has_value() ? *options_.seed : draw_seed();
  if (sampling_.temperature > 0) {
    std::fprintf(stderr, "seed %llu%s\n", static_cast<unsigned long long>(sampling_.seed),
                 options_.seed.has_value() ? "" : " (drawn; --seed repeats this text)");
  }
  OrderedOutput output = create_output();
  for (size_t i = 0; i < continuations_.size(); ++i) {
    if (const Result<int64_t> id = engine_->add(request(i, output)); !id.ok()) {
      return report_error(id.status(), kExitUsage);
    }
  }
  const Status status = engine_->run();
  const int written = finish_stdout(output.write_errno());
  if (!status.ok()) return report_error(status, kExitFailure);
  if (written == kExitOk) print_summary();
  return written;
}

OrderedOutput Generation::create_output() const {
  std::vector<std::string> headers(continuations_.size());
  for (size_t i = 0; i < headers.size() && !options_.json; ++i) {
    if (headers.size() > 1) headers[i] = header(i, headers.size(), continuations_[i]);
    if (options_.echo) headers[i] += continuations_[i].prompt->text + (options_.ids ? " " : "");
  }
  return OrderedOutput(stdout, std::move(headers), options_.stream && !options_.json);
}

runtime::Request Generation::request(size_t index, OrderedOutput& output) {
  const Continuation& continuation = continuations_[index];
  runtime::Request request{.prompt = continuation.prompt->ids,
                           .max_new_tokens = options_.max_tokens,
                           .sampling = sampling_,
                           .end_ids = end_ids_,
                           .on_token = {}};
  request.sampling.stream = continuation.sample;
  request.on_token = [this, index, &output](const runtime::TokenEvent& event) {
    Continuation& self = continuations_[index];
    self.ids.push_back(event.id);
    const std::string piece = visible(self, event);
    self.text += piece;
    if (event.finish.has_value()) self.finish = runtime::to_string(*event.finish);
    if (!options_.json) {
      output.piece(index, piece);
    } else if (event.finish.has_value()) {
      output.piece(index, json_line(self, options_, sampling_.seed));
    }
    if (event.finish.has_value()) output.end(index);
    return output.write_errno() == 0;  // nobody reads on: stop making text
  };
  return request;
}

// A token's visible form: its characters, or its number with --ids.
std::string Generation::visible(Continuation& continuation, const runtime::TokenEvent& event) const {
  if (options_.ids) return fmt::format("{}{}", event.index == 0 ? "" : " ", event.id);
  std::string out;
  if (event.finish != runtime::FinishReason::kEndId) {
    const Result<std::string> bytes = model_->tokenizer->decode({event.id});
    // A model may have more ids than its tokenizer (a padded vocabulary): such an id is one unknown character.
    out = bytes.ok() ? continuation.characters.push(*bytes) : continuation.characters.finish() + "\xEF\xBF\xBD";
  }
  if (event.finish.has_value()) out += continuation.characters.finish();
  return out;
}

void Generation::print_summary() const {
  const int64_t cut = std::count_if(continuations_.begin(), continuations_.end(),
                                    [](const Continuation& c) { return c.finish == std::string_view("context"); });
  if (cut > 0) {
    std::fprintf(stderr, "%s of %zu texts ended at the model's context of %s tokens\n", grouped(cut).c_str(),
                 continuations_.size(), grouped(model_->config().max_seq_len).c_str());
  }
  const runtime::EngineStats& stats = engine_->stats();
  const runtime::KvBlockPool& blocks = engine_->kv_blocks();
  std::string line =
      fmt::format("prefill {} tokens in {:.1f} ms ({} tok/s), decode {} tokens in {:.1f} ms ({} tok/s)",
                  grouped(stats.prefill_tokens), stats.prefill_ns * 1e-6, rate(stats.prefill_tokens, stats.prefill_ns),
                  grouped(stats.decode_tokens), stats.decode_ns * 1e-6, rate(stats.decode_tokens, stats.decode_ns));
  line += fmt::format("; kv_blocks: {} used at most, {} of {} free at the end", blocks.peak_used(), blocks.num_free(),
                      blocks.num_blocks());
  if (stats.preemptions > 0) line += fmt::format("; {} preemptions", stats.preemptions);
  std::fprintf(stderr, "%s\n", line.c_str());
}

}  // namespace

int run_generate(const GenerateOptions& options) {
  Generation generation(options);
  if (const int code = generation.read_options(); code != kExitOk) return code;
  if (const int code = generation.load(); code != kExitOk) return code;
  if (const int code = generation.allocate(); code != kExitOk) return code;
  return generation.run();
}

}  // namespace kintsugi::launch
