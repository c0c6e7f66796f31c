// What the training loop knows of a parallel mode: DataParallel keeps everything on every rank, FullySharded keeps a
// shard. Both give the model its weights and take its gradients (runtime::UnitAccess), exchange them with their peers
// while the model computes, vote, and update.
//
// A step:
//   begin_step(); for each micro-step { begin_micro_step(i); model.forward_backward(..., *this, ...), or
//   idle_micro_step() where the rank has no samples in it }; finish_reduce(); vote(); update_ahead();
// On a device none of these waits: finish_reduce() makes the stream wait for the sums, device_vote() takes the place of
// vote(), and update_ahead() reads its scalars where the vote left them.
// Until update() has begun, a step may be dropped at any point and begun anew. From finish_reduce() until the next
// begin_step() the gradient is complete, so an update that peers have made can still be made here.
// "Collective" calls are made by all ranks of the generation, in the same order.
// Not thread safe; one stream.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "comm/communicator.h"
#include "parallel/batch_layout.h"
#include "parallel/device_vote.h"
#include "parallel/vote.h"
#include "runtime/model/train_state.h"
#include "runtime/model/transformer.h"
#include "runtime/trace/timeline.h"

namespace kintsugi::parallel {

// Places inside a step that the caller can name: where deliberate faults strike.
enum class StepPoint { kForward, kBackward, kMidReduce, kMidUpdate };

// The generation's communicators over the memory in which the step runs. Null ones are not needed: at one rank of a
// device, or in a mode without that axis. All outlive their use.
struct Communicators {
  comm::Communicator* world = nullptr;   // all ranks: sums of DDP, the vote
  comm::Communicator* gather = nullptr;  // the shards of this replica: all-gathers
  comm::Communicator* reduce =
      nullptr;  // the same ranks: reduce-scatters, and the table of vectors: none waits behind gathers
  comm::Communicator* replica = nullptr;  // the ranks that hold the same shard
};

class ParallelMode : public runtime::UnitAccess {
 public:
  // This rank's part of the state; state().ranges says which.
  virtual runtime::TrainState& state() = 0;
  const runtime::TrainState& state() const { return const_cast<ParallelMode*>(this)->state(); }
  // Whether this rank's state can be had from another rank's memory (DDP, hybrid), and from which ranks: the same
  // answer on all. Bit r of the result: rank r.
  virtual uint64_t holders_of(int rank) const = 0;

  // Whatever was in flight in the generation before is forgotten.
  virtual void set_communicators(const Communicators& communicators) = 0;
  // After anything but update() has written the state: what the kernels read follows it. Collective.
  virtual Status weights_changed(runtime::Stream& stream, Deadline deadline) = 0;

  // Collective, in two halves. Ranks in `joining` get weights and moments of a rank that holds the same and is not in
  // `joining` (`source_rank` where it does), read where they lie. Between the halves the others may read their state,
  // and must not write it. finish_fetch() includes weights_changed().
  virtual Status begin_fetch(uint64_t joining, int source_rank, runtime::Stream& stream) = 0;
  virtual Status finish_fetch(runtime::Stream& stream, Deadline deadline) = 0;

  virtual void begin_step(const BatchLayout& layout) = 0;
  virtual void begin_micro_step(int64_t micro_step) = 0;
  // The collectives of a forward and backward to which this rank contributes nothing. Collective with those that do.
  virtual Status idle_micro_step(runtime::Stream& stream) = 0;
  // For forward passes outside a step (validation): all ranks make equally many, through begin_forward() and *this or,
  // without samples, idle_forward().
  virtual void begin_forward() = 0;
  virtual Status idle_forward(runtime::Stream& stream) = 0;

  // Waits for the sums still in flight. The reduced gradient (of this rank's shard) is then complete here.
  virtual Status finish_reduce(runtime::Stream& stream, Deadline deadline) = 0;
  virtual Result<VoteResult> vote(const VoteBallot& ballot, runtime::Stream& stream, Deadline deadline) = 0;
  // On a device only (Backend::asynchronous()).
  virtual DeviceVote& device_vote() = 0;
  // The device's half of vote(): this rank's sums of squares and losses into its record.
  virtual Status enter_vote(runtime::Stream& stream) = 0;
  // AdamW over this rank's part. Local: no collective. `scalars` lies where kernels read it when they run. Give it a
  // stream without a stop token: half an update must not exist.
  virtual Status update(const kernels::AdamWScalars* scalars, runtime::Stream& stream) = 0;
  // The same bits, and collective: weights that the next forward reads first leave for the peers as soon as they are
  // updated, while the rest is. Not for an update that only some ranks have to make. What happens to a communicator
  // meanwhile does not stop the update: the next acquire() tells.
  virtual Status update_ahead(const kernels::AdamWScalars* scalars, runtime::Stream& stream) {
    return update(scalars, stream);
  }
  // Waits for what update_ahead() has begun, where no forward follows it: before the communicators end in peace, or the
  // mode before them.
  virtual Status settle(runtime::Stream&, Deadline) { return ok_status(); }

  // Called at each StepPoint; an error ends the step there.
  virtual void set_probe(std::function<Status(StepPoint)> probe) = 0;
  // While a step is recorded (recorded_step.h): what forward, backward and update_ahead() do beside queueing kernels on
  // their stream - calls of communicators, waits for other streams, notes of what has been sent - is handed over as
  // calls, which this makes at once and a replay makes again, in their order, after begin_step(). They stay good in
  // later generations. Null: nobody records.
  using Outside = std::function<Status(std::function<Status()> call)>;
  void set_outside(Outside outside) { outside_ = std::move(outside); }
  // Host time of this step that forward and backward spent waiting for weights and for buffers. On a device the host
  // does not wait, and what its streams wait for is in its trace.
  virtual int64_t waited_ns() const { return 0; }
  // Where the spans of units ("forward block.0", "wait for block.0") and of collectives in flight go; null: nowhere.
  virtual void set_timelines(trace::Timeline* units, trace::Timeline* collectives) = 0;

 protected:
  Status outside(std::function<Status()> call) { return outside_ ? outside_(std::move(call)) : call(); }
  bool recording() const { return outside_ != nullptr; }

 private:
  Outside outside_;
};

}  // namespace kintsugi::parallel
