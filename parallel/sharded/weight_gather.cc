#include "parallel/sharded/weight_gather.h"

namespace kintsugi::parallel {

Status WeightGather::allocate(const void* local) {
  local_ = static_cast<const uint8_t*>(local);
  if (plan_.weights.length == 0) return ok_status();
  KTG_ASSIGN_OR_RETURN(buffer_, backend_.allocate(plan_.weights.length * plan_.weight_bytes(), "gathered weights"));
  return ok_status();
}

void WeightGather::set_communicator(comm::Communicator* communicator) {
  communicator_ = communicator;
  for (Slot& slot : slots_) slot = {};
}

void WeightGather::forget() {
  for (Slot& slot : slots_) slot = {};
}

Status WeightGather::start(int unit, runtime::Stream& stream) {
  Slot& slot = slots_[slot_of(unit)];
  if (slot.unit == unit) return ok_status();
  KTG_CHECK(slot.users == 0 && communicator_ != nullptr) << "unit " << unit << " over unit " << slot.unit;
  slot.unit = unit;
  const int64_t bytes = plan_.shards[unit].chunk * plan_.weight_bytes();
  spans_.issued(unit);
  KTG_ASSIGN_OR_RETURN(slot.work, communicator_->all_gather(whole(unit), own(unit), bytes, stream));
  ++traffic_.all_gathers;
  traffic_.all_gather_bytes += bytes;
  return ok_status();
}

Result<const void*> WeightGather::acquire(int unit, int next, runtime::Stream& stream, Deadline deadline) {
  if (plan_.num_shards == 1) return static_cast<const void*>(own(unit));
  KTG_RETURN_IF_ERROR(start(unit, stream));
  Slot& slot = slots_[slot_of(unit)];
  ++slot.users;
  if (ahead_ && next >= 0 && slots_[slot_of(next)].users == 0) KTG_RETURN_IF_ERROR(start(next, stream));
  if (slot.work != nullptr) {
    KTG_RETURN_IF_ERROR(slot.work->wait(deadline));
    slot.work.reset();
    spans_.completed(unit);
  }
  return static_cast<const void*>(whole(unit));
}

void WeightGather::release(int unit) {
  if (plan_.num_shards == 1) return;
  Slot& slot = slots_[slot_of(unit)];
  if (slot.users > 0) --slot.users;  // 0: acquire() failed
}

Status WeightGather::progress() {
  for (Slot& slot : slots_) {
    if (slot.work == nullptr) continue;
    KTG_ASSIGN_OR_RETURN(const bool done, slot.work->poll());
    if (!done) continue;
    slot.work.reset();
    spans_.completed(slot.unit);
  }
  return ok_status();
}

}  // namespace kintsugi::parallel
