// Learning rate of each optimizer step. Steps count from 1.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/types.h"
#include "runtime/base/config_table.h"
#include "runtime/base/status.h"

namespace kintsugi::runtime {

struct OptimizerConfig {
  double lr = 1e-3;  // peak
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
  double weight_decay = 0.1;           // matrices only
  double clip_norm = 1.0;              // global gradient norm; 0: off
  std::string moments_dtype = "fp32";  // "bf16": half the memory, rounded stochastically
  bool offload = false;                // on a GPU: both moments in host memory
  kernels::DType moments() const { return kernels::dtype_named(moments_dtype); }
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

// The rate of `step` (1 ... steps) on a horizon of `steps`, the one that the run was started with. Pure: a resumed run
// gets the rates of the unbroken one. Step s of a warm-up of w > 0 has peak * s / w. Step a = max(w, 1) is the last
// one at the peak (wsd: steps - decay_ratio * steps if that is later), step `steps` is at the floor = peak *
// min_lr_ratio, and between them, p = (s - a) / (steps - a):
//   cosine: floor + (peak - floor) (1 + cos(pi p)) / 2      linear, wsd: floor + (peak - floor) (1 - p)
// A warm-up that fills the run, or a run of one step, ends at the peak. "constant" stays at the peak.
double learning_rate(const SchedulerConfig& schedule, double peak, int64_t step, int64_t steps);

}  // namespace kintsugi::runtime
