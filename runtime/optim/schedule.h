// Learning rate of each optimizer step. Steps count from 1.
#pragma once

#include <cstdint>
#include <string>

#include "runtime/base/config_table.h"
#include "runtime/base/status.h"

namespace kintsugi::runtime {

struct OptimizerConfig {
  double lr = 1e-3;            // peak
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
  double weight_decay = 0.1;   // matrices only
  double clip_norm = 1.0;      // global gradient norm; 0: off
  Status validate() const;
};

struct SchedulerConfig {
  std::string kind = "cosine";  // "cosine", "linear", "wsd", "constant"
  int64_t warmup_steps = 0;     // step s <= warmup_steps has lr * s / warmup_steps
  double min_lr_ratio = 0.1;    // floor as a share of the peak, reached at the last step
  double decay_ratio = 0.2;     // wsd: share of the steps that decay (linearly)
  Status validate(int64_t steps) const;
};

void describe(ConfigTable& table, OptimizerConfig& config);
void describe(ConfigTable& table, SchedulerConfig& config);

// cosine: floor + (peak - floor) * (1 + cos(pi * p)) / 2, p = (s - warmup) / (steps - warmup).
// Pure; `steps` is the horizon the run was started with. First rate > 0, peak reached exactly, last step at the floor.
double learning_rate(const SchedulerConfig& schedule, double peak, int64_t step, int64_t steps);

}  // namespace kintsugi::runtime
