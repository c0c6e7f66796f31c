#include "runtime/optim/schedule.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numbers>

namespace kintsugi::runtime {
namespace {

Status check_range(const char* key, double value, double least, double most, const char* allowed) {
  if (value >= least && value <= most) return ok_status();  // false for NaN
  return invalid_argument(fmt::format("{} = {}: must be {}", key, value, allowed));
}

}  // namespace

Status OptimizerConfig::validate() const {
  KTG_RETURN_IF_ERROR(check_range("optimizer.lr", lr, 0, 1e3, "in 0 .. 1000"));
  KTG_RETURN_IF_ERROR(check_range("optimizer.beta1", beta1, 0, std::nextafter(1.0, 0.0), "at least 0 and below 1"));
  KTG_RETURN_IF_ERROR(check_range("optimizer.beta2", beta2, 0, std::nextafter(1.0, 0.0), "at least 0 and below 1"));
  KTG_RETURN_IF_ERROR(check_range("optimizer.eps", eps, 1e-30, 1, "in 1e-30 .. 1"));
  KTG_RETURN_IF_ERROR(check_range("optimizer.weight_decay", weight_decay, 0, 1e3, "in 0 .. 1000"));
  return check_range("optimizer.clip_norm", clip_norm, 0, 1e30, "at least 0 (0: off)");
}

Status SchedulerConfig::validate(int64_t steps) const {
  if (kind != "cosine" && kind != "linear" && kind != "wsd" && kind != "constant") {
    return invalid_argument(
        fmt::format("lr_scheduler.kind = \"{}\": must be \"cosine\", \"linear\", \"wsd\" or \"constant\"", kind));
  }
  if (warmup_steps < 0 || warmup_steps > steps) {
    return invalid_argument(
        fmt::format("lr_scheduler.warmup_steps = {}: must lie in 0 .. training.steps = {}", warmup_steps, steps));
  }
  KTG_RETURN_IF_ERROR(check_range("lr_scheduler.min_lr_ratio", min_lr_ratio, 0, 1, "in 0 .. 1"));
  return check_range("lr_scheduler.decay_ratio", decay_ratio, 0, 1, "in 0 .. 1");
}

void describe(ConfigTable& table, OptimizerConfig& c) {
  table.add("optimizer.lr", &c.lr, "peak learning rate; 3e-4 suits models above 100M parameters");
  table.add("optimizer.beta1", &c.beta1, "decay of the first moment");
  table.add("optimizer.beta2", &c.beta2, "decay of the second moment");
  table.add("optimizer.eps", &c.eps, "added to the root of the second moment");
  table.add("optimizer.weight_decay", &c.weight_decay, "decoupled decay, on matrices only");
  table.add("optimizer.clip_norm", &c.clip_norm, "largest global gradient norm; 0: off");
  table.add("optimizer.moments_dtype", &c.moments_dtype,
            "how both moments are kept; bf16: half the memory, rounded stochastically", {"fp32", "bf16"});
  table.add("optimizer.offload", &c.offload,
            "on a GPU: keep both moments in host memory, and bring them bucket by bucket while an update runs");
}

void describe(ConfigTable& table, SchedulerConfig& c) {
  table.add("lr_scheduler.kind", &c.kind, "shape of the learning rate after the warm-up",
            {"cosine", "linear", "wsd", "constant"});
  table.add("lr_scheduler.warmup_steps", &c.warmup_steps, "steps of linear warm-up; the last of them has the peak");
  table.add("lr_scheduler.min_lr_ratio", &c.min_lr_ratio, "floor as a share of the peak, reached at the last step");
  table.add("lr_scheduler.decay_ratio", &c.decay_ratio, "wsd: share of the steps that decay, at the end");
}

double learning_rate(const SchedulerConfig& schedule, double peak, int64_t step, int64_t steps) {
  const int64_t warmup = schedule.warmup_steps;
  if (step <= warmup && warmup > 0) {
    return step == warmup ? peak : peak * static_cast<double>(step) / static_cast<double>(warmup);
  }
  if (schedule.kind == "constant") return peak;
  const double floor = peak * schedule.min_lr_ratio;
  // The decay runs from the last step at the peak to the last step of the run. Without a warm-up the first step is
  // at the peak, so that a rate is never 0 before the end.
  int64_t last_at_peak = std::max<int64_t>(warmup, 1);
  if (schedule.kind == "wsd") {
    const auto decay_steps = static_cast<int64_t>(std::llround(schedule.decay_ratio * static_cast<double>(steps)));
    last_at_peak = std::max(last_at_peak, steps - decay_steps);
  }
  if (step <= last_at_peak) return peak;
  if (step >= steps) return floor;
  const double p = static_cast<double>(step - last_at_peak) / static_cast<double>(steps - last_at_peak);
  if (schedule.kind == "cosine") return floor + (peak - floor) * (1 + std::cos(std::numbers::pi * p)) / 2;
  return floor + (peak - floor) * (1 - p);
}

}  // namespace kintsugi::runtime
