// Picks the next token from a row of logits. A pure function of (logits, parameters, position): no hidden state,
// so a seed gives the same text alone, in a batch, with any number of threads, and when a sequence is computed
// again after a preemption.
//   V vocabulary   l[i] logit of token i
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/base/status.h"

namespace kintsugi::runtime {

// How one sequence is sampled. The filters apply in this order: temperature, top_k, top_p.
struct SamplingParams {
  double temperature = 0;  // 0: greedy, the largest logit; > 0: p[i] = softmax(l / temperature)[i]
  int64_t top_k = 0;       // keep the k most probable tokens; 0: all
  double top_p = 1;        // then keep the fewest most probable tokens whose share reaches top_p; 1: all
  uint64_t seed = 0;       // all 64 bits count
  uint32_t stream = 0;     // tells apart several continuations of one prompt under one seed

  // kInvalidArgument naming the parameter, its value and what is allowed.
  Status validate() const;
};

// Keeps scratch memory of V elements between calls; one thread at a time.
class Sampler {
 public:
  // The token drawn for `position` (of the token that is drawn, counted from the sequence's start). The uniform number
  // behind it is random_uniform(seed, kSampling, stream, position). Equal logits: the lower id counts as more
  // probable, in greedy, top_k and top_p alike. params.validate() holds.
  // kFailedPrecondition naming the token when a logit is not finite; kInvalidArgument when there are no logits.
  Result<int32_t> sample(std::span<const float> logits, const SamplingParams& params, int64_t position);

  // The tokens that the last sample() chose among, ascending, and their share of the probability after the
  // filters (they add up to 1). For tests and reports; empty after a greedy choice.
  std::vector<std::pair<int32_t, double>> last_candidates() const;

 private:
  void keep_top_k(std::span<const float> logits, int64_t top_k);
  void keep_top_p(std::span<const float> logits, double top_p);

  std::vector<double> weights_;      // exp((l - max) / temperature), by token
  std::vector<int32_t> candidates_;  // tokens not filtered out
};

}  // namespace kintsugi::runtime
