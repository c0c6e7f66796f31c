// A transformer written down as plainly as possible, in double precision: what the real one is tested against.
// It shares nothing with runtime/model but the names and places of the parameters.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/model/param_table.h"

namespace kintsugi::runtime::testing {

// Logits (B * T, V) of the model with flat weights `w` (the whole parameter space).
std::vector<double> plain_logits(const ModelConfig& config, const ParamTable& table, const std::vector<double>& w,
                                 std::span<const int32_t> ids, int64_t B, int64_t T);

// Sum of the losses over targets >= 0.
double plain_loss(const ModelConfig& config, const ParamTable& table, const std::vector<double>& w,
                  std::span<const int32_t> ids, std::span<const int32_t> targets, int64_t B, int64_t T);

}  // namespace kintsugi::runtime::testing
