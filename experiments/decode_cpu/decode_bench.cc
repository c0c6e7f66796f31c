// Prefill and decode in tokens/s, as llama-bench reports them: pp<n> processes a prompt of n tokens, tg<n> generates n
// tokens from a context of one (or d tokens, "tg128 @ d512"); "x8" decodes 8 sequences at once.
//
//   decode_bench [--model benchmark|smollm2-135m] [--dtype fp32|bf16] [--threads 1] [--repeats 5] [--cpu_time] [--json
//   F]
//
// How it measures. Random weights. First the result is checked: each decoded row of logits against a whole forward pass
// over the same tokens. One run of each test warms up; then mean and standard deviation of --repeats runs. Times are
// the engine's own, sampling (greedy) and the copy of logits included. The bounds are measured in this process: a
// prompt against the matrix products of a 1024^3 product's speed, a token against reading all its weights once from a
// buffer of their size (so a model that fits the cache is held against the cache).
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <ctime>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "experiments/gemm_speed.h"
#include "runtime/base/deadline.h"
#include "runtime/base/philox.h"
#include "runtime/decode/engine.h"
#include "runtime/model/model_weights.h"

namespace kintsugi {
namespace {

using runtime::DType;
using runtime::Engine;

struct Options {
  std::string model = "benchmark", dtype = "fp32", json;
  int threads = 1, repeats = 5;
  int64_t pp = 512, tg = 128;
  bool cpu_time = false;
};

bool use_cpu_time = false;  // set once from the options

int64_t now_ns() {
  if (!use_cpu_time) return monotonic_ns();
  timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return t.tv_sec * 1'000'000'000 + t.tv_nsec;
}

struct Test {
  int64_t prompt;    // tokens before the first new one
  int64_t generate;  // 0: the prompt itself is timed
  int64_t batch = 1;
  std::string name() const {
    if (generate == 0) return fmt::format("pp{}", prompt);
    std::string name = fmt::format("tg{}", generate);
    if (prompt > 1) name += fmt::format(" @ d{}", prompt);
    if (batch > 1) name += fmt::format(" x{}", batch);
    return name;
  }
};

runtime::ModelConfig model_config(const std::string& name) {
  runtime::ModelConfig config;  // "benchmark": 4 layers, C 256, 8 heads, SwiGLU 704, bytes
  config.max_seq_len = 1024;
  if (name == "smollm2-135m") {
    config.num_layers = 30;
    config.dim = 576;
    config.num_heads = 9;
    config.num_kv_heads = 3;
    config.ffn_dim = 1536;
    config.vocab_size = 49152;
    config.rope_theta = 100000;
    config.tied_embedding = true;
  }
  return config;
}

class Bench {
 public:
  explicit Bench(const Options& options)
      : config_(model_config(options.model)),
        dtype_(options.dtype == "bf16" ? DType::kBF16 : DType::kF32),
        threads_(options.threads),
        table_(runtime::ParamTable::build(config_)),
        backend_(runtime::create_cpu_backend({.num_threads = options.threads})) {}

  Status init();
  // Largest difference of decoded logits from a forward pass over the same tokens, relative to the largest logit.
  Result<double> check();
  // Tokens/s of one run.
  Result<double> run(const Test& test);
  Result<double> gemm_speed() { return gemm_gflops(*backend_, *stream_, dtype_, now_ns); }
  double read_gb_per_s() const;

  const runtime::ModelConfig& config() const { return config_; }
  std::string description() const { return backend_->description(); }
  const runtime::ParamTable& table() const { return table_; }
  // Of the matrices that each new token is multiplied with.
  int64_t matrix_elements() const;
  int64_t matrix_bytes() const { return matrix_elements() * kernels::size_of(dtype_); }

 private:
  std::vector<int32_t> prompt(int64_t length, uint32_t which) const;

