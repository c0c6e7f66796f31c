#include "runtime/decode/sampler.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "runtime/base/philox.h"

namespace kintsugi::runtime {
namespace {

std::string text_of(double x) {
  char buffer[32];
  std::snprintf(buffer, sizeof buffer, "%g", x);
  return buffer;
}

// The order in which filters keep tokens: larger logit first, the lower id among equals.
struct MoreProbable {
  std::span<const float> logits;
  bool operator()(int32_t a, int32_t b) const { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; }
};

}  // namespace

Status SamplingParams::validate() const {
  if (!std::isfinite(temperature) || temperature < 0) {
    return invalid_argument("temperature = " + text_of(temperature) + ": must be 0 (greedy) or a positive number");
  }
  if (top_k < 0) return invalid_argument("top_k = " + std::to_string(top_k) + ": must be 0 (all tokens) or more");
  if (!(top_p > 0 && top_p <= 1)) {
    return invalid_argument("top_p = " + text_of(top_p) + ": must be greater than 0 and at most 1");
  }
  return ok_status();
}

Result<int32_t> Sampler::sample(std::span<const float> logits, const SamplingParams& params, int64_t position) {
  candidates_.clear();
  if (logits.empty()) return invalid_argument("no logits to sample from");
  int32_t best = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (!std::isfinite(logits[i])) {
      return failed_precondition("the model's logit of token " + std::to_string(i) + " is " + text_of(logits[i]) +
                                 ": the weights or the computation are broken");
    }
    if (logits[i] > logits[best]) best = static_cast<int32_t>(i);
  }
  if (params.temperature == 0) return best;

  // Weights relative to the largest, so the best token's is exactly 1 and nothing overflows.
  weights_.resize(logits.size());
  const double max = logits[best];
  for (size_t i = 0; i < logits.size(); ++i) weights_[i] = std::exp((logits[i] - max) / params.temperature);
  candidates_.resize(logits.size());
  std::iota(candidates_.begin(), candidates_.end(), 0);
  if (params.top_k > 0 && params.top_k < static_cast<int64_t>(logits.size())) keep_top_k(logits, params.top_k);
  if (params.top_p < 1) keep_top_p(logits, params.top_p);

  // Inverse transform over the candidates in ascending order of id: one order of summation, whatever the filters did.
  std::sort(candidates_.begin(), candidates_.end());
  double total = 0;
  for (const int32_t id : candidates_) total += weights_[id];
  const double target =
      random_uniform(params.seed, RandomPurpose::kSampling, params.stream, static_cast<uint64_t>(position)) * total;
  double sum = 0;
  int32_t chosen = best;  // stands when rounding leaves the target at the total
  for (const int32_t id : candidates_) {
    sum += weights_[id];
    if (sum > target) {
      chosen = id;
      break;
    }
  }
  return chosen;
}

void Sampler::keep_top_k(std::span<const float> logits, int64_t top_k) {
  std::nth_element(candidates_.begin(), candidates_.begin() + (top_k - 1), candidates_.end(), MoreProbable{logits});
  candidates_.resize(static_cast<size_t>(top_k));
}

void Sampler::keep_top_p(std::span<const float> logits, double top_p) {
  double total = 0;
  std::sort(candidates_.begin(), candidates_.end());
  for (const int32_t id : candidates_) total += weights_[id];
  // All n tokens below (1 - top_p) / n of the total together have less than 1 - top_p of it, so the kept ones reach
  // top_p without them: dropping them first leaves little to sort in a large vocabulary. Half that bound is
  // far from any rounding.
  const double negligible = 0.5 * (1 - top_p) / static_cast<double>(candidates_.size()) * total;
  std::erase_if(candidates_, [&](int32_t id) { return weights_[id] < negligible; });
  std::sort(candidates_.begin(), candidates_.end(), MoreProbable{logits});
  double sum = 0;
  size_t kept = 0;
  while (kept < candidates_.size() && (kept == 0 || sum < top_p * total)) sum += weights_[candidates_[kept++]];
  candidates_.resize(kept);
}

std::vector<std::pair<int32_t, double>> Sampler::last_candidates() const {
  double total = 0;
  for (const int32_t id : candidates_) total += weights_[id];
  std::vector<std::pair<int32_t, double>> shares;
  shares.reserve(candidates_.size());
  for (const int32_t id : candidates_) shares.emplace_back(id, weights_[id] / total);
  return shares;
}

}  // namespace kintsugi::runtime
