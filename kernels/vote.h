// The vote on a device: what each rank brings to the one exchange between the reduced gradients and the update, how
// the ranks' records are counted, and the gate through which a step becomes part of the state. The arithmetic is one
// set of functions for host and device, so both come to the same bits.
//
// A rank's record is a header, then `losses_per_rank` sums of losses, then the sums of squares of the blocks of the
// gradient that it counts, unit by unit. Records of all ranks follow each other in rank order. Rank r is shard
// r % num_shards of replica r / num_shards; of a unit's blocks a shard has ceil(blocks / num_shards) that follow each
// other, and its replicas share them in the same way.
#pragma once

#include <cmath>

#include "kernels/optimizer.h"
#include "kernels/types.h"

#ifdef __CUDACC__
#define KTG_HOST_DEVICE __host__ __device__
#else
#define KTG_HOST_DEVICE
#endif

namespace kintsugi::kernels {

struct LossSums {
  double loss = 0;         // sum over valid targets, natural log
  int64_t num_tokens = 0;  // valid targets
};

struct VoteHeader {
  int64_t step;
  int32_t num_losses;
  int32_t stop_requested;
};

struct VoteShape {
  int64_t num_shards = 1, num_replicas = 1;
  int64_t num_units = 1;
  int64_t blocks_per_unit = 1;
  int64_t losses_per_rank = 1;  // the most that any rank brings
  bool interleaved = false;     // loss i of rank r is the (i N + r)-th of all; otherwise ranks' follow each other

