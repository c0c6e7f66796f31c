#include "launch/plan_report.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>

#include "launch/memory_plan.h"
#include "parallel/fully_sharded.h"
#include "parallel/mesh.h"
#include "parallel/state_memory.h"
#include "runtime/base/file_system.h"

namespace kintsugi::launch {
namespace {

constexpr double kGiB = 1 << 30;
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

// Of all ranks on one host: each rank's segment, and what its worker and each of its spares take for themselves.
int64_t host_bytes_of(const RunConfig& config, int world_size) {
  const MemoryPlan plan = plan_memory(config, world_size);
  return world_size * (plan.heap_bytes() + (1 + config.recovery.spares) * plan.private_bytes());
}

// The first mode, or without spares, that fits; empty: none.
std::string cure(const RunConfig& config, int world_size, int64_t host_bytes) {
  for (const char* mode : kModes) {
    const RunConfig c = in_mode(config, mode);
    if (c.validate(world_size).ok() && host_bytes_of(c, world_size) <= host_bytes) {
      return fmt::format("parallelism.mode = \"{}\" would fit", mode);
    }
  }
  RunConfig c = in_mode(config, "zero3");
  c.recovery.spares = c.recovery.snapshot_every = c.checkpoint.every = 0;
  c.training.recompute = "block";
  if (c.validate(world_size).ok() && host_bytes_of(c, world_size) <= host_bytes) {
    return "parallelism.mode = \"zero3\" with recovery.spares = 0, recovery.snapshot_every = 0, checkpoint.every = 0 "
           "and "
           "training.recompute = \"block\" would fit";
  }
  return "no mode fits";
}

}  // namespace

int64_t host_memory_bytes() {
  int64_t bytes = static_cast<int64_t>(::sysconf(_SC_PHYS_PAGES)) * ::sysconf(_SC_PAGE_SIZE);
  if (const Result<std::string> limit = FileSystem::posix().read_file("/sys/fs/cgroup/memory.max"); limit.ok()) {
    int64_t value = 0;
    if (std::from_chars(limit->data(), limit->data() + limit->size(), value).ec == std::errc() && value > 0) {
      bytes = std::min(bytes, value);
    }
  }
  return bytes;
}

Status check_host_memory(const RunConfig& config, int world_size, int64_t host_bytes) {
  const int64_t needed = host_bytes_of(config, world_size);
  if (needed <= host_bytes) return ok_status();
  return invalid_argument(
      fmt::format("parallelism.mode = \"{}\": {} rank(s) need {:.2f} GiB of this host's memory, it has {:.2f}: {:.2f} "
                  "GiB too much; {}",
                  config.parallelism.mode, world_size, gib(needed), gib(host_bytes), gib(needed - host_bytes),
                  cure(config, world_size, host_bytes)));
}

Result<std::string> report_plan(const RunConfig& config, const PlanRequest& request) {
  const int N = request.world_size;
  RunConfig base = config;
  const bool gpu = request.gpu_gib > 0;
  base.device = "cpu";  // nothing is started: the same arithmetic for all
  KTG_RETURN_IF_ERROR(base.validate(N));
  const runtime::ParamTable table = runtime::ParamTable::build(base.model);
  const double host_gib = request.host_gib > 0 ? request.host_gib : gib(host_memory_bytes());
  const double tflops = request.tflops > 0 ? request.tflops : gpu ? 530 : 0.2;
  const double link = request.link_gb_s > 0 ? request.link_gb_s : gpu ? 300 : 1.6;
  std::string out =
      fmt::format("{} parameters, {} rank{}, {}; host {:.1f} GiB\n", table.num_parameters(), N, N == 1 ? "" : "s",
                  gpu ? fmt::format("a GPU of {:.1f} GiB each", request.gpu_gib) : "CPU", host_gib);
  out += fmt::format("step times from {:.4g} TFLOP/s and {:.4g} GB/s a rank\n\n", tflops, link);
  out += fmt::format("{:<8} {:>9} {:>9} {:>9} {:>11} {:>9} {:>10} {:>9} {:>11}  {}\n", "mode", "weights", "moments",
                     "gradients", "activations", gpu ? "GPU" : "rank", "snapshots", "sent/step", "step", "fits");
  const double tokens = static_cast<double>(base.training.global_batch_size * base.training.seq_len) / N;
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
    const MemoryPlan plan = plan_memory(c, N);
    const auto of = [&](std::initializer_list<const char*> kinds) {
      int64_t bytes = 0;
      for (const MemoryPlan::Item& item : plan.items) {
        if (std::find(kinds.begin(), kinds.end(), item.kind) != kinds.end()) bytes += item.bytes;
      }
      return gib(bytes);
    };
    const double snapshots = of({"snapshots"});
    const double rank = gib(plan.total_bytes()) - (gpu ? snapshots : 0);
    const double on_host = gpu ? N * snapshots : gib(host_bytes_of(c, N));
    std::string fits;
    if (gpu && rank > request.gpu_gib)
      fits = fmt::format("no: {:.2f} GiB of GPU memory too much", rank - request.gpu_gib);
    if (on_host > host_gib) {
      fits += fmt::format("{}{:.2f} GiB of host memory too much", fits.empty() ? "no: " : ", ", on_host - host_gib);
    }
    KTG_ASSIGN_OR_RETURN(const parallel::BatchLayout layout, c.batch_layout(0, N));
    const double sent = bytes_sent(c, table, N, layout.num_micro_steps);
    const double compute_s = c.model.flops_per_token(c.training.seq_len) * tokens / (tflops * 1e12);
    const double sending_s = sent / (link * 1e9);
    const double step_s = c.comm.overlap ? std::max(compute_s, sending_s) : compute_s + sending_s;
    constexpr double kMiB = 1024;  // of a GiB
    out += fmt::format("{:<8} {:>9.1f} {:>9.1f} {:>9.1f} {:>11.1f} {:>9.1f} {:>10.1f} {:>9.1f} {:>8.1f} ms  {}\n", mode,
                       kMiB * of({"weights", "compute copy", "gathered"}), kMiB * of({"moments"}),
                       kMiB * of({"gradients"}), kMiB * of({"activations"}), kMiB * rank, kMiB * snapshots,
                       kMiB * sent / kGiB, step_s * 1e3, fits.empty() ? "yes" : fits);
  }
  out += "MiB of one rank; the configured mode first. Snapshots lie in host memory.\n";
  KTG_ASSIGN_OR_RETURN(const parallel::BatchLayout layout, base.batch_layout(0, N));
  return out + price_of_accumulation(base, table, N, layout.num_micro_steps);
}

}  // namespace kintsugi::launch
