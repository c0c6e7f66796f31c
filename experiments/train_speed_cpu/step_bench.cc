// One rank's training step, alone: forward, backward, gradient norm, AdamW. Prints tokens/s, the time of each family
// of operations, and the bound: the same matrix products at the speed of a 1024^3 product measured in this process.
//
//   step_bench [--dtype bf16] [--threads 2] [--steps 20] [--json out.json] ...
//
// How it measures: the loss of the first step is checked against ln(vocab), five steps warm up, the median of --steps
// steps counts. Families are timed by an OpObserver in steps of their own, so that the clock does not disturb.
// --cpu_time counts the process's CPU time instead of the wall's: on a busy machine it still compares two builds.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <ctime>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "experiments/gemm_speed.h"
#include "runtime/base/deadline.h"
#include "runtime/base/philox.h"
#include "runtime/model/transformer.h"
#include "runtime/optim/schedule.h"

namespace kintsugi {
namespace {

using runtime::DType;

struct Options {
  runtime::ModelConfig model;
  int64_t B = 4, T = 256, steps = 20, warm_up = 5;
  int threads = 1;
  std::string dtype = "fp32", json;
  bool cpu_time = false;
};

bool use_cpu_time = false;  // set once from the options

int64_t now_ns() {
  if (!use_cpu_time) return monotonic_ns();
  timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return t.tv_sec * 1'000'000'000 + t.tv_nsec;
}

// Time of each operation: what passes between two calls belongs to the second.
class Profile final : public runtime::OpObserver {
 public:
  void begin() { last_ns_ = now_ns(); }
  void launched(const char* what) override {
    const int64_t now = now_ns();
    times_ms_[what] += static_cast<double>(now - last_ns_) * 1e-6;
    last_ns_ = now_ns();
  }
  const std::map<std::string, double>& times_ms() const { return times_ms_; }

 private:
  int64_t last_ns_ = 0;
  std::map<std::string, double> times_ms_;
};

class Bench {
 public:
  static Result<std::unique_ptr<Bench>> create(const Options& options);
  Status step(runtime::Stream& stream);
  // GFLOP/s of y = x W^T with 1024 rows and columns: the best of some.
  Result<double> gemm_speed() {
    return gemm_gflops(*backend_, *stream_, options_.dtype == "bf16" ? DType::kBF16 : DType::kF32, now_ns);
  }
  runtime::Backend& backend() { return *backend_; }
  runtime::Stream& stream() { return *stream_; }
  double loss() const { return sums_.loss / static_cast<double>(sums_.num_tokens); }
  const runtime::ParamTable& table() const { return table_; }

 private:
  explicit Bench(const Options& options)
      : options_(options),
        table_(runtime::ParamTable::build(options.model)),
        backend_(runtime::create_cpu_backend({.num_threads = options.threads})) {}
  Status init();
  Status update(runtime::Stream& stream);

