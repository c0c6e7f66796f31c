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
        spans_("gather", table.units()) {}
  // `local`: this rank's part, of the type that the kernels read, where peers can read it.
  Status allocate(const void* local);
  // What was in flight is forgotten.
  void set_communicator(comm::Communicator* communicator);
  // The weights have changed. Nothing is in flight.
  void forget();

  // The unit's first element; the stream waits for it. Then starts `next` (none below 0), unless its slot is in use.
  Result<const void*> acquire(int unit, int next, runtime::Stream& stream, Deadline deadline);
  void release(int unit);
  // On the CPU.
  Status progress();
  void set_timeline(trace::Timeline* timeline) { spans_.set_timeline(timeline); }

 private:
  struct Slot {
    int unit = -1;
    int users = 0;
    comm::WorkPtr work;  // null: complete
  };
  uint8_t* whole(int unit) const {
    return buffer_.as<uint8_t>() + plan_.weights.begin[slot_of(unit)] * plan_.weight_bytes();
  }
  size_t slot_of(int unit) const { return static_cast<size_t>(plan_.weights.of_unit[static_cast<size_t>(unit)]); }
  const uint8_t* own(int unit) const { return local_ + plan_.shards[unit].local_begin * plan_.weight_bytes(); }
  Status start(int unit, runtime::Stream& stream);

  const ShardPlan& plan_;
  runtime::Backend& backend_;
  const bool ahead_;
  FullySharded::Traffic& traffic_;
  std::vector<Slot> slots_;
  CollectiveSpans spans_;
  runtime::Buffer buffer_;
  const uint8_t* local_ = nullptr;
  comm::Communicator* communicator_ = nullptr;
};

}  // namespace kintsugi::parallel
