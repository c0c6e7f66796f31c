#include "launch/plan_report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "launch/memory_plan.h"
#include "launch/nearest_fit.h"
#include "launch/step_estimate.h"
#include "parallel/fully_sharded.h"
#include "parallel/mesh.h"
#include "parallel/state_memory.h"
#include "runtime/cuda/cuda_backend.h"

namespace kintsugi::launch {
namespace {

constexpr double kGiB = 1 << 30;
constexpr int kMostRanks = 65536;  // far above any job
constexpr const char* kModes[] = {"ddp", "zero1", "zero2", "zero3"};

double gib(int64_t bytes) { return static_cast<double>(bytes) / kGiB; }

// What a rank sends a step, by the usual algorithms: a part of n bytes goes to each peer of an all-gather, and a sum
// over R ranks sends 2 (R - 1) / R of its bytes.
double bytes_sent(const RunConfig& config, const runtime::ParamTable& table, int world_size, int64_t num_micro_steps) {
  const double N = world_size;
  if (!config.parallelism.sharded()) return 2 * 4.0 * static_cast<double>(table.total_length()) * (N - 1) / N;
  const Result<parallel::Mesh> mesh = parallel::Mesh::of_run(config.parallelism, world_size);
  const double S = mesh->size(parallel::kShardAxis), R = mesh->size(parallel::kReplicateAxis);
  const parallel::FullySharded::Traffic t = parallel::plan_traffic(table, {.config = config.parallelism,
                                                                           .dtype = config.dtype(),
                                                                           .world_size = world_size,
                                                                           .num_micro_steps = num_micro_steps});
  return static_cast<double>(t.all_gather_bytes) * (S - 1) + static_cast<double>(t.reduce_scatter_bytes) * (S - 1) / S +
         2 * static_cast<double>(t.all_reduce_bytes) * (R - 1) / R +
         static_cast<double>(t.all_to_all_bytes) * (N - 1) / N;
}

// Without what was asked of the configured mode alone.
RunConfig in_mode(RunConfig config, const std::string& mode) {
  parallel::ParallelConfig& p = config.parallelism;
  if (mode != p.mode) {
    p.accumulation = "auto";
    p.keep_after_forward.clear();
  }
  p.mode = mode;
  if (mode == "ddp") {
    p.shard = p.replicate = 0;
    p.gradient_dtype = "fp32";
  }
  return config;
}

// What each way to add up micro-steps costs, where there is a choice.
std::string price_of_accumulation(const RunConfig& config, const runtime::ParamTable& table, int world_size,
                                  int64_t num_micro_steps) {
  if (!config.parallelism.sharded() || config.parallelism.fixed_order() || world_size == 1) return "";
  std::string out = fmt::format("gradients of {} micro-step{}", num_micro_steps, num_micro_steps == 1 ? "" : "s");
  for (const char* const way : {"whole", "shards"}) {
    RunConfig c = config;
    c.parallelism.accumulation = way;
    const parallel::StateMemory memory = parallel::plan_state_memory(table, c.parallelism, c.state_types(), world_size);
    out += fmt::format("{} parallelism.accumulation = \"{}\": {:.1f} MiB, {:.1f} sent", way[0] == 'w' ? "," : ";", way,
                       static_cast<double>(memory.gradients_bytes) / (1 << 20),
                       bytes_sent(c, table, world_size, num_micro_steps) / (1 << 20));
  }
  return out + fmt::format("; here {}\n", config.parallelism.accumulates_whole() ? "whole" : "shards");
}

constexpr double kMiB = 1 << 20;

// Of a GPU's memory, what the driver keeps for a process that uses it (measured: 0.5 GiB).
constexpr double kContextGib = 0.6;
constexpr double kH200Gib = 139.8;
// What a rank sends a second. On a GPU nobody has measured more than one of them here: NVLink 4 carries 450 each way.
constexpr double kGpuLinkGbS = 300;
constexpr double kCpuTflops = 0.2, kCpuLinkGbS = 1.6;

// Where the plan is made for: GPUs or processors that need not be here.
struct Machine {
  bool gpu = false;
  double gpu_gib = 0, host_gib = 0;
  runtime::CudaSizes sizes;
  double tflops = 0, link_gb_s = 0;  // tflops 0: h200_rates()

