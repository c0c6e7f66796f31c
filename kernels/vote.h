// The vote on a device: what each rank brings to the one exchange between the reduced gradients and the update, how
// the ranks' records are counted, and the gate through which a step becomes part of the state. The arithmetic is one
// set of functions for host and device, so both come to the same bits.
//
// A rank's record is a header, then `losses_per_rank` sums of losses, then the sums of squares of the blocks of the
// gradient that it owns. Records of all ranks follow each other in rank order.
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
  int64_t world_size = 1;
  int64_t num_blocks = 1;       // of the gradient, all ranks together
  int64_t losses_per_rank = 1;  // the most that any rank brings

  KTG_HOST_DEVICE int64_t first_block(int64_t rank) const { return rank * num_blocks / world_size; }
  KTG_HOST_DEVICE int64_t losses_offset() const { return static_cast<int64_t>(sizeof(VoteHeader)); }
  KTG_HOST_DEVICE int64_t partials_offset() const {
    return losses_offset() + losses_per_rank * static_cast<int64_t>(sizeof(LossSums));
  }
  // A multiple of 64.
  KTG_HOST_DEVICE int64_t record_bytes() const {
    const int64_t most_blocks = (num_blocks + world_size - 1) / world_size;
    return (partials_offset() + most_blocks * static_cast<int64_t>(sizeof(double)) + 63) / 64 * 64;
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
};

// What the gate makes known, in host memory that kernels write: `step` last.
struct VotePublication {
  VoteCount count;
  int64_t step = -1;
};

// Sums run in ascending order of ranks, losses and blocks. `records` is 8-byte aligned.
KTG_HOST_DEVICE inline VoteCount count_votes(const VoteShape& shape, const void* records, int64_t step) {
  VoteCount count;
  double sum_squares = 0;
  for (int64_t r = 0; r < shape.world_size; ++r) {
    const char* record = static_cast<const char*>(records) + r * shape.record_bytes();
    const auto& header = *reinterpret_cast<const VoteHeader*>(record);
    if (header.step != step) count.odd_rank = static_cast<int32_t>(r);
    if (header.stop_requested != 0) count.stop_requested = 1;
    const auto* losses = reinterpret_cast<const LossSums*>(record + shape.losses_offset());
    for (int32_t i = 0; i < header.num_losses; ++i) {
      count.loss_sum += losses[i].loss;
      count.num_tokens += losses[i].num_tokens;
    }
    const auto* partials = reinterpret_cast<const double*>(record + shape.partials_offset());
    for (int64_t b = 0; b < shape.first_block(r + 1) - shape.first_block(r); ++b) sum_squares += partials[b];
  }
  const int64_t tokens = count.num_tokens > 1 ? count.num_tokens : 1;
  count.gradient_norm = ::sqrt(sum_squares) / static_cast<double>(tokens);
  // x - x is 0 for finite x only.
  const bool finite = sum_squares - sum_squares == 0 && count.loss_sum - count.loss_sum == 0;
  count.skip = !finite || count.num_tokens == 0 ? 1 : 0;
  return count;
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
          count.skip};
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

namespace reference { const VoteKernels& vote(); }
namespace cuda { const VoteKernels& vote(); }

}  // namespace kintsugi::kernels