  const runtime::ModelConfig config_;
  const DType dtype_;
  const int threads_;
  const runtime::ParamTable table_;
  std::unique_ptr<runtime::Backend> backend_;
  std::unique_ptr<runtime::Stream> stream_;
  runtime::ModelWeights weights_;
};

Status Bench::init() {
  KTG_ASSIGN_OR_RETURN(stream_, backend_->create_stream());
  KTG_ASSIGN_OR_RETURN(weights_, runtime::ModelWeights::allocate(table_, dtype_, *backend_));
  runtime::init_parameters(weights_.master.as<float>(), table_, 1, 0, table_.total_length());
  return weights_.changed(*backend_, *stream_);
}

int64_t Bench::matrix_elements() const {
  int64_t elements = 0;
  for (const runtime::TensorInfo& tensor : table_.tensors()) {
    if (tensor.matrix && (tensor.unit != 0 || config_.tied_embedding)) elements += tensor.numel;
  }
  return elements;
}

std::vector<int32_t> Bench::prompt(int64_t length, uint32_t which) const {
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < length; ++i) {
    const double u = random_uniform(7, RandomPurpose::kTest, which, static_cast<uint64_t>(i));
    ids.push_back(static_cast<int32_t>(u * static_cast<double>(config_.vocab_size)));
  }
  return ids;
}

Result<double> Bench::check() {
  constexpr int64_t kPrompt = 20, kNew = 12, kLength = kPrompt + kNew;
  KTG_ASSIGN_OR_RETURN(const auto engine,
                       Engine::create(config_, {.dtype = dtype_, .max_context = kLength}, *backend_, *weights_.access));
  std::vector<int32_t> tokens = prompt(kPrompt, 0);
  std::vector<float> decoded;
  runtime::Request request{.prompt = tokens, .max_new_tokens = kNew, .sampling = {}, .end_ids = {}, .on_token = {}};
  request.on_token = [&](const runtime::TokenEvent& event) {
    tokens.push_back(event.id);
    decoded.insert(decoded.end(), event.logits.begin(), event.logits.end());
    return true;
  };
  KTG_ASSIGN_OR_RETURN([[maybe_unused]] const int64_t id, engine->add(std::move(request)));
  KTG_RETURN_IF_ERROR(engine->run());
  // The same engine's prefill over the tokens up to each new one is the whole forward pass.
  double difference = 0, largest = 0;
  for (int64_t i = 0; i < kNew; ++i) {
    runtime::Request whole{.prompt = {tokens.begin(), tokens.begin() + kPrompt + i},
                           .max_new_tokens = 1,
                           .sampling = {},
                           .end_ids = {},
                           .on_token = {}};
    whole.on_token = [&](const runtime::TokenEvent& event) {
      for (int64_t v = 0; v < config_.vocab_size; ++v) {
        difference = std::max(difference, std::abs(double{event.logits[v]} - decoded[i * config_.vocab_size + v]));
        largest = std::max(largest, std::abs(double{event.logits[v]}));
      }
      return true;
    };
    KTG_ASSIGN_OR_RETURN([[maybe_unused]] const int64_t again, engine->add(std::move(whole)));
    KTG_RETURN_IF_ERROR(engine->run());
  }
  return difference / largest;
}

Result<double> Bench::run(const Test& test) {
  const runtime::EngineOptions options{
      .dtype = dtype_, .max_batch = test.batch, .max_context = test.prompt + test.generate, .poison_unused = false};
  KTG_ASSIGN_OR_RETURN(const auto engine, Engine::create(config_, options, *backend_, *weights_.access));
  for (int64_t i = 0; i < test.batch; ++i) {
    // The first new token comes from the prompt, the others from decode steps.
    KTG_ASSIGN_OR_RETURN([[maybe_unused]] const int64_t id,
                         engine->add({.prompt = prompt(test.prompt, static_cast<uint32_t>(i)),
                                      .max_new_tokens = test.generate + 1,
                                      .sampling = {},
                                      .end_ids = {},
                                      .on_token = {}}));
  }
  // A step either prefills one sequence or decodes one token of each.
  const bool prefill = test.generate == 0;
  int64_t tokens = 0, ns = 0;
  while (!engine->idle()) {
    const runtime::EngineStats before = engine->stats();
    const int64_t begin = now_ns();
    KTG_RETURN_IF_ERROR(engine->step());
    const int64_t elapsed = now_ns() - begin;
    const int64_t done = prefill ? engine->stats().prefill_tokens - before.prefill_tokens
                                 : engine->stats().decode_tokens - before.decode_tokens;
    if (done > 0) ns += elapsed;
    tokens += done;
  }
  return static_cast<double>(tokens) * 1e9 / static_cast<double>(ns);
}

// The best of ten passes over a buffer of the matrices' size, cut among the threads.
double Bench::read_gb_per_s() const {
  std::vector<uint64_t> buffer(static_cast<size_t>(matrix_bytes() / 8), 1);
  std::vector<uint64_t> sums(static_cast<size_t>(threads_));
  const auto read = [&](int thread) {
    const size_t n = buffer.size() / static_cast<size_t>(threads_), first = n * static_cast<size_t>(thread);
    constexpr size_t kLanes = 32;  // enough independent sums to be bound by memory
    uint64_t lanes[kLanes] = {};
    for (size_t i = first; i + kLanes <= first + n; i += kLanes) {
      for (size_t lane = 0; lane < kLanes; ++lane) lanes[lane] += buffer[i + lane];
    }
    for (const uint64_t lane : lanes) sums[static_cast<size_t>(thread)] += lane;
  };
  double best = 0;
  // Small buffers are read several times, so that starting threads does not count.
  const int passes = static_cast<int>(std::max<int64_t>(1, (int64_t{256} << 20) / matrix_bytes()));
  for (int repeat = 0; repeat < 10; ++repeat) {
    const int64_t begin = now_ns();
    std::vector<std::thread> threads;
    for (int thread = 0; thread < threads_; ++thread) {
      threads.emplace_back([&, thread] {
        for (int pass = 0; pass < passes; ++pass) read(thread);
      });
    }
    for (std::thread& thread : threads) thread.join();
    best = std::max(best, static_cast<double>(passes) * static_cast<double>(matrix_bytes()) /
                              static_cast<double>(now_ns() - begin));
  }
  // Uses the sums, so that the reads are not optimised away.
  return sums[0] == 0 ? 0 : best;
}

Status run(const Options& options) {
  Bench bench(options);
  KTG_RETURN_IF_ERROR(bench.init());
  KTG_ASSIGN_OR_RETURN(const double difference, bench.check());
  // A thousandth (fp32) or a few roundings of bf16: far below what a wrong position or block would do.
  const double allowed = options.dtype == "bf16" ? 0.05 : 1e-3;
  if (!(difference <= allowed)) {
    return internal_error(
        fmt::format("decoded logits differ from a forward pass by {:.3g} of the largest", difference));
  }
  KTG_ASSIGN_OR_RETURN(const double gflops, bench.gemm_speed());
  const double gb_per_s = bench.read_gb_per_s();
  const double prefill_bound = gflops * 1e9 / (2.0 * static_cast<double>(bench.matrix_elements()));
  const double decode_bound = gb_per_s * 1e9 / static_cast<double>(bench.matrix_bytes());
  fmt::print("{}, {} parameters, {}, {}; decode against forward: {:.2g}\n", options.model,
             bench.table().num_parameters(), options.dtype, bench.description(), difference);
  fmt::print("bounds: 1024^3 product {:.1f} GFLOP/s; reading {:.1f} MB of matrices {:.1f} GB/s\n", gflops,
             static_cast<double>(bench.matrix_bytes()) * 1e-6, gb_per_s);
  fmt::print("| {:<12} | {:>20} | {:>12} | {:>6} |\n|{:-<14}|{:->22}|{:->14}|{:->8}|\n", "test", "t/s", "bound t/s",
             "%", "", "", "", "");
  nlohmann::ordered_json results;
  const std::vector<Test> tests = {{options.pp, 0}, {1, options.tg}, {options.pp, options.tg}, {1, options.tg, 8}};
  for (const Test& test : tests) {
    KTG_ASSIGN_OR_RETURN([[maybe_unused]] const double warm_up, bench.run(test));
    double sum = 0, squares = 0;
    for (int i = 0; i < options.repeats; ++i) {
      KTG_ASSIGN_OR_RETURN(const double rate, bench.run(test));
      sum += rate;
      squares += rate * rate;
    }
    const double mean = sum / options.repeats;
    const double deviation = std::sqrt(std::max(0.0, squares / options.repeats - mean * mean));
    // Weights are read once for the whole batch.
    const double bound =
        test.generate == 0 ? prefill_bound : std::min(decode_bound * static_cast<double>(test.batch), prefill_bound);
    fmt::print("| {:<12} | {:>10.1f} ± {:>7.1f} | {:>12.1f} | {:>6.1f} |\n", test.name(), mean, deviation, bound,
               100 * mean / bound);
    results.push_back({{"test", test.name()}, {"tokens_per_second", mean}, {"deviation", deviation}, {"bound", bound}});
  }
  if (!options.json.empty()) {
    const nlohmann::ordered_json json = {{"model", options.model},
                                         {"dtype", options.dtype},
                                         {"threads", options.threads},
                                         {"clock", options.cpu_time ? "cpu" : "wall"},
                                         {"backend", bench.description()},
                                         {"gemm_gflops", gflops},
                                         {"read_gb_per_s", gb_per_s},
                                         {"repeats", options.repeats},
                                         {"results", results}};
    std::ofstream(options.json) << json.dump(1) << "\n";
  }
  return ok_status();
}

}  // namespace
}  // namespace kintsugi

int main(int argc, char** argv) {
  kintsugi::Options options;
  CLI::App app("Prefill and decode tokens per second");
  app.add_option("--model", options.model)->check(CLI::IsMember({"benchmark", "smollm2-135m"}))->capture_default_str();
  app.add_option("--dtype", options.dtype)->check(CLI::IsMember({"fp32", "bf16"}))->capture_default_str();
  app.add_option("--threads", options.threads)->check(CLI::Range(1, 256))->capture_default_str();
  app.add_option("--repeats", options.repeats)->check(CLI::Range(1, 1000))->capture_default_str();
  app.add_option("--pp", options.pp, "Tokens of a prompt")->check(CLI::Range(2, 800))->capture_default_str();
  app.add_option("--tg", options.tg, "New tokens")->check(CLI::Range(1, 200))->capture_default_str();
  app.add_flag("--cpu_time", options.cpu_time);
  app.add_option("--json", options.json);
  CLI11_PARSE(app, argc, argv);
  kintsugi::use_cpu_time = options.cpu_time;
  const kintsugi::Status status = kintsugi::run(options);
  if (!status.ok()) fmt::print(stderr, "{}\n", status.to_string());
  return status.ok() ? 0 : 1;
}
