#include "launch/step_report.h"

#include <nlohmann/json.hpp>

namespace kintsugi::launch {
namespace {
double seconds(int64_t ns) { return static_cast<double>(ns) * 1e-9; }
}  // namespace

std::string to_json(const StepReport& report) {
  const VoteOutcome& vote = report.vote;
  nlohmann::ordered_json out;  // writes what is not finite as null
  out["step"] = vote.step;
  out["generation"] = report.generation;
  out["loss_metrics/global_avg_loss"] = vote.loss_sum / static_cast<double>(vote.num_tokens);
  if (report.validation_loss) out["loss_metrics/validation_loss"] = *report.validation_loss;
  out["grad_norm"] = vote.gradient_norm;
  out["lr"] = report.lr;
  out["skipped"] = vote.skip != 0;
  out["skipped_steps"] = report.skipped_steps;
  out["tokens_seen"] = report.tokens_seen;
  out["memory/max_active(GiB)"] = static_cast<double>(report.memory_bytes) / (1 << 30);
  if (report.times && report.times->total_ns > 0) {
    const StepTimes& times = *report.times;
    const double total_s = seconds(times.total_ns);
    const double tokens_per_s = static_cast<double>(vote.num_tokens) / total_s;
    const double tflops = tokens_per_s * report.flops_per_token * 1e-12;
    out["throughput(tps)"] = tokens_per_s;
    out["tflops"] = tflops;
    if (report.peak_tflops > 0) out["mfu(%)"] = 100 * tflops / report.peak_tflops;
    out["time_metrics/end_to_end(s)"] = total_s;
    out["time_metrics/data_loading(s)"] = seconds(times.data_ns);
    out["time_metrics/data_loading(%)"] = 100 * seconds(times.data_ns) / total_s;
    out["time_metrics/forward_backward(s)"] = seconds(times.compute_ns);
    out["time_metrics/exposed_communication(s)"] = seconds(times.exposed_ns);
    out["time_metrics/vote(s)"] = seconds(times.vote_ns);
    out["time_metrics/update(s)"] = seconds(times.update_ns);
    out["time_metrics/snapshot(s)"] = seconds(times.snapshot_ns);
  }
  return out.dump();
}

}  // namespace kintsugi::launch
