#include "kernels/vote.h"

#include <atomic>

namespace kintsugi::kernels::reference {
namespace {

KernelError fill_record(void* record, const StepInputs* inputs, const LossSums* losses, int64_t num_losses, bool add_up,
                        const VoteShape& shape, StreamHandle) {
  const auto count = static_cast<int32_t>(add_up ? 1 : num_losses);
  *static_cast<VoteHeader*>(record) = {inputs->step, count, inputs->stop_requested};
  auto* out = reinterpret_cast<LossSums*>(static_cast<char*>(record) + shape.losses_offset());
  if (add_up) *out = {};
  for (int64_t i = 0; i < num_losses; ++i) {
    if (add_up) {
      out->loss += losses[i].loss;
      out->num_tokens += losses[i].num_tokens;
    } else {
      out[i] = losses[i];
    }
  }
  return kKernelOk;
}

KernelError tally(AdamWScalars* scalars, VotePublication* published, const void* records, const VoteShape& shape,
                  const StepInputs* inputs, const int64_t* stop_word, const int32_t* closed, StreamHandle) {
  const VoteCount count = count_votes(shape, records, inputs->step);
  *scalars = update_scalars(*inputs, count);
  const bool stopped = stop_word != nullptr && __atomic_load_n(stop_word, __ATOMIC_ACQUIRE) > inputs->generation;
  const bool shut = closed != nullptr && __atomic_load_n(closed, __ATOMIC_ACQUIRE) != 0;
  if (stopped || shut || count.odd_rank >= 0) scalars->skip = 1;
  if (stopped || shut) return kKernelOk;
  published->count = count;
  __atomic_store_n(&published->step, inputs->step, __ATOMIC_RELEASE);
  return kKernelOk;
}

}  // namespace

const VoteKernels& vote() {
  static constexpr VoteKernels kTable{fill_record, tally};
  return kTable;
}

}  // namespace kintsugi::kernels::reference
