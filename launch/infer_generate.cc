#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <random>

#include "launch/infer_commands.h"
#include "launch/infer_model.h"
#include "launch/infer_output.h"
#include "runtime/decode/engine.h"
#include "runtime/decode/utf8_stream.h"

namespace kintsugi::launch {
namespace {

using runtime::Engine;
using runtime::Tokenizer;

struct Prompt {
  std::string text;  // as given
  std::vector<int32_t> ids;
};

// One continuation and what has been made of it.
struct Continuation {
  const Prompt* prompt;
  uint32_t sample;  // of this prompt: the random numbers' stream
  std::vector<int32_t> ids;
  std::string text;
  runtime::Utf8Stream characters;
  const char* finish = "stopped";
};

Result<std::vector<int32_t>> parse_ids(const std::string& text) {
  std::vector<int32_t> ids;
  const char* p = text.data();
  const char* const end = p + text.size();
  while (true) {
    while (p < end && (std::isspace(static_cast<unsigned char>(*p)) || *p == ',')) ++p;
    if (p == end) return ids;
    int32_t id = 0;
    const auto [next, error] = std::from_chars(p, end, id);
    if (error != std::errc()) {
      return invalid_argument(
          fmt::format("--ids: '{}' at character {} of the prompt is not a token id",
                      std::string(p, std::find_if(p, end, [](unsigned char c) { return std::isspace(c) || c == ','; })),
                      p - text.data()));
    }
    ids.push_back(id);
    p = next;
  }
}

Result<std::string> read_prompt_file(FileSystem& fs, const std::string& path) {
  if (path != "-") return fs.read_file(path);
  return std::string(std::istreambuf_iterator<char>(std::cin), std::istreambuf_iterator<char>());
}

Result<std::vector<Prompt>> read_prompts(FileSystem& fs, const GenerateOptions& options) {
  std::vector<Prompt> prompts;
  for (const std::string& text : options.prompts) prompts.push_back({text, {}});
  for (const std::string& path : options.prompt_files) {
    KTG_ASSIGN_OR_RETURN(std::string text, read_prompt_file(fs, path));
    prompts.push_back({std::move(text), {}});
  }
  if (prompts.empty()) return invalid_argument("no prompt: give --prompt TEXT or --prompt-file FILE");
  return prompts;
}

Status encode(std::vector<Prompt>& prompts, const GenerateOptions& options, const Tokenizer* tokenizer) {
  for (size_t i = 0; i < prompts.size(); ++i) {
    if (options.ids) {
      KTG_ASSIGN_OR_RETURN(prompts[i].ids, parse_ids(prompts[i].text));
    } else if (tokenizer != nullptr) {
      prompts[i].ids = tokenizer->encode(prompts[i].text);
    } else {
      return invalid_argument("the checkpoint names no tokenizer (it was trained on token files): use --ids");
    }
    if (prompts[i].ids.empty()) {
      return invalid_argument(fmt::format("prompt {} is empty: the model needs at least one token", i + 1));
    }
  }
  return ok_status();
}

// The ids that end a text: as asked for, or the usual end-of-text tokens that the tokenizer knows as one token.
Result<std::vector<int32_t>> end_ids(const GenerateOptions& options, const Tokenizer* tokenizer, int64_t vocab_size) {
  std::vector<int32_t> ids;
  for (const int64_t id : options.end_ids) {
    if (id < 0 || id >= vocab_size) {
      return invalid_argument(fmt::format("--end-id {}: the vocabulary has ids 0 to {}", id, vocab_size - 1));
    }
    ids.push_back(static_cast<int32_t>(id));
  }
  if (!ids.empty() || tokenizer == nullptr) return ids;
  for (const char* text : {"<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "</s>"}) {
    const std::vector<int32_t> encoded = tokenizer->encode(text);
    if (encoded.size() == 1 && encoded[0] < vocab_size) ids.push_back(encoded[0]);
  }
  return ids;
}

// Blocks and positions that the continuations need, and no more.
runtime::EngineOptions engine_options(const GenerateOptions& options, const InferenceModel& model,
                                      const std::vector<Continuation>& continuations) {
  runtime::EngineOptions engine;
  engine.dtype = model.dtype;
  engine.kv_block_tokens = options.kv_block_tokens;
  engine.max_batch = std::min<int64_t>(options.max_batch, static_cast<int64_t>(continuations.size()));
  int64_t longest = 1;
  for (const Continuation& continuation : continuations) {
    const int64_t prompt = static_cast<int64_t>(continuation.prompt->ids.size());
    const int64_t room = model.config().max_seq_len - prompt;
    longest = std::max(longest, prompt + std::clamp<int64_t>(options.max_tokens - 1, 0, std::max<int64_t>(room, 0)));
  }
  engine.max_context = std::min(longest, model.config().max_seq_len);
  engine.num_kv_blocks = options.num_kv_blocks;
  return engine;
}

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

// A token's visible form: its characters, or its number with --ids.
std::string visible(Continuation& continuation, const runtime::TokenEvent& event, const GenerateOptions& options,
                    const Tokenizer* tokenizer) {
  if (options.ids) return fmt::format("{}{}", event.index == 0 ? "" : " ", event.id);
  std::string out;
  if (event.finish != runtime::FinishReason::kEndId) {
    const Result<std::string> bytes = tokenizer->decode({event.id});
    // A model may have more ids than its tokenizer (a padded vocabulary): such an id is one unknown character.
    out = bytes.ok() ? continuation.characters.push(*bytes) : continuation.characters.finish() + "\xEF\xBF\xBD";
  }
  if (event.finish.has_value()) out += continuation.characters.finish();
  return out;
}

// Texts that ended before what was asked for.
void print_ends(const std::vector<Continuation>& continuations, int64_t max_seq_len) {
  int64_t cut = 0;
  for (const Continuation& c : continuations) cut += c.finish == std::string_view("context") ? 1 : 0;
  if (cut == 0) return;
  std::fprintf(stderr, "%s of %s texts ended at the model's context of %s tokens\n", grouped(cut).c_str(),
               grouped(static_cast<int64_t>(continuations.size())).c_str(), grouped(max_seq_len).c_str());
}

void print_timing(const Engine& engine) {
  const runtime::EngineStats& stats = engine.stats();
  const auto rate = [](int64_t tokens, int64_t ns) {
    return grouped(ns > 0 ? static_cast<int64_t>(static_cast<double>(tokens) * 1e9 / static_cast<double>(ns)) : 0);
  };
  std::string line =
      fmt::format("prefill {} tokens in {:.1f} ms ({} tok/s), decode {} tokens in {:.1f} ms ({} tok/s)",
                  grouped(stats.prefill_tokens), stats.prefill_ns * 1e-6, rate(stats.prefill_tokens, stats.prefill_ns),
                  grouped(stats.decode_tokens), stats.decode_ns * 1e-6, rate(stats.decode_tokens, stats.decode_ns));
  line += fmt::format("; kv_blocks: {} used at most, {} of {} free at the end", engine.kv_blocks().peak_used(),
                      engine.kv_blocks().num_free(), engine.kv_blocks().num_blocks());
  if (stats.preemptions > 0) line += fmt::format("; {} preemptions", stats.preemptions);
  std::fprintf(stderr, "%s\n", line.c_str());
}

Status generate(Engine& engine, std::vector<Continuation>& continuations, const GenerateOptions& options,
                const runtime::SamplingParams& sampling, const std::vector<int32_t>& ends, const Tokenizer* tokenizer) {
  std::vector<std::string> headers(continuations.size());
  for (size_t i = 0; i < continuations.size(); ++i) {
    if (continuations.size() > 1 && !options.json) headers[i] = header(i, continuations.size(), continuations[i]);
    if (options.echo && !options.json) headers[i] += continuations[i].prompt->text + (options.ids ? " " : "");
  }
  OrderedOutput output(stdout, std::move(headers), options.stream && !options.json);
  for (size_t i = 0; i < continuations.size(); ++i) {
    Continuation& continuation = continuations[i];
    runtime::Request request{.prompt = continuation.prompt->ids,
                             .max_new_tokens = options.max_tokens,
                             .sampling = sampling,
                             .end_ids = ends,
                             .on_token = {}};
    request.sampling.stream = continuation.sample;
    request.on_token = [&, i](const runtime::TokenEvent& event) {
      Continuation& self = continuations[i];
      self.ids.push_back(event.id);
      const std::string piece = visible(self, event, options, tokenizer);
      self.text += piece;
      if (event.finish.has_value()) self.finish = runtime::to_string(*event.finish);
      if (!options.json) output.piece(i, piece);
      if (event.finish.has_value()) {
        if (options.json) output.piece(i, json_line(self, options, sampling.seed));
        output.end(i);
      }
      return std::ferror(stdout) == 0;  // nobody reads on: stop making text
    };
    KTG_ASSIGN_OR_RETURN([[maybe_unused]] const int64_t id, engine.add(std::move(request)));
  }
  return engine.run();
}

uint64_t draw_seed() {
  std::random_device device;
  return (static_cast<uint64_t>(device()) << 32) | device();
}

}  // namespace

int run_generate(const GenerateOptions& options) {
  runtime::SamplingParams sampling{.temperature = options.temperature, .top_k = options.top_k, .top_p = options.top_p};
  if (const Status status = sampling.validate(); !status.ok()) return report_error(status, kExitUsage);
  FileSystem& fs = FileSystem::posix();
  Result<std::vector<Prompt>> prompts = read_prompts(fs, options);
  if (!prompts.ok()) return report_error(prompts.status(), kExitUsage);

  std::vector<std::string> notes;
  const auto model =
      load_model(fs, {options.checkpoint.path, options.checkpoint.dtype, options.checkpoint.num_threads}, &notes);
  print_notes(notes);
  if (!model.ok()) return report_error(model.status(), kExitBadConfig);
  const InferenceModel& loaded = **model;
  std::fprintf(stderr, "%s\n", loaded.description().c_str());

  const Tokenizer* tokenizer = loaded.tokenizer.get();
  if (const Status status = encode(*prompts, options, tokenizer); !status.ok()) return report_error(status, kExitUsage);
  const auto ends = end_ids(options, tokenizer, loaded.config().vocab_size);
  if (!ends.ok()) return report_error(ends.status(), kExitUsage);
  std::vector<Continuation> continuations;
  for (const Prompt& prompt : *prompts) {
    for (int64_t sample = 0; sample < options.samples; ++sample) {
      continuations.push_back({&prompt, static_cast<uint32_t>(sample), {}, {}, {}});
    }
  }
  const runtime::EngineOptions engine_settings = engine_options(options, loaded, continuations);
  const auto plan = Engine::plan(loaded.config(), engine_settings, *loaded.backend);
  if (!plan.ok()) return report_error(plan.status(), kExitUsage);
  std::fprintf(stderr, "memory: weights %s, kv cache %s (%s kv_blocks of %s tokens), activations %s\n",
               bytes_text(loaded.weight_bytes()).c_str(), bytes_text(plan->kv_cache).c_str(),
               grouped(plan->num_kv_blocks).c_str(), grouped(options.kv_block_tokens).c_str(),
               bytes_text(plan->activations + plan->inputs_and_logits).c_str());
  auto engine = Engine::create(loaded.config(), engine_settings, *loaded.backend, *loaded.access);
  if (!engine.ok()) return report_error(engine.status(), kExitUsage);

  sampling.seed = options.seed.has_value() ? *options.seed : draw_seed();
  if (sampling.temperature > 0) {
    std::fprintf(stderr, "seed %llu%s\n", static_cast<unsigned long long>(sampling.seed),
                 options.seed.has_value() ? "" : " (drawn; --seed repeats this text)");
  }
  const Status status = generate(**engine, continuations, options, sampling, *ends, tokenizer);
  if (!status.ok()) {
    std::fflush(stdout);
    return report_error(status, kExitUsage);
  }
  if (const int code = finish_stdout(); code != kExitOk) return code;
  print_ends(continuations, loaded.config().max_seq_len);
  print_timing(**engine);
  return kExitOk;
}

}  // namespace kintsugi::launch