  MemoryPlan plan(const RunConfig& config, int world_size) const {
    if (!gpu) return plan_memory(config, world_size);
    return plan_memory(config, world_size,
                       PlanDevice{.kernels = sizes.kernels != nullptr ? sizes.kernels : &kernels::cpu::kernels(),
                                  .library_bytes = sizes.library_bytes,
                                  .gpus_on_host = world_size});
  }
  double used_gib(const MemoryPlan& plan) const { return gib(gpu ? plan.device_bytes() : plan.total_bytes()); }
  // Empty: it fits.
  std::string too_much(const RunConfig& config, int world_size) const {
    std::vector<std::string> what;
    const double over = used_gib(plan(config, world_size)) + kContextGib - gpu_gib;
    if (gpu && over > 0) what.push_back(fmt::format("{:.2f} GiB of GPU memory too much", over));
    const double host_over = gib(host_bytes_of_job(config, world_size)) - host_gib;
    if (host_over > 0) what.push_back(fmt::format("{:.2f} GiB of host memory too much", host_over));
    return what.empty() ? "" : fmt::format("no: {}", fmt::join(what, ", "));
  }
};

Machine machine_of(const RunConfig& config, const PlanRequest& request) {
  Machine m;
  m.gpu = request.gpu_gib > 0 || config.on_cuda();
  m.gpu_gib = request.gpu_gib > 0 ? request.gpu_gib : kH200Gib;
  m.host_gib = request.host_gib > 0 ? request.host_gib : gib(host_memory_bytes());
  m.sizes = runtime::cuda_sizes();
  m.tflops = request.tflops > 0 ? request.tflops : m.gpu ? 0 : kCpuTflops;
  m.link_gb_s = request.link_gb_s > 0 ? request.link_gb_s : m.gpu ? kGpuLinkGbS : kCpuLinkGbS;
  return m;
}

// Where the numbers come from.
std::string sources(const Machine& m, const PlanRequest& request) {
  std::string out;
  if (m.tflops > 0) {
    out = fmt::format("step times from {:.4g} TFLOP/s a rank ({})", m.tflops,
                      request.tflops > 0 ? "as asked" : "a core's products, measured");
  } else {
    out = "step times from rates of " + h200_rates().source;
  }
  out += fmt::format("\n  {:.4g} GB/s sent by a rank ({})\n", m.link_gb_s,
                     request.link_gb_s > 0 ? "as asked"
                     : m.gpu               ? "assumed"
                                           : "8 ranks of two cores, 64 MiB, measured");
  if (m.gpu) {
    out += m.sizes.kernels != nullptr
               ? fmt::format("activations as the GPU's kernels need them; {:.1f} GiB of it are the driver's\n",
                             kContextGib)
               : "activations as the CPU's kernels need them: this program was built without CUDA\n";
  }
  return out;
}

double step_seconds(const RunConfig& config, const runtime::ParamTable& table, int world_size, const Machine& m,
                    double sent) {
  const double tokens = static_cast<double>(config.training.global_batch_size * config.training.seq_len) / world_size;
  const auto mesh = parallel::Mesh::of_run(config.parallelism, world_size);
  const int shards = config.parallelism.sharded() ? mesh->size(parallel::kShardAxis) : 1;
  const double compute_s =
      m.tflops > 0 ? config.model.flops_per_token(config.training.seq_len) * tokens / (m.tflops * 1e12)
                   : estimate_step_s(config, static_cast<int64_t>(tokens), table.total_length() / shards, h200_rates());
  const double sending_s = sent / (m.link_gb_s * 1e9);
  return config.comm.overlap ? std::max(compute_s, sending_s) : compute_s + sending_s;
}

Result<std::string> mode_table(const RunConfig& base, const runtime::ParamTable& table, int N, const Machine& m) {
  std::string out =
      fmt::format("{:<8} {:>9} {:>9} {:>9} {:>11} {:>9} {:>10} {:>9} {:>11}  {}\n", "mode", "weights", "moments",
                  "gradients", "activations", m.gpu ? "GPU" : "rank", "snapshots", "sent/step", "step", "fits");
  std::vector<std::string> modes{base.parallelism.mode};
  for (const char* mode : kModes) {
    if (mode != base.parallelism.mode) modes.emplace_back(mode);
  }
  for (const std::string& mode : modes) {
    const RunConfig c = in_mode(base, mode);
    if (const Status valid = c.validate(N); !valid.ok()) {
      out += fmt::format("{:<8} {}\n", mode, valid.message());
      continue;
    }
    const MemoryPlan plan = m.plan(c, N);
    const auto of = [&](std::initializer_list<const char*> kinds) {
      int64_t bytes = 0;
      for (const MemoryPlan::Item& item : plan.items) {
        if (std::find(kinds.begin(), kinds.end(), item.kind) != kinds.end()) bytes += item.bytes;
      }
      return static_cast<double>(bytes) / kMiB;
    };
    KTG_ASSIGN_OR_RETURN(const parallel::BatchLayout layout, c.batch_layout(0, N));
    const double sent = bytes_sent(c, table, N, layout.num_micro_steps);
    const std::string too_much = m.too_much(c, N);
    out += fmt::format("{:<8} {:>9.1f} {:>9.1f} {:>9.1f} {:>11.1f} {:>9.1f} {:>10.1f} {:>9.1f} {:>8.1f} ms  {}\n", mode,
                       of({"weights", "compute copy", "gathered"}), of({"moments"}), of({"gradients"}),
                       of({"activations"}), 1024 * m.used_gib(plan), of({"snapshots"}), sent / kMiB,
                       1e3 * step_seconds(c, table, N, m, sent), too_much.empty() ? "yes" : too_much);
  }
  return out + "MiB of one rank; the configured mode first. Snapshots lie in host memory" +
         (base.optimizer.offload ? ", and so do the moments.\n" : ".\n");
}

// The configured mode with each type and place of the moments and each recomputation: GiB of a GPU, and a step's time.
Result<std::string> settings_table(const RunConfig& base, const runtime::ParamTable& table, int N, const Machine& m) {
  std::string out = fmt::format("\n{:<24} {:>22} {:>22} {:>22} {:>22}\n", "GiB of a GPU, and a step", "recompute none",
                                "norms_and_activations", "attention", "block");
  for (const bool offload : {false, true}) {
    for (const char* const dtype : {"fp32", "bf16"}) {
      RunConfig c = base;
      c.optimizer.moments_dtype = dtype;
      c.optimizer.offload = offload;
      out += fmt::format("{:<24}", fmt::format("{} moments{}", dtype, offload ? ", offloaded" : ""));
      for (const char* const recompute : {"none", "norms_and_activations", "attention", "block"}) {
        c.training.recompute = recompute;
        KTG_ASSIGN_OR_RETURN(const parallel::BatchLayout layout, c.batch_layout(0, N));
        const double step_s = step_seconds(c, table, N, m, bytes_sent(c, table, N, layout.num_micro_steps));
        out += fmt::format(" {:>22}", fmt::format("{:.1f}{} {:.0f} ms", m.used_gib(m.plan(c, N)),
                                                  m.too_much(c, N).empty() ? "" : " (no)", 1e3 * step_s));
      }
      out += "\n";
    }
  }
  return out + "(no): does not fit, with what the host must hold.\n";
}

}  // namespace

Status check_host_memory(const RunConfig& config, int world_size, int64_t host_bytes) {
  const int64_t needed = host_bytes_of_job(config, world_size);
  if (needed <= host_bytes) return ok_status();
  const auto fits = [&](const RunConfig& c) { return host_bytes_of_job(c, world_size) <= host_bytes; };
  return invalid_argument(
      fmt::format("parallelism.mode = \"{}\": {} rank(s) need {:.2f} GiB of this host's memory, it has {:.2f}: {:.2f} "
                  "GiB too much; {}",
                  config.parallelism.mode, world_size, gib(needed), gib(host_bytes), gib(needed - host_bytes),
                  nearest_fit(config, world_size, fits)));
}

Result<std::string> report_plan(const RunConfig& config, const PlanRequest& request) {
  const int N = request.world_size;
  if (N < 1 || N > kMostRanks) {
    return invalid_argument(fmt::format("--world-size {}: must be from 1 to {}", N, kMostRanks));
  }
  const Machine m = machine_of(config, request);
  RunConfig base = config;
  base.device = m.gpu ? "cuda" : "cpu";
  KTG_RETURN_IF_ERROR(base.validate(N));
  const runtime::ParamTable table = runtime::ParamTable::build(base.model);
  std::string out =
      fmt::format("{} parameters, {} rank{}, {}; host {:.1f} GiB\n", table.num_parameters(), N, N == 1 ? "" : "s",
                  m.gpu ? fmt::format("a GPU of {:.1f} GiB each", m.gpu_gib) : "CPU", m.host_gib);
  out += sources(m, request) + "\n";
  KTG_ASSIGN_OR_RETURN(const std::string modes, mode_table(base, table, N, m));
  KTG_ASSIGN_OR_RETURN(const parallel::BatchLayout layout, base.batch_layout(0, N));
  out += modes + price_of_accumulation(base, table, N, layout.num_micro_steps);
  if (!m.gpu) return out;
  KTG_ASSIGN_OR_RETURN(const std::string settings, settings_table(base, table, N, m));
  out += settings;
  if (!m.too_much(base, N).empty()) {
    out += nearest_fit(base, N, [&](const RunConfig& c) { return m.too_much(c, N).empty(); }) + "\n";
  }
  return out;
}

}  // namespace kintsugi::launch
