#include "parallel/batch_layout.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string>
#include <vector>

#include "parallel/divisors.h"

namespace kintsugi::parallel {
namespace {

// Far above any batch, far below where its product with a number of ranks overflows.
constexpr int64_t kMaxGlobalBatch = int64_t{1} << 30;

// "20 or 25": the nearest multiples of `unit`, at least one of it.
std::string nearest_multiples(int64_t value, int64_t unit) {
  const int64_t below = value / unit * unit;
  return below == 0 ? std::to_string(unit) : fmt::format("{} or {}", below, below + unit);
}

}  // namespace

Result<BatchLayout> plan_batch(int64_t global_batch, int64_t micro_batch_size, const ParallelConfig& config, int rank,
                               int world_size) {
  KTG_RETURN_IF_ERROR(config.validate());
  if (global_batch < 1 || global_batch > kMaxGlobalBatch) {
    return invalid_argument(
        fmt::format("training.global_batch_size = {}: must lie in 1 .. {}", global_batch, kMaxGlobalBatch));
  }
  if (micro_batch_size < 0 || micro_batch_size > kMaxGlobalBatch) {
    return invalid_argument(
        fmt::format("training.micro_batch_size = {}: must lie in 1 .. {}, or be 0 for a rank's whole share",
                    micro_batch_size, kMaxGlobalBatch));
  }
  const int64_t N = world_size, V = config.virtual_shards;
  if (config.fixed_order()) {
    if (global_batch % V != 0) {
      return invalid_argument(fmt::format(
          "training.global_batch_size = {}: parallelism.virtual_shards = {} does not divide it; a batch of {} would "
          "fit, or one of {} shards",
          global_batch, V, nearest_multiples(global_batch, V), fmt::join(divisors(global_batch), ", ")));
    }
    if (V < N) {
      return invalid_argument(fmt::format(
          "parallelism.virtual_shards = {}: {} ranks need at least {} (reduce_order = \"fixed\" gives each rank whole "
          "shards)",
          V, N, N));
    }
  }
  if (global_batch % N != 0) {
    return invalid_argument(
        fmt::format("training.global_batch_size = {}: {} ranks do not divide it; a batch of {} would fit, or {} ranks",
                    global_batch, N, nearest_multiples(global_batch, N), fmt::join(divisors(global_batch), ", ")));
  }
  BatchLayout layout;
  layout.global_batch = global_batch;
  if (config.fixed_order()) {
    const int64_t begin = rank * V / N, end = (rank + 1) * V / N;
    const bool interleaved = config.sharded();
    layout.micro_batch = global_batch / V;
    layout.num_micro_steps = interleaved ? (V + N - 1) / N : end - begin;
    layout.num_busy_micro_steps = interleaved ? (V - rank + N - 1) / N : end - begin;
    layout.first_sample = (interleaved ? rank : begin) * layout.micro_batch;
    layout.sample_stride = (interleaved ? N : 1) * layout.micro_batch;
    layout.num_shards = V;
    layout.interleaved = interleaved;
    return layout;
  }
  const int64_t share = global_batch / N;
  layout.micro_batch = micro_batch_size == 0 ? share : micro_batch_size;
  if (share % layout.micro_batch != 0) {
    return invalid_argument(fmt::format(
        "training.micro_batch_size = {}: the {} sequences of a rank (batch {} over {} ranks) are not a multiple of it; "
        "a micro-batch of {} would fit, or a global batch of {}",
        micro_batch_size, share, global_batch, N, fmt::join(divisors(share), ", "),
        nearest_multiples(global_batch, N * micro_batch_size)));
  }
  layout.num_micro_steps = layout.num_busy_micro_steps = share / layout.micro_batch;
  layout.first_sample = rank * share;
  layout.sample_stride = layout.micro_batch;
  return layout;
}

}  // namespace kintsugi::parallel
