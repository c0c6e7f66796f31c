// Weights of whole units, gathered from the ranks that have the shards. A slot that holds a unit is not filled again
// until the weights change or another unit takes it.
#pragma once

#include <vector>

#include "comm/communicator.h"
#include "parallel/sharded/collective_spans.h"
#include "parallel/sharded/shard_plan.h"
#include "runtime/backend.h"

namespace kintsugi::parallel {

class WeightGather {
 public:
  // All outlive it. `ahead` off: nothing is gathered before it is needed.
  WeightGather(const runtime::ParamTable& table, const ShardPlan& plan, runtime::Backend& backend, bool ahead,
               FullySharded::Traffic& traffic)
      : plan_(plan),
        backend_(backend),
        ahead_(ahead),
        traffic_(traffic),
        slots_(plan.weights.begin.size()),
        spans_("gather", table.units()) {
    std::vector<bool> taken(slots_.size(), false);
    for (int u = 0; ahead && u < plan.num_units() && first_units_.size() < kMostAhead; ++u) {
      if (!taken[slot_of(u)]) first_units_.push_back(u);
      taken[slot_of(u)] = true;
    }
  }
  // `local`: this rank's part, of the type that the kernels read, where peers can read it.
  Status allocate(const void* local);
  // What was in flight is forgotten.
  void set_communicator(comm::Communicator* communicator);
  // The weights have changed. Nothing is in flight.
  void forget();

  // Where the unit's first element is, once bring() has brought it.
  const void* weights(int unit) const { return plan_.num_shards == 1 ? own(unit) : whole(unit); }
  // In use: nothing else comes into its slot until as many release().
  void hold(int unit);
  void release(int unit);
  // Whether `next` may be gathered while what is held is in use.
  bool may_come_ahead(int next) const { return ahead_ && next >= 0 && slots_[slot_of(next)].users == 0; }
  // Starts the unit's all-gather and then that of `next` (below 0: none), each unless it has been started, and makes
  // the stream wait for the unit's.
  Status bring(int unit, int next, runtime::Stream& stream, Deadline deadline);
  Status start(int unit, runtime::Stream& stream);
  // Units that come before anything is held, in the order of forward: the first of each slot.
  const std::vector<int>& first_units() const { return first_units_; }
  // Waits for all that have been started.
  Status settle(Deadline deadline);
  // On the CPU.
  Status progress();
  void set_timeline(trace::Timeline* timeline) { spans_.set_timeline(timeline); }

 private:
  // A device's communicator takes 8 collectives (comm.max_queued); with more the host would wait inside the update, and
  // could not prepare the next step meanwhile.
  static constexpr size_t kMostAhead = 6;
  struct Slot {
    int unit = -1;             // whose weights it holds, or will when `work` is done
    int users = 0, held = -1;  // so many holds, all of this unit
    comm::WorkPtr work;        // null: complete
  };
  uint8_t* whole(int unit) const {
    return buffer_.as<uint8_t>() + plan_.weights.begin[slot_of(unit)] * plan_.weight_bytes();
  }
  size_t slot_of(int unit) const { return static_cast<size_t>(plan_.weights.of_unit[static_cast<size_t>(unit)]); }
  const uint8_t* own(int unit) const { return local_ + plan_.shards[unit].local_begin * plan_.weight_bytes(); }
  Status finish(Slot& slot, Deadline deadline);

  const ShardPlan& plan_;
  runtime::Backend& backend_;
  const bool ahead_;
  FullySharded::Traffic& traffic_;
  std::vector<Slot> slots_;
  std::vector<int> first_units_;
  CollectiveSpans spans_;
  runtime::Buffer buffer_;
  const uint8_t* local_ = nullptr;
  comm::Communicator* communicator_ = nullptr;
};

}  // namespace kintsugi::parallel
