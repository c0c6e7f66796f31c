// Training steps of one parallel mode: ranks are processes of this machine, one thread each, over shared memory.
//
//   sharding_bench --mode zero3 --ranks 8 [--shard 4] [--no_overlap | --update_apart] [--steps 8] --json out.json
//
// The model is the foundation's benchmark (experiments/train_speed_cpu): Llama, 4 layers, C 256, SwiGLU 704, 256 bytes;
// random tokens, 4 sequences of 256 a rank, fp32, AdamW, clipping. How it measures: all ranks must have the same
// losses, the last below the first; --warm_up steps, then the median of --steps steps of the slowest rank. Waiting is
// the time that a rank's thread spends inside the parallel mode: on the CPU that is the copying and summing itself,
// too.
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <csignal>
#include <fstream>
#include <nlohmann/json.hpp>

#include "comm/host/host_communicator.h"
#include "kernels/vote.h"
#include "parallel/communicator_groups.h"
#include "parallel/data_parallel.h"
#include "parallel/fully_sharded.h"
#include "parallel/state_memory.h"

namespace kintsugi {
namespace {

using parallel::FullySharded;

constexpr int kMostSteps = 64;

struct Options {
  runtime::ModelConfig model;
  parallel::ParallelConfig parallel;
  int ranks = 8;
  int64_t batch = 4, T = 256, steps = 8, warm_up = 3;
  bool no_overlap = false;
  bool update_apart = false;  // nothing is gathered behind the update
  std::string json;
};

// What a rank leaves in memory that it shares with the process that forked it.
struct RankReport {
  int ok = 0;
  double seconds[kMostSteps] = {}, losses[kMostSteps] = {}, inside_s[kMostSteps] = {}, update_s[kMostSteps] = {};
  int64_t heap_bytes = 0, activation_bytes = 0, peak_rss_bytes = 0;
  FullySharded::Traffic traffic;
};

Deadline soon() { return Deadline::after(std::chrono::seconds(120)); }

// Passes calls on to the mode and adds up how long they take.
class Timed final : public runtime::UnitAccess {
 public:
  explicit Timed(runtime::UnitAccess& inner) : inner_(inner) {}
  Result<Weights> acquire(int unit, runtime::Stream& stream) override {
    const Clock clock(inside_ns);
    return inner_.acquire(unit, stream);
  }
  Status release(int unit, runtime::Stream& stream) override {
    const Clock clock(inside_ns);
    return inner_.release(unit, stream);
  }
  Result<Gradients> gradients(int unit, runtime::Stream& stream) override {
    const Clock clock(inside_ns);
    return inner_.gradients(unit, stream);
  }
  Status gradients_ready(int unit, runtime::Stream& stream) override {
    const Clock clock(inside_ns);
    return inner_.gradients_ready(unit, stream);
  }
  class Clock {
   public:
    explicit Clock(int64_t& sum) : sum_(sum), began_(monotonic_ns()) {}
    ~Clock() { sum_ += monotonic_ns() - began_; }

   private:
    int64_t& sum_;
    int64_t began_;
  };
  int64_t inside_ns = 0;