  const Options options_;
  const runtime::ParamTable table_;
  std::unique_ptr<runtime::Backend> backend_;
  std::unique_ptr<runtime::Stream> stream_;
  std::unique_ptr<runtime::Arena> arena_;
  std::unique_ptr<runtime::Transformer> model_;
  runtime::Buffer weights_, m_, v_, gradients_, copy_;
  std::unique_ptr<runtime::FlatUnitAccess> access_;
  std::vector<int32_t> ids_;
  runtime::LossSums sums_;
  int64_t step_ = 0;
};

Result<std::unique_ptr<Bench>> Bench::create(const Options& options) {
  KTG_RETURN_IF_ERROR(options.model.validate());
  std::unique_ptr<Bench> bench(new Bench(options));
  KTG_RETURN_IF_ERROR(bench->init());
  return bench;
}

Status Bench::init() {
  KTG_ASSIGN_OR_RETURN(stream_, backend_->create_stream());
  const DType dtype = options_.dtype == "bf16" ? DType::kBF16 : DType::kF32;
  const runtime::TransformerOptions plan{
      .dtype = dtype, .max_tokens = options_.B * options_.T, .max_seq_len = options_.T};
  const int64_t activations = runtime::Transformer::activation_bytes(options_.model, plan, backend_->kernels());
  KTG_ASSIGN_OR_RETURN(runtime::Buffer memory, backend_->allocate(activations, "activations"));
  arena_ = std::make_unique<runtime::Arena>(std::move(memory));
  KTG_ASSIGN_OR_RETURN(model_, runtime::Transformer::create(options_.model, plan, *backend_, *arena_, *stream_));
  const int64_t n = table_.total_length();
  for (runtime::Buffer* buffer : {&weights_, &m_, &v_, &gradients_, &copy_}) {
    KTG_ASSIGN_OR_RETURN(*buffer, backend_->allocate(n * 4, "state"));
    KTG_RETURN_IF_ERROR(backend_->zero(buffer->data(), n * 4, *stream_));
  }
  runtime::init_parameters(weights_.as<float>(), table_, 42, 0, n);
  KTG_RETURN_IF_ERROR(stream_->launched(
      backend_->kernels().reduce->convert(copy_.data(), weights_.as<float>(), n, DType::kBF16, nullptr), "convert"));
  access_ = std::make_unique<runtime::FlatUnitAccess>(table_, weights_.as<float>(),
                                                      dtype == DType::kBF16 ? copy_.data() : weights_.data(),
                                                      gradients_.as<float>(), dtype);
  for (int64_t i = 0; i <= options_.B * options_.T; ++i) {
    const double u = random_uniform(42, RandomPurpose::kTest, 0, static_cast<uint64_t>(i));
    ids_.push_back(static_cast<int32_t>(u * static_cast<double>(options_.model.vocab_size)));
  }
  return ok_status();
}

Status Bench::step(runtime::Stream& stream) {
  ++step_;
  KTG_RETURN_IF_ERROR(
      model_->forward_backward({ids_.data(), ids_.data() + 1, options_.B, options_.T}, *access_, &sums_, stream));
  return update(stream);
}

// Norm, clip and AdamW, as a rank of a data-parallel run does them on all of the state.
Status Bench::update(runtime::Stream& stream) {
  const kernels::KernelTable& k = backend_->kernels();
  constexpr int64_t kBlock = 1 << 16;
  const int64_t n = table_.total_length(), blocks = (n + kBlock - 1) / kBlock;
  std::vector<double> partials(static_cast<size_t>(blocks));
  KTG_RETURN_IF_ERROR(stream.launched(
      k.reduce->sum_squares(partials.data(), gradients_.as<float>(), 0, blocks, kBlock, n, nullptr), "sum_squares"));
  double squares = 0;
  for (const double p : partials) squares += p;
  const auto tokens = static_cast<double>(sums_.num_tokens);
  const double norm = std::sqrt(squares) / tokens;
  const runtime::OptimizerConfig c;
  const kernels::AdamWScalars scalars{.lr = static_cast<float>(c.lr),
                                      .beta1 = static_cast<float>(c.beta1),
                                      .beta2 = static_cast<float>(c.beta2),
                                      .eps = static_cast<float>(c.eps),
                                      .weight_decay = static_cast<float>(c.weight_decay),
                                      .bias_correction1 = static_cast<float>(1 - std::pow(c.beta1, step_)),
                                      .bias_correction2 = static_cast<float>(1 - std::pow(c.beta2, step_)),
                                      .gradient_scale = static_cast<float>(std::min(1.0, c.clip_norm / norm) / tokens),
                                      .skip = 0};
  for (const runtime::TensorInfo& t : table_.tensors()) {
    const int64_t whole[] = {0, t.numel};
    void* copy = options_.dtype == "bf16" ? copy_.as<uint16_t>() + t.offset : nullptr;
    KTG_RETURN_IF_ERROR(stream.launched(
        k.optimizer->adamw(weights_.as<float>() + t.offset, {m_.as<float>() + t.offset, v_.as<float>() + t.offset},
                           copy, gradients_.as<float>() + t.offset, t.numel, &scalars, whole, t.decay ? 2 : 0,
                           DType::kBF16, nullptr),
        "adamw"));
  }
  return ok_status();
}

double median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

// Families of operations, by the prefix of their names.
std::string family(const std::string& op) {
  for (const char* gemm : {"qkv.", "o.", "up.", "down.", "head.", "linear."}) {
    if (op.starts_with(gemm)) return op.find("bias") != std::string::npos ? "bias gradient" : "matrix products";
  }
  for (const char* name :
       {"attention", "norm", "rope", "activation", "embedding", "cross_entropy", "adamw", "sum_squares"}) {
    if (op.find(name) != std::string::npos) return name;
  }
  return "other";
}

Status run(const Options& options) {
  KTG_ASSIGN_OR_RETURN(const std::unique_ptr<Bench> bench, Bench::create(options));
  runtime::Stream& stream = bench->stream();
  KTG_RETURN_IF_ERROR(bench->step(stream));
  const double first_loss = bench->loss(), uniform_loss = std::log(static_cast<double>(options.model.vocab_size));
  if (std::abs(first_loss - uniform_loss) > 0.5) {
    return internal_error(fmt::format("first loss {:.4f}, ln(vocab) is {:.4f}", first_loss, uniform_loss));
  }
  std::vector<double> step_ms;
  for (int64_t i = 0; i < options.warm_up + options.steps; ++i) {
    const int64_t begin = now_ns();
    KTG_RETURN_IF_ERROR(bench->step(stream));
    if (i >= options.warm_up) step_ms.push_back(static_cast<double>(now_ns() - begin) * 1e-6);
  }
  if (!(bench->loss() < first_loss))
    return internal_error(fmt::format("loss went from {} to {}", first_loss, bench->loss()));

  Profile profile;
  constexpr int kProfiled = 5;
  stream.set_observer(&profile);
  for (int i = 0; i < kProfiled; ++i) {
    profile.begin();
    KTG_RETURN_IF_ERROR(bench->step(stream));
  }
  stream.set_observer(nullptr);
  KTG_ASSIGN_OR_RETURN(const double gflops, bench->gemm_speed());

  const double tokens = static_cast<double>(options.B * options.T), ms = median(step_ms);
  const double flops = options.model.flops_per_token(options.T) * tokens;
  std::map<std::string, double> families;
  for (const auto& [op, time] : profile.times_ms()) families[family(op)] += time / kProfiled;
  fmt::print("{}, {}, {} parameters, B {} T {}\n", bench->backend().description(), options.dtype,
             bench->table().num_parameters(), options.B, options.T);
  fmt::print(
      "step {:.2f} ms (median of {}, fastest {:.2f}), {:.0f} tokens/s, {:.1f} GFLOP/s by the full-attention rule\n", ms,
      options.steps, *std::min_element(step_ms.begin(), step_ms.end()), tokens / ms * 1e3, flops / ms * 1e-6);
  fmt::print("1024^3 product: {:.1f} GFLOP/s; a step of nothing but products at that rate: {:.2f} ms\n", gflops,
             flops / gflops * 1e-6);
  fmt::print("{:<24}{:>10}{:>8}\n", "family", "ms", "%");
  double total = 0;
  for (const auto& [name, time] : families) total += time;
  for (const auto& [name, time] : families) fmt::print("{:<24}{:>10.3f}{:>8.1f}\n", name, time, 100 * time / total);
  fmt::print("\n{:<32}{:>10}\n", "operation", "ms");
  for (const auto& [op, time] : profile.times_ms()) fmt::print("{:<32}{:>10.3f}\n", op, time / kProfiled);
  if (!options.json.empty()) {
    nlohmann::json j = {{"tokens_per_second", tokens / ms * 1e3},
                        {"step_ms", ms},
                        {"gemm_gflops", gflops},
                        {"families_ms", families},
                        {"backend", bench->backend().description()},
                        {"dtype", options.dtype}};
    std::ofstream(options.json) << j.dump(1) << "\n";
  }
  return ok_status();
}

}  // namespace
}  // namespace kintsugi

int main(int argc, char** argv) {
  kintsugi::Options o;
  CLI::App app("Tokens per second of one rank's training step");
  app.add_option("--layers", o.model.num_layers);
  app.add_option("--dim", o.model.dim);
  app.add_option("--heads", o.model.num_heads);
  app.add_option("--ffn", o.model.ffn_dim);
  app.add_option("--vocab", o.model.vocab_size);
  app.add_option("--batch", o.B);
  app.add_option("--seq", o.T);
  app.add_option("--steps", o.steps);
  app.add_option("--threads", o.threads);
  app.add_option("--dtype", o.dtype)->check(CLI::IsMember({"fp32", "bf16"}));
  app.add_option("--json", o.json);
  app.add_flag("--cpu_time", o.cpu_time);
  CLI11_PARSE(app, argc, argv);
  o.model.max_seq_len = std::max(o.model.max_seq_len, o.T);
  kintsugi::use_cpu_time = o.cpu_time;
  const kintsugi::Status status = kintsugi::run(o);
  if (!status.ok()) fmt::print(stderr, "{}\n", status.to_string());
  return status.ok() ? 0 : 1;
}
