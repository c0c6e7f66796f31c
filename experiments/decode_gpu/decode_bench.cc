// Decode and prefill on the GPU at known shapes with random weights, through the engine that `infer` uses.
//
//   decode_bench_gpu [--shape llama-1b|llama-8b|qwen3-0.6b|tiny-llama|tiny-qwen3] [--batch 1] [--context 1024]
//                    [--steps 64] [--prefill 2048] [--no-graphs] [--json FILE]
//   decode_bench_gpu --check FILE    greedy texts of the tiny shapes in fp32, with their weights, for compare.py
//
// What is timed. Decode: `batch` sequences with prompts of `context` tokens; after 16 steps to warm up (graphs are
// recorded there), the wall time of `steps` engine steps, tokens drawn on the device and read by the host included,
// divided by their number; the median of 3 such runs. Prefill: the engine's first step for one prompt, to its first
// token on the host; the median of 7 after 2 to warm up. "% of floor" holds a step against reading every matrix once,
// and the keys and values of the mean context, at 4.28 TB/s (the H200's copy bandwidth).
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <random>

#include "runtime/base/deadline.h"
#include "runtime/cuda/cuda_backend.h"
#include "runtime/decode/engine.h"
#include "runtime/model/model_weights.h"

namespace kintsugi::runtime {
namespace {

constexpr double kCopyBytesPerSecond = 4.28e12;
constexpr int kWarmUp = 16, kRuns = 3;

ModelConfig config_of(const std::string& shape) {
  ModelConfig c;
  c.rope_theta = 500000;
  if (shape == "llama-1b") {
    c.num_layers = 16, c.dim = 2048, c.num_heads = 32, c.num_kv_heads = 8, c.ffn_dim = 8192, c.vocab_size = 128256;
    c.tied_embedding = true;
  } else if (shape == "llama-8b") {
    c.num_layers = 32, c.dim = 4096, c.num_heads = 32, c.num_kv_heads = 8, c.ffn_dim = 14336, c.vocab_size = 128256;
  } else if (shape == "qwen3-0.6b") {
    c.num_layers = 28, c.dim = 1024, c.num_heads = 16, c.num_kv_heads = 8, c.head_dim = 128, c.ffn_dim = 3072;
    c.vocab_size = 151936, c.tied_embedding = true, c.qk_norm = true;
  } else {
    c.num_layers = 3, c.dim = 128, c.num_heads = 4, c.num_kv_heads = 2, c.head_dim = 64, c.ffn_dim = 320;
    c.vocab_size = 512, c.init_std = 0.15, c.qk_norm = c.tied_embedding = shape == "tiny-qwen3";
  }
  c.max_seq_len = shape.starts_with("tiny") ? 256 : 8192;
  return c;
}

// Random weights on the device: normal numbers of the model's size, one block of 4 Mi of them again and again.
struct DeviceWeights {
  ParamTable params;
  ModelWeights parts;
};

Status fill_random(DeviceWeights& w, const ModelConfig& config, Backend& backend, Stream& stream) {
  std::mt19937 rng(20261202);
  std::normal_distribution<float> normal(0.0f, static_cast<float>(config.init_std));
  std::vector<float> block(static_cast<size_t>(4) << 20);
  for (float& x : block) x = normal(rng);
  const int64_t length = w.params.total_length(), block_length = static_cast<int64_t>(block.size());
  for (int64_t at = 0; at < length; at += block_length) {
    KTG_RETURN_IF_ERROR(
        backend.copy(w.parts.master.as<float>() + at, block.data(), std::min(block_length, length - at) * 4, stream));
  }
  for (const TensorInfo& tensor : w.params.tensors()) {
    if (tensor.matrix) continue;
    const std::vector<float> ones(static_cast<size_t>(tensor.numel), tensor.init == Init::kZero ? 0.0f : 1.0f);
    KTG_RETURN_IF_ERROR(
        backend.copy(w.parts.master.as<float>() + tensor.offset, ones.data(), tensor.numel * 4, stream));
    KTG_RETURN_IF_ERROR(stream.synchronize(Deadline::never()));
  }
  return stream.synchronize(Deadline::never());
}

Result<std::unique_ptr<DeviceWeights>> make_weights(const ModelConfig& config, DType dtype, Backend& backend) {
  auto w = std::make_unique<DeviceWeights>();
  w->params = ParamTable::build(config);
  KTG_ASSIGN_OR_RETURN(w->parts, ModelWeights::allocate(w->params, dtype, backend));
  KTG_ASSIGN_OR_RETURN(const std::unique_ptr<Stream> stream, backend.create_stream());
  KTG_RETURN_IF_ERROR(fill_random(*w, config, backend, *stream));
  KTG_RETURN_IF_ERROR(w->parts.changed(backend, *stream));
  return w;
}

std::vector<int32_t> random_prompt(int64_t length, int64_t vocab, uint32_t seed) {
  std::mt19937 rng(seed);
  std::vector<int32_t> ids(static_cast<size_t>(length));
  for (int32_t& id : ids) id = static_cast<int32_t>(rng() % static_cast<uint32_t>(vocab));
  return ids;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Options {
  std::string shape = "llama-1b", json, check;
  int64_t batch = 1, context = 1024, steps = 64, prefill = 2048;
  bool no_graphs = false;
};

// Bytes of the matrices that a decode step reads: all but a token table that is no head.
int64_t matrix_bytes(const ParamTable& params, bool tied) {
  int64_t elements = 0;
  for (const TensorInfo& t : params.tensors()) elements += t.matrix && (t.unit > 0 || tied) ? t.numel : 0;
  return elements * 2;
}

Result<double> decode_ms(const Options& o, const ModelConfig& config, Backend& backend, DeviceWeights& w) {
  std::vector<double> times;
  const int64_t new_tokens = kWarmUp + kRuns * o.steps + 8;
  KTG_ASSIGN_OR_RETURN(const std::unique_ptr<Engine> engine, Engine::create(config,
                                                                            {.dtype = DType::kBF16,
                                                                             .max_batch = o.batch,
                                                                             .max_context = o.context + new_tokens,
                                                                             .use_graphs = !o.no_graphs},
                                                                            backend, *w.parts.access));
  for (int64_t s = 0; s < o.batch; ++s) {
    Request request{.prompt = random_prompt(o.context, config.vocab_size, static_cast<uint32_t>(s)),
                    .max_new_tokens = new_tokens,
                    .sampling = {},
                    .end_ids = {},
                    .on_token = {}};
    KTG_RETURN_IF_ERROR(engine->add(std::move(request)).status());
  }
  for (int64_t i = 0; i < o.batch + kWarmUp; ++i) KTG_RETURN_IF_ERROR(engine->step());
  for (int run = 0; run < kRuns; ++run) {
    const int64_t before = engine->stats().decode_steps, begin_ns = monotonic_ns();
    for (int64_t i = 0; i < o.steps; ++i) KTG_RETURN_IF_ERROR(engine->step());
    times.push_back(static_cast<double>(monotonic_ns() - begin_ns) * 1e-6 / static_cast<double>(o.steps));
    KTG_CHECK(engine->stats().decode_steps - before == o.steps) << "steps that decoded nothing";
  }
  return median(times);
}

// Of one prompt of T tokens, to its first new token on the host.
Result<double> prompt_ms(Engine& engine, int64_t T, const ModelConfig& config, uint32_t seed) {
  Request request{.prompt = random_prompt(T, config.vocab_size, seed),
                  .max_new_tokens = 1,
                  .sampling = {},
                  .end_ids = {},
                  .on_token = {}};
  KTG_RETURN_IF_ERROR(engine.add(std::move(request)).status());
  const int64_t begin_ns = monotonic_ns();
  KTG_RETURN_IF_ERROR(engine.step());
  KTG_CHECK(engine.idle()) << "a prompt of one new token is done after its prefill";
  return static_cast<double>(monotonic_ns() - begin_ns) * 1e-6;
}

Result<double> prefill_ms(const Options& o, const ModelConfig& config, Backend& backend, DeviceWeights& w) {
  KTG_ASSIGN_OR_RETURN(const std::unique_ptr<Engine> engine,
                       Engine::create(config, {.dtype = DType::kBF16, .max_batch = 1, .max_context = o.prefill},
                                      backend, *w.parts.access));
  std::vector<double> times;
  for (uint32_t run = 0; run < 9; ++run) {
    KTG_ASSIGN_OR_RETURN(const double ms, prompt_ms(*engine, o.prefill, config, run));
    if (run == 0) fmt::print("first prompts of their lengths, ms: {} {:.1f}", o.prefill, ms);
    if (run >= 2) times.push_back(ms);
  }
  for (const int64_t T : {o.prefill - 1, o.prefill - 37, o.prefill / 2 + 3, o.prefill / 2 + 2, o.prefill / 4}) {
    if (T < 1) continue;
    KTG_ASSIGN_OR_RETURN(const double ms, prompt_ms(*engine, T, config, 1));
    fmt::print("  {} {:.1f}", T, ms);
  }
  fmt::print("\n");
  return median(times);
}

Status measure(const Options& o) {
  const ModelConfig config = config_of(o.shape);
  KTG_ASSIGN_OR_RETURN(const std::unique_ptr<Backend> backend, create_cuda_backend({}));
  KTG_ASSIGN_OR_RETURN(const std::unique_ptr<DeviceWeights> w, make_weights(config, DType::kBF16, *backend));
  nlohmann::ordered_json out;
  out["shape"] = o.shape;
  if (o.steps > 0) {
    KTG_ASSIGN_OR_RETURN(const double ms, decode_ms(o, config, *backend, *w));
    const double context = static_cast<double>(o.context) + kWarmUp + 0.5 * static_cast<double>(kRuns * o.steps);
    const double kv = static_cast<double>(o.batch) * context *
                      static_cast<double>(2 * config.num_layers * config.kv_heads() * config.head_size() * 2);
    const double floor_ms =
        (static_cast<double>(matrix_bytes(w->params, config.tied_embedding)) + kv) / kCopyBytesPerSecond * 1e3;
    fmt::print("{:<12} batch {:>3} context {}: {:.3f} ms a step, {:.0f} tok/s, floor {:.3f} ms, {:.1f} % of floor\n",
               o.shape, o.batch, o.context, ms, static_cast<double>(o.batch) / ms * 1e3, floor_ms, 100 * floor_ms / ms);
    out["decode"] = {{"batch", o.batch},
                     {"context", o.context},
                     {"ms", ms},
                     {"floor_ms", floor_ms},
                     {"percent_of_floor", 100 * floor_ms / ms},
                     {"graphs", !o.no_graphs}};
  }
  if (o.prefill > 0) {
    KTG_ASSIGN_OR_RETURN(const double ms, prefill_ms(o, config, *backend, *w));
    fmt::print("{:<12} prefill 1 x {}: {:.3f} ms, {:.0f} tok/s\n", o.shape, o.prefill, ms,
               static_cast<double>(o.prefill) / ms * 1e3);
    out["prefill"] = {
        {"tokens", o.prefill}, {"ms", ms}, {"tokens_per_second", static_cast<double>(o.prefill) / ms * 1e3}};
  }
  if (!o.json.empty()) {
    std::FILE* file = std::fopen(o.json.c_str(), "a");
    if (file == nullptr) return invalid_argument(o.json + ": cannot be written");
    fmt::print(file, "{}\n", out.dump());
    std::fclose(file);
  }
  return ok_status();
}

// One JSON line a shape: the configuration, where each tensor lies in FILE.<shape>.f32, prompts and greedy texts.
Status check(const Options& o) {
  KTG_ASSIGN_OR_RETURN(const std::unique_ptr<Backend> backend, create_cuda_backend({}));
  KTG_ASSIGN_OR_RETURN(const std::unique_ptr<Stream> stream, backend->create_stream());
  std::FILE* file = std::fopen(o.check.c_str(), "w");
  if (file == nullptr) return invalid_argument(o.check + ": cannot be written");
  for (const std::string shape : {"tiny-llama", "tiny-qwen3"}) {
    const ModelConfig config = config_of(shape);
    KTG_ASSIGN_OR_RETURN(const std::unique_ptr<DeviceWeights> w, make_weights(config, DType::kF32, *backend));
    std::vector<float> weights(static_cast<size_t>(w->params.total_length()));
    KTG_RETURN_IF_ERROR(backend->copy(weights.data(), w->parts.master.data(), w->params.total_length() * 4, *stream));
    KTG_RETURN_IF_ERROR(stream->synchronize(Deadline::never()));
    const std::string raw = o.check + "." + shape + ".f32";
    std::FILE* raw_file = std::fopen(raw.c_str(), "w");
    if (raw_file == nullptr) return invalid_argument(raw + ": cannot be written");
    const size_t written = std::fwrite(weights.data(), 4, weights.size(), raw_file);
    if (std::fclose(raw_file) != 0 || written != weights.size()) return invalid_argument(raw + ": not written");

    KTG_ASSIGN_OR_RETURN(const std::unique_ptr<Engine> engine,
                         Engine::create(config, {.dtype = DType::kF32, .max_batch = 3}, *backend, *w->parts.access));
    nlohmann::ordered_json line{{"shape", shape},
                                {"weights", raw},
                                {"layers", config.num_layers},
                                {"dim", config.dim},
                                {"heads", config.num_heads},
                                {"kv_heads", config.kv_heads()},
                                {"head_size", config.head_size()},
                                {"vocab", config.vocab_size},
                                {"eps", config.norm_eps},
                                {"theta", config.rope_theta},
                                {"qk_norm", config.qk_norm}};
    for (const TensorInfo& t : w->params.tensors())
      line["tensors"][t.name] = {{"offset", t.offset}, {"shape", t.shape}};
    std::vector<std::vector<int32_t>> texts(5);
    for (uint32_t i = 0; i < texts.size(); ++i) {
      const std::vector<int32_t> prompt = random_prompt(3 + 17 * i, config.vocab_size, i);
      line["prompts"].push_back(prompt);
      Request request{.prompt = prompt, .max_new_tokens = 100, .sampling = {}, .end_ids = {}, .on_token = {}};
      request.on_token = [&texts, i](const TokenEvent& event) {
        texts[i].push_back(event.id);
        return true;
      };
      KTG_RETURN_IF_ERROR(engine->add(std::move(request)).status());
    }
    KTG_RETURN_IF_ERROR(engine->run());
    line["texts"] = texts;
    fmt::print(file, "{}\n", line.dump());
  }
  return std::fclose(file) == 0 ? ok_status() : invalid_argument(o.check + ": not written");
}

}  // namespace
}  // namespace kintsugi::runtime

int main(int argc, char** argv) {
  kintsugi::runtime::Options options;
  CLI::App app("Decode and prefill on the GPU at known shapes, random weights");
  app.add_option("--shape", options.shape)
      ->check(CLI::IsMember({"llama-1b", "llama-8b", "qwen3-0.6b", "tiny-llama", "tiny-qwen3"}));
  app.add_option("--batch", options.batch)->check(CLI::Range(int64_t{1}, int64_t{1024}));
  app.add_option("--context", options.context)->check(CLI::Range(int64_t{1}, int64_t{7000}));
  app.add_option("--steps", options.steps, "0: no decode")->check(CLI::Range(int64_t{0}, int64_t{300}));
  app.add_option("--prefill", options.prefill, "0: no prefill")->check(CLI::Range(int64_t{0}, int64_t{8192}));
  app.add_flag("--no-graphs", options.no_graphs);
  app.add_option("--json", options.json, "A line is added to it");
  app.add_option("--check", options.check, "Write greedy texts of the tiny shapes instead");
  CLI11_PARSE(app, argc, argv);
  const kintsugi::Status status =
      options.check.empty() ? kintsugi::runtime::measure(options) : kintsugi::runtime::check(options);
  if (!status.ok()) std::fprintf(stderr, "decode_bench_gpu: %s\n", status.to_string().c_str());
  return status.ok() ? 0 : 1;
}