 private:
  runtime::UnitAccess& inner_;
};

struct Mode {
  std::unique_ptr<parallel::ParallelMode> mode;
  FullySharded* sharded = nullptr;
};

Result<Mode> create_mode(const Options& o, int rank, const runtime::ParamTable& table, runtime::Backend& backend,
                         comm::SymmetricHeap& heap, runtime::Stream& stream) {
  if (!o.parallel.sharded()) {
    parallel::DataParallelOptions options;
    options.config = o.parallel;
    options.rank = rank;
    options.world_size = o.ranks;
    options.overlap = !o.no_overlap;
    KTG_ASSIGN_OR_RETURN(auto made, parallel::DataParallel::create(table, options, backend, heap, stream));
    return Mode{.mode = std::move(made)};
  }
  parallel::FullyShardedOptions options;
  options.config = o.parallel;
  options.rank = rank;
  options.world_size = o.ranks;
  options.overlap = !o.no_overlap;
  KTG_ASSIGN_OR_RETURN(auto made, FullySharded::create(table, options, backend, heap, stream));
  FullySharded* sharded = made.get();
  return Mode{.mode = std::move(made), .sharded = sharded};
}

Status initialize(parallel::ParallelMode& mode, const runtime::ParamTable& table, runtime::Stream& stream) {
  runtime::TrainState& state = mode.state();
  for (const runtime::StateRange& range : state.ranges) {
    runtime::init_parameters(state.weights + range.local_begin, table, /*seed=*/1, range.begin, range.count);
  }
  return mode.weights_changed(stream, soon());
}

kernels::StepInputs inputs_of(int64_t step) {
  const auto exponent = static_cast<double>(step);
  return {.step = step,
          .clip_norm = 1.0,
          .lr = 1e-3f,
          .beta1 = 0.9f,
          .beta2 = 0.95f,
          .eps = 1e-8f,
          .weight_decay = 0.1f,
          .bias_correction1 = static_cast<float>(1 - std::pow(0.9, exponent)),
          .bias_correction2 = static_cast<float>(1 - std::pow(0.95, exponent))};
}

Status run_rank(const Options& o, int rank, const std::vector<int>& fds, RankReport& report) {
  std::vector<std::unique_ptr<comm::SharedSegment>> segments;
  std::vector<comm::SharedSegment*> views;
  for (const int fd : fds) {
    KTG_ASSIGN_OR_RETURN(segments.emplace_back(), comm::SharedSegment::map(fd));
    views.push_back(segments.back().get());
  }
  KTG_ASSIGN_OR_RETURN(const parallel::Mesh mesh, parallel::Mesh::of_run(o.parallel, o.ranks));
  KTG_ASSIGN_OR_RETURN(
      const auto communicators,
      comm::create_host_communicators({1, rank, o.ranks}, views, parallel::communicator_groups(mesh, rank), {}, {}));
  const auto backend = runtime::create_cpu_backend({.num_threads = 1});
  KTG_ASSIGN_OR_RETURN(const auto stream, backend->create_stream());
  runtime::TransformerOptions options;
  options.max_tokens = o.batch * o.T;
  options.max_seq_len = o.T;
  options.one_length = true;
  report.activation_bytes = runtime::Transformer::activation_bytes(o.model, options, backend->kernels());
  KTG_ASSIGN_OR_RETURN(runtime::Buffer activations, backend->allocate(report.activation_bytes, "activations"));
  runtime::Arena arena(std::move(activations));
  KTG_ASSIGN_OR_RETURN(const auto model, runtime::Transformer::create(o.model, options, *backend, arena, *stream));
  KTG_ASSIGN_OR_RETURN(const Mode made, create_mode(o, rank, model->params(), *backend, *segments[rank], *stream));
  parallel::ParallelMode& mode = *made.mode;
  mode.set_communicators(parallel::bind_communicators(communicators));
  KTG_RETURN_IF_ERROR(initialize(mode, model->params(), *stream));
  KTG_ASSIGN_OR_RETURN(const parallel::BatchLayout layout,
                       parallel::plan_batch(o.batch * o.ranks, 0, o.parallel, rank, o.ranks));

  // The same tokens in every step, as the peers have them.
  std::vector<int32_t> ids(static_cast<size_t>(o.batch * (o.T + 1)));
  for (size_t i = 0; i < ids.size(); ++i) {
    ids[i] = static_cast<int32_t>((static_cast<uint64_t>(rank) * ids.size() + i + 1) * 0x9e3779b97f4a7c15u >> 56);
  }
  std::vector<int32_t> inputs, targets;
  for (int64_t b = 0; b < o.batch; ++b) {
    const auto row = ids.begin() + b * (o.T + 1);
    inputs.insert(inputs.end(), row, row + o.T);
    targets.insert(targets.end(), row + 1, row + o.T + 1);
  }
  Timed access(mode);
  for (int64_t step = 1; step <= o.warm_up + o.steps; ++step) {
    KTG_RETURN_IF_ERROR(communicators[0]->barrier(soon()));
    const int64_t began = monotonic_ns();
    access.inside_ns = 0;
    mode.begin_step(layout);
    mode.begin_micro_step(0);
    kernels::LossSums losses;
    KTG_RETURN_IF_ERROR(
        model->forward_backward({inputs.data(), targets.data(), o.batch, o.T}, access, &losses, *stream));
    {
      const Timed::Clock clock(access.inside_ns);
      KTG_RETURN_IF_ERROR(mode.finish_reduce(*stream, soon()));
    }
    KTG_ASSIGN_OR_RETURN(const parallel::VoteResult vote,
                         mode.vote({.step = step, .losses = std::span(&losses, 1)}, *stream, soon()));
    const kernels::AdamWScalars scalars = kernels::update_scalars(inputs_of(step), {.gradient_norm = vote.gradient_norm,
                                                                                    .loss_sum = vote.loss_sum,
                                                                                    .num_tokens = vote.num_tokens,
                                                                                    .skip = vote.skip ? 1 : 0});
    const int64_t update_began = monotonic_ns();
    KTG_RETURN_IF_ERROR(o.update_apart ? mode.update(&scalars, *stream) : mode.update_ahead(&scalars, *stream));
    report.seconds[step - 1] = static_cast<double>(monotonic_ns() - began) * 1e-9;
    report.update_s[step - 1] = static_cast<double>(monotonic_ns() - update_began) * 1e-9;
    report.inside_s[step - 1] = static_cast<double>(access.inside_ns) * 1e-9;
    report.losses[step - 1] = vote.loss_sum / static_cast<double>(vote.num_tokens);
  }
  KTG_RETURN_IF_ERROR(mode.settle(*stream, soon()));
  if (made.sharded != nullptr) report.traffic = made.sharded->traffic();
  if (made.sharded == nullptr && o.ranks > 1) {
    const auto& ddp = static_cast<const parallel::DataParallel&>(mode);
    report.traffic.all_reduces = static_cast<int64_t>(ddp.buckets().size());
    report.traffic.all_reduce_bytes = model->params().total_length() * 4;
  }
  report.heap_bytes = segments[rank]->used_bytes();
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  report.peak_rss_bytes = int64_t{usage.ru_maxrss} * 1024;
  report.ok = 1;
  return communicators[0]->barrier(soon());
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return n % 2 == 1 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

// Of the slowest rank, step by step.
double slowest(const Options& o, const RankReport* reports, double (RankReport::*series)[kMostSteps]) {
  std::vector<double> worst;
  for (int64_t s = o.warm_up; s < o.warm_up + o.steps; ++s) {
    double most = 0;
    for (int r = 0; r < o.ranks; ++r) most = std::max(most, (reports[r].*series)[s]);
    worst.push_back(most);
  }
  return median(worst);
}

nlohmann::ordered_json result_of(const Options& o, const RankReport* reports) {
  const runtime::ParamTable table = runtime::ParamTable::build(o.model);
  const parallel::StateMemory m = parallel::plan_state_memory(table, o.parallel, {kernels::DType::kF32}, o.ranks);
  const double step_s = slowest(o, reports, &RankReport::seconds),
               inside_s = slowest(o, reports, &RankReport::inside_s);
  const FullySharded::Traffic& t = reports[0].traffic;
  nlohmann::ordered_json out;
  out["mode"] = o.parallel.mode;
  out["ranks"] = o.ranks;
  out["shard"] = o.parallel.shard;
  out["overlap"] = !o.no_overlap;
  out["step_ms"] = step_s * 1e3;
  out["tokens_per_second"] = static_cast<double>(o.batch * o.T * o.ranks) / step_s;
  out["communication_ms"] = inside_s * 1e3;
  out["update_ms"] = slowest(o, reports, &RankReport::update_s) * 1e3;
  out["last_loss"] = reports[0].losses[o.warm_up + o.steps - 1];
  out["memory_bytes"] = {{"weights", m.weights_bytes},
                         {"moments", m.moments_bytes},
                         {"gradients", m.gradients_bytes},
                         {"gathered weights", m.compute_copy_bytes},
                         {"activations", reports[0].activation_bytes},
                         {"vote", m.vote_bytes}};
  out["heap_used_bytes"] = reports[0].heap_bytes;
  out["heap_planned_bytes"] = m.weights_bytes + m.moments_bytes + m.gradients_bytes + m.vote_bytes;
  out["traffic"] = {{"all_gathers", t.all_gathers},         {"all_gather_bytes", t.all_gather_bytes},
                    {"reduce_scatters", t.reduce_scatters}, {"reduce_scatter_bytes", t.reduce_scatter_bytes},
                    {"all_reduces", t.all_reduces},         {"all_reduce_bytes", t.all_reduce_bytes},
                    {"all_to_alls", t.all_to_alls},         {"all_to_all_bytes", t.all_to_all_bytes}};
  return out;
}

Status check(const Options& o, const RankReport* reports) {
  const int64_t last = o.warm_up + o.steps - 1;
  for (int r = 0; r < o.ranks; ++r) {
    if (reports[r].ok == 0) return internal_error(fmt::format("rank {} failed", r));
    for (int64_t s = 0; s <= last; ++s) {
      if (reports[r].losses[s] != reports[0].losses[s]) {
        return internal_error(fmt::format("step {}: rank {} has another loss than rank 0", s + 1, r));
      }
    }
  }
  const double first = reports[0].losses[0];
  if (std::abs(first - std::log(256.0)) < 0.5 && reports[0].losses[last] < first) return ok_status();
  return internal_error(fmt::format("losses from {} to {}", first, reports[0].losses[last]));
}

Status run(const Options& o) {
  KTG_RETURN_IF_ERROR(o.parallel.validate());
  if (o.steps + o.warm_up > kMostSteps) return invalid_argument("too many steps");
  KTG_ASSIGN_OR_RETURN(const parallel::Mesh mesh, parallel::Mesh::of_run(o.parallel, o.ranks));
  const parallel::StateMemory m =
      parallel::plan_state_memory(runtime::ParamTable::build(o.model), o.parallel, {kernels::DType::kF32}, o.ranks);
  constexpr int64_t kPieces = 4 * 64;  // each is rounded up
  const int64_t heap = m.weights_bytes + m.moments_bytes + m.gradients_bytes + m.vote_bytes + kPieces;
  std::vector<int> fds;
  for (int r = 0; r < o.ranks; ++r) {
    KTG_ASSIGN_OR_RETURN(fds.emplace_back(), comm::SharedSegment::create_fd(heap, o.ranks, r, /*reserve=*/true,
                                                                            parallel::num_channels(mesh)));
  }
  void* page = ::mmap(nullptr, sizeof(RankReport) * o.ranks, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return resource_exhausted("no memory for reports");
  auto* reports = static_cast<RankReport*>(page);
  for (int r = 0; r < o.ranks; ++r) {
    const pid_t pid = ::fork();
    if (pid < 0) return unavailable("fork failed");
    if (pid > 0) continue;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    new (&reports[r]) RankReport();
    const Status status = run_rank(o, r, fds, reports[r]);
    if (!status.ok()) {
      reports[r].ok = 0;
      fmt::print(stderr, "rank {}: {}\n", r, status.to_string());
    }
    ::_exit(0);
  }
  while (::wait(nullptr) > 0) {
  }
  KTG_RETURN_IF_ERROR(check(o, reports));
  const nlohmann::ordered_json result = result_of(o, reports);
  fmt::print("{}\n", result.dump());
  if (!o.json.empty()) std::ofstream(o.json) << result.dump(1) << "\n";
  return ok_status();
}

}  // namespace
}  // namespace kintsugi

int main(int argc, char** argv) {
  kintsugi::Options o;
  CLI::App app("Tokens per second and memory of one parallel mode");
  app.add_option("--mode", o.parallel.mode);
  app.add_option("--ranks", o.ranks)->check(CLI::Range(1, 64));
  app.add_option("--shard", o.parallel.shard);
  app.add_option("--layers", o.model.num_layers);
  app.add_option("--dim", o.model.dim);
  app.add_option("--ffn", o.model.ffn_dim);
  app.add_option("--batch", o.batch);
  app.add_option("--steps", o.steps);
  app.add_option("--warm_up", o.warm_up);
  app.add_option("--json", o.json);
  app.add_flag("--no_overlap", o.no_overlap);
  app.add_flag("--update_apart", o.update_apart);
  CLI11_PARSE(app, argc, argv);
  const kintsugi::Status status = kintsugi::run(o);
  if (!status.ok()) fmt::print(stderr, "{}\n", status.to_string());
  return status.ok() ? 0 : 1;
}
