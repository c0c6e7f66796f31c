// kernels/sampling.h as plain loops.
#include "kernels/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels/philox.h"
#include "kernels/reference/storage.h"

namespace kintsugi::kernels::reference {
namespace {

int32_t draw(const std::vector<double>& logits, const SequenceSampling& how, int64_t position) {
  const auto V = static_cast<int32_t>(logits.size());
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  for (const int32_t i : order) {
    if (!std::isfinite(logits[i])) return -1 - i;
  }
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
  if (how.temperature == 0) return order[0];
  const auto weight = [&](int32_t i) { return std::exp((logits[i] - logits[order[0]]) / how.temperature); };
  if (how.top_k > 0 && how.top_k < V) order.resize(static_cast<size_t>(how.top_k));
  if (how.top_p < 1) {
    double total = 0, sum = 0;
    for (const int32_t i : order) total += weight(i);
    size_t kept = 0;
    while (kept < order.size() && (kept == 0 || sum < how.top_p * total)) sum += weight(order[kept++]);
    order.resize(kept);
  }
  const int32_t best = order[0];
  std::sort(order.begin(), order.end());
  double total = 0, sum = 0;
  for (const int32_t i : order) total += weight(i);
  const double target = philox_uniform(how.seed, kSamplingPurpose, how.stream, static_cast<uint64_t>(position)) * total;
  for (const int32_t i : order) {
    sum += weight(i);
    if (sum > target) return i;
  }
  return best;  // rounding left the target at the total
}

KernelError sample(int32_t* ids, const void* logits, const SequenceSampling* sampling, const int32_t* positions,
                   int64_t S, int64_t V, DType dtype, StreamHandle) {
  return for_dtype(dtype, [&]<class T>(T) {
    std::vector<double> row(static_cast<size_t>(V));
    for (int64_t s = 0; s < S; ++s) {
      for (int64_t i = 0; i < V; ++i) row[i] = get(static_cast<const T*>(logits)[s * V + i]);
      ids[s] = draw(row, sampling[s], positions[s] + int64_t{1});
    }
  });
}

KernelError advance(const DecodeInputs& in, const int32_t* drawn, int64_t S, int64_t kv_block_tokens,
                    int64_t block_table_width, StreamHandle) {
  for (int64_t s = 0; s < S; ++s) {
    if (in.context_lens[s] == 0) {
      in.ids[s] = 0;
      in.positions[s] = 0;
      in.slots[s] = -1;
      continue;
    }
    const int64_t position = ++in.positions[s];
    in.context_lens[s] += 1;
    in.ids[s] = std::max(drawn[s], 0);
    in.slots[s] = in.block_tables[s * block_table_width + position / kv_block_tokens] * kv_block_tokens +
                  position % kv_block_tokens;
  }
  return kKernelOk;
}

int64_t max_vocab() { return std::numeric_limits<int32_t>::max(); }

}  // namespace

const SamplingKernels& sampling() {
  static constexpr SamplingKernels kTable{sample, advance, max_vocab};
  return kTable;
}

}  // namespace kintsugi::kernels::reference
