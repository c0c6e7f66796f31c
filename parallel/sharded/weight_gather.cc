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
  KTG_CHECK(communicator_ != nullptr && slot.work == nullptr) << "unit " << unit << " over unit " << slot.unit;
  const int64_t bytes = plan_.shards[unit].chunk * plan_.weight_bytes();
  spans_.issued(unit);
  slot.unit = -1;
  KTG_ASSIGN_OR_RETURN(slot.work, communicator_->all_gather(whole(unit), own(unit), bytes, stream));
  slot.unit = unit;
  ++traffic_.all_gathers;
  traffic_.all_gather_bytes += bytes;
  return ok_status();
}

Status WeightGather::bring(int unit, int next, runtime::Stream& stream, Deadline deadline) {
  KTG_RETURN_IF_ERROR(start(unit, stream));
  if (next >= 0) KTG_RETURN_IF_ERROR(start(next, stream));
  return finish(slots_[slot_of(unit)], deadline);
}

Status WeightGather::finish(Slot& slot, Deadline deadline) {
  if (slot.work == nullptr) return ok_status();
  KTG_RETURN_IF_ERROR(slot.work->wait(deadline));
  slot.work.reset();
  spans_.completed(slot.unit);
  return ok_status();
}

Status WeightGather::settle(Deadline deadline) {
  for (Slot& slot : slots_) KTG_RETURN_IF_ERROR(finish(slot, deadline));
  return ok_status();
}

void WeightGather::hold(int unit) {
  Slot& slot = slots_[slot_of(unit)];
  KTG_CHECK(slot.users == 0 || slot.held == unit) << "unit " << unit << " over unit " << slot.held;
  slot.held = unit;
  ++slot.users;
}

void WeightGather::release(int unit) {
  Slot& slot = slots_[slot_of(unit)];
  if (slot.users > 0) --slot.users;  // 0: another generation has begun since
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
