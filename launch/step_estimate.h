// How long a step should take, from rates that were measured: products, attention and everything else one after the
// other, as the kernels run, and a share of that sum for what lies between them and for a GPU at its power limit.
#pragma once

#include <string>

#include "launch/run_config.h"

namespace kintsugi::launch {

struct StepRates {
  double product_flops = 0;  // a second
  // Of causal attention, both passes together, counting half of the square; by head size and length.
  double attention_flops_short = 0;  // head sizes below 128, fewer than 2,048 tokens
  double attention_flops_long = 0;   // head sizes below 128
  double attention_flops_wide = 0;   // head size 128
  double copy_bytes = 0;             // read and written a second by all other kernels
  double reached = 1;                // share of these rates that whole steps reach
  double host_bytes = 0;             // a second and direction between host and GPU
  std::string source;                // what was measured where, for people
};
const StepRates& h200_rates();

// Seconds of a rank's forward, backward and update on `tokens` of its own, with what training.recompute does twice.
// `updated` parameters are the rank's. With optimizer.offload the moments' way counts where it is longer than the
// update's own.
double estimate_step_s(const RunConfig& config, int64_t tokens, int64_t updated, const StepRates& rates);

}  // namespace kintsugi::launch