  KTG_HOST_DEVICE int64_t world_size() const { return num_shards * num_replicas; }
  KTG_HOST_DEVICE int64_t blocks_per_shard() const { return (blocks_per_unit + num_shards - 1) / num_shards; }
  KTG_HOST_DEVICE int64_t blocks_per_rank() const { return (blocks_per_shard() + num_replicas - 1) / num_replicas; }
  KTG_HOST_DEVICE int64_t losses_offset() const { return static_cast<int64_t>(sizeof(VoteHeader)); }
  KTG_HOST_DEVICE int64_t partials_offset() const {
    return losses_offset() + losses_per_rank * static_cast<int64_t>(sizeof(LossSums));
  }
  // A multiple of 64.
  KTG_HOST_DEVICE int64_t record_bytes() const {
    const int64_t partials = num_units * blocks_per_rank();
    return (partials_offset() + partials * static_cast<int64_t>(sizeof(double)) + 63) / 64 * 64;
  }
};

struct VoteCount {
  double gradient_norm = 0;  // of the mean gradient over all valid targets, before clipping
  double loss_sum = 0;
  int64_t num_tokens = 0;
  int32_t skip = 0;            // something was not finite, or no target was valid: no update
  int32_t stop_requested = 0;  // by any rank
  int32_t odd_rank = -1;       // a rank whose record is of another step; -1: none
};

// Everything that the host says of a step. On a device it lies in device memory, so that recorded graphs read it anew.
struct StepInputs {
  int64_t step = 0;
  int64_t generation = 0;  // the gate is shut once the stop word is greater
  double clip_norm = 0;    // 0: off
  float lr = 0, beta1 = 0, beta2 = 0, eps = 0, weight_decay = 0;
  float bias_correction1 = 0, bias_correction2 = 0;
  int32_t stop_requested = 0;  // of this rank
  uint64_t seed = 0;           // of the run: bf16 moments are rounded by it
};

// What the gate makes known, in host memory that kernels write: `step` last.
struct VotePublication {
  VoteCount count;
  int64_t step = -1;
};

// The unit's sum of squares: its blocks in ascending order, whoever counted which. `records` is 8-byte aligned.
KTG_HOST_DEVICE inline double unit_squares(const VoteShape& shape, const void* records, int64_t unit) {
  const int64_t shard_blocks = shape.blocks_per_shard(), rank_blocks = shape.blocks_per_rank();
  double sum = 0;
  for (int64_t s = 0; s < shape.num_shards; ++s) {
    for (int64_t r = 0; r < shape.num_replicas; ++r) {
      const char* record = static_cast<const char*>(records) + (r * shape.num_shards + s) * shape.record_bytes();
      const auto* partials = reinterpret_cast<const double*>(record + shape.partials_offset()) + unit * rank_blocks;
      int64_t count = shard_blocks - r * rank_blocks;
      const int64_t left = shape.blocks_per_unit - s * shard_blocks - r * rank_blocks;
      if (count > left) count = left;
      if (count > rank_blocks) count = rank_blocks;
      for (int64_t b = 0; b < count; ++b) sum += partials[b];
    }
  }
  return sum;
}

// squares_of(u) is unit_squares() of unit u. Sums run in ascending order of units, and of losses.
template <class SquaresOf>
KTG_HOST_DEVICE inline VoteCount count_votes(const VoteShape& shape, const void* records, int64_t step,
                                             const SquaresOf& squares_of) {
  VoteCount count;
  const int64_t N = shape.world_size();
  for (int64_t i = 0; i < N * shape.losses_per_rank; ++i) {
    const int64_t rank = shape.interleaved ? i % N : i / shape.losses_per_rank;
    const int64_t index = shape.interleaved ? i / N : i % shape.losses_per_rank;
    const char* record = static_cast<const char*>(records) + rank * shape.record_bytes();
    const auto& header = *reinterpret_cast<const VoteHeader*>(record);
    if (header.step != step) count.odd_rank = static_cast<int32_t>(rank);
    if (header.stop_requested != 0) count.stop_requested = 1;
    if (index >= header.num_losses) continue;
    const LossSums& loss = reinterpret_cast<const LossSums*>(record + shape.losses_offset())[index];
    count.loss_sum += loss.loss;
    count.num_tokens += loss.num_tokens;
  }
  double sum_squares = 0;
  for (int64_t u = 0; u < shape.num_units; ++u) sum_squares += squares_of(u);
  const int64_t tokens = count.num_tokens > 1 ? count.num_tokens : 1;
  count.gradient_norm = ::sqrt(sum_squares) / static_cast<double>(tokens);
  // x - x is 0 for finite x only.
  const bool finite = sum_squares - sum_squares == 0 && count.loss_sum - count.loss_sum == 0;
  count.skip = !finite || count.num_tokens == 0 ? 1 : 0;
  return count;
}

KTG_HOST_DEVICE inline VoteCount count_votes(const VoteShape& shape, const void* records, int64_t step) {
  return count_votes(shape, records, step, [&](int64_t unit) { return unit_squares(shape, records, unit); });
}

// The update's scalars, from the vote's bits alone. A clip factor of exactly 1 changes no bit.
KTG_HOST_DEVICE inline AdamWScalars update_scalars(const StepInputs& inputs, const VoteCount& count) {
  const bool clip = inputs.clip_norm > 0 && count.gradient_norm > inputs.clip_norm;
  const double factor = clip ? inputs.clip_norm / count.gradient_norm : 1.0;
  const int64_t tokens = count.num_tokens > 1 ? count.num_tokens : 1;
  return {inputs.lr,
          inputs.beta1,
          inputs.beta2,
          inputs.eps,
          inputs.weight_decay,
          inputs.bias_correction1,
          inputs.bias_correction2,
          static_cast<float>(factor / static_cast<double>(tokens)),
          count.skip,
          inputs.step,
          inputs.seed};
}

struct VoteKernels {
  // Fills a record but for its partials, which sum_squares writes at `record` + partials_offset(). losses (num_losses):
  // with `add_up` the record gets their sum, in ascending order, as its only loss; otherwise all of them.
  KernelError (*fill_record)(void* record, const StepInputs* inputs, const LossSums* losses, int64_t num_losses,
                             bool add_up, const VoteShape& shape, StreamHandle stream);
  // Counts all records and passes the gate: only while *stop_word <= inputs->generation and *closed is 0 it publishes
  // (the count, then the step, visible to the host and to other processes in this order) and writes the scalars of the
  // update. Otherwise, and when a record is of another step, scalars->skip = 1. Both words lie in host memory that
  // kernels read; null: always open.
  KernelError (*tally)(AdamWScalars* scalars, VotePublication* published, const void* records, const VoteShape& shape,
                       const StepInputs* inputs, const int64_t* stop_word, const int32_t* closed, StreamHandle stream);
};

namespace reference {
const VoteKernels& vote();
}
namespace cuda {
const VoteKernels& vote();
}

}  // namespace kintsugi::kernels
