// Gradients of whole units on their way to the shards that own them. Each unit's goes through up to two collectives:
//
//   fast order    reduce-scatter among the shards; all-reduce of the chunk among replicas
//   bf16          all-to-all of the rounded gradient among the shards, summed here in fp32; the same all-reduce
//   fixed order   all-to-all among the shards, then all-gather among replicas: every owner has every rank's chunk,
//                 which are leaves of the reduction tree, and adds up whole subtrees in one pass, then
//                 these as a binary counter counts (gradient_stack.h)
//
// On the CPU a unit moves on when somebody polls; on a device all of it is queued at once, on a stream of its own. One
// rank needs neither, and no memory to receive in: it adds up what lies in the gradient's slot.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "parallel/parallel_mode.h"
#include "parallel/sharded/collective_spans.h"
#include "parallel/sharded/shard_plan.h"
#include "runtime/backend.h"

namespace kintsugi::parallel {

class GradientReduce {
 public:
  GradientReduce(const runtime::ParamTable& table, const ShardPlan& plan, runtime::Backend& backend,
                 FullySharded::Traffic& traffic);
  // `memory`: ShardPlan::memory().gradients_bytes of the symmetric heap.
  Status allocate(void* memory);
  void set_communicators(const Communicators& communicators);
  void begin_step();

  // Where the unit's gradient is written, once its slot is taken: the stream then waits until nobody else uses it. A
  // slot that is shared by units of different layouts is clean where the unit has no tensor.
  Status take_slot(int unit, runtime::Stream& stream, Deadline deadline);
  float* slot(int unit) const { return whole(unit); }
  // The gradient is complete on `stream`. `first`: of this step's reductions of the unit (fast order).
  Status start(int unit, int64_t micro_step, bool first, runtime::Stream& stream, Deadline deadline);
  Status progress();
  Status finish(runtime::Stream& stream, Deadline deadline);
  float* shard_gradient() const { return local_; }  // complete after finish()
  void set_timeline(trace::Timeline* timeline) { spans_.set_timeline(timeline); }

 private:
  enum class Stage { kStart, kScattered, kCombined, kDone };
  struct Reduction {
    int unit = 0;
    int64_t micro_step = 0;
    bool first = false;
    Stage stage = Stage::kStart;
    comm::WorkPtr work = nullptr;
  };
  float* whole(int unit) const {
    if (plan_.alone) return local_ + plan_.shards[unit].local_begin;
    return slots_ + plan_.gradients.begin[index(plan_.gradients, unit)];
  }
  float* received(int unit) const {
    if (plan_.one_rank) return whole(unit);
    return received_ + plan_.received.begin[index(plan_.received, unit)];
  }
  static size_t index(const Slots& slots, int unit) {
    return static_cast<size_t>(slots.of_unit[static_cast<size_t>(unit)]);
  }
  int64_t chunk(int unit) const { return plan_.shards[unit].chunk; }
  runtime::Stream& stream_of(runtime::Stream& caller) const { return side_ != nullptr ? *side_ : caller; }
  // Until nothing uses the slot any more.
  Status settle(const Slots& slots, int unit, runtime::Stream& stream, Deadline deadline);
  // Takes the reduction as far as it goes; `wait`: to its end.
  Status advance(Reduction& reduction, bool wait, Deadline deadline);
  Status scatter(Reduction& r, runtime::Stream& stream);
  Status combine(Reduction& r, runtime::Stream& stream);
  Status add(const Reduction& r, runtime::Stream& stream);
  Status add_leaves(const Reduction& r, runtime::Stream& stream);
  Status sum_rounded(const Reduction& r, runtime::Stream& stream);
  Status copy(float* to, const float* from, int64_t count, runtime::Stream& stream);

  const runtime::ParamTable& table_;
  const ShardPlan& plan_;
  runtime::Backend& backend_;
  FullySharded::Traffic& traffic_;
  float *local_ = nullptr, *slots_ = nullptr, *received_ = nullptr;
  uint8_t *sent_bf16_ = nullptr, *received_bf16_ = nullptr;
  runtime::Buffer float_scratch_;                          // bf16 on the wire: one rank's part in fp32
  std::vector<std::vector<runtime::StateRange>> padding_;  // by unit
  comm::Communicator *shards_comm_ = nullptr, *replicas_comm_ = nullptr;
  CollectiveSpans spans_;
  std::deque<Reduction> in_flight_;
  runtime::Stream* caller_ = nullptr;
  // On a device, among ranks.
  std::unique_ptr<runtime::Stream> side_;
  std::unique_ptr<runtime::Event> ready_;              // the gradient, on the caller's stream
  std::vector<std::unique_ptr<runtime::Event>> free_;  // by unit: its reduction has ended
};

}  // namespace kintsugi::parallel
