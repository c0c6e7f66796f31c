// Data parallelism: every rank holds weights, gradients and both moments whole, runs its part of the global batch, and
// sums the gradients with its peers while backward is still running.
//
// State and gradients lie in the symmetric heap (on a GPU: of device memory), where peers read them in place: that
// makes the all-reduce cheap, and lets a replacement copy the state out of a living rank. Sums are fp32 and cover the
// sum of token losses; the division by the global number of targets happens once, in the update.
//
// A step:
//   begin_step(); for each micro-step { begin_micro_step(i); model.forward_backward(..., *this, ...); }
//   finish_reduce(); vote(); update();
// On a device none of these waits: finish_reduce() makes the stream wait for the sums, device_vote() takes the place of
// vote(), and update() reads its scalars where the vote left them.
// Until update() has begun, a step may be dropped at any point and begun anew. From finish_reduce() until the next
// begin_step() the gradient is complete, so an update that peers have made can still be made here.
// Not thread safe; one stream.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "parallel/batch_layout.h"
#include "parallel/bucket_plan.h"
#include "parallel/device_vote.h"
#include "parallel/gradient_stack.h"
#include "parallel/vote.h"
#include "runtime/model/param_table.h"
#include "runtime/model/train_state.h"
#include "runtime/model/transformer.h"
#include "runtime/trace/timeline.h"

namespace kintsugi::parallel {

struct DataParallelOptions {
  ParallelConfig config;
  kernels::DType dtype = kernels::DType::kF32;  // of the compute copy that the kernels read
  int rank = 0, world_size = 1;
  int64_t num_micro_steps = 1;  // of this rank
  bool overlap = true;          // reduce buckets while backward runs
  int64_t first_bucket_bytes = 1 << 20, bucket_bytes = 4 << 20;
};

// Places inside a step that the caller can name: where deliberate faults strike.
enum class StepPoint { kForward, kBackward, kMidReduce, kMidUpdate };

class DataParallel final : public runtime::UnitAccess {
 public:
  // Takes plan_state_memory() bytes from `heap`, always in the same order, and writes nothing to it: another process of
  // this rank may be training there. `table`, `backend` and `heap` outlive it. `stream` carries what little a device
  // must be told before the first step.
  static Result<std::unique_ptr<DataParallel>> create(const runtime::ParamTable& table,
                                                      const DataParallelOptions& options, runtime::Backend& backend,
                                                      comm::SymmetricHeap& heap, runtime::Stream& stream);

  // Device memory that create() takes beside the heap and the compute copy.
  static int64_t device_bytes(const runtime::ParamTable& table, int64_t num_micro_steps);

  runtime::TrainState& state() { return state_; }
  const runtime::TrainState& state() const { return state_; }
  // Call after anything but update() has written weights: refreshes the compute copy.
  Status weights_changed(runtime::Stream& stream);

  // The generation's communicator; whatever was in flight on the one before is forgotten. Outlives its use here. Null
  // at one rank of a device: then nothing is summed with anybody.
  void set_communicator(comm::Communicator* communicator);
  // Called at each StepPoint; an error ends the step there.
  void set_probe(std::function<Status(StepPoint)> probe) { probe_ = std::move(probe); }
  // Called around each call of the communicator inside backward: where a recording must be interrupted. Null: nobody.
  using Around = std::function<Status(const std::function<Status()>& call)>;
  void set_around_communication(Around around) { around_ = std::move(around); }

  // Collective, in two halves. Ranks with receive = true get weights and moments of `source`, read where they lie.
  // Between the halves the others may read their state, and must not write it.
  Status begin_fetch(int source, bool receive, runtime::Stream& stream);
  Status finish_fetch(runtime::Stream& stream, Deadline deadline);

  void begin_step(const BatchLayout& layout);
  void begin_micro_step(int64_t micro_step);
  // Waits for the sums still in flight. The reduced gradient is then complete here.
  Status finish_reduce(runtime::Stream& stream, Deadline deadline);
  Result<VoteResult> vote(const VoteBallot& ballot, runtime::Stream& stream, Deadline deadline);
  // On a device only (Backend::asynchronous()).
  DeviceVote& device_vote() { return *device_vote_; }
  // Gives the next bucket to the communicator: what backward does by itself, for a backward that is replayed.
  Status reduce_next(runtime::Stream& stream) { return reduce(buckets_[next_bucket_], stream); }
  size_t next_bucket() const { return next_bucket_; }
  // AdamW over all parameters. `scalars` lies where kernels read it when they run. Give it a stream without a stop
  // token: half an update must not exist.
  Status update(const kernels::AdamWScalars* scalars, runtime::Stream& stream);

  // Where the spans of units ("forward block.0") and of buckets in flight go; null: nowhere.
  void set_timelines(trace::Timeline* units, trace::Timeline* buckets);
  const float* gradient() const { return buffers_[0]; }
  // What the kernels read: the master weights in fp32, else their rounded copy.
  const void* compute_weights() const {
    return compute_copy_.data() != nullptr ? compute_copy_.data() : state_.weights;
  }
  const std::vector<Bucket>& buckets() const { return buckets_; }

  // UnitAccess.
  Result<Weights> acquire(int unit, runtime::Stream& stream) override;
  Status release(int unit, runtime::Stream& stream) override;
  Result<Gradients> gradients(int unit, runtime::Stream& stream) override;
  Status gradients_ready(int unit, runtime::Stream& stream) override;

 private:
  DataParallel(const runtime::ParamTable& table, const DataParallelOptions& options, runtime::Backend& backend);
  Status allocate(comm::SymmetricHeap& heap);
  Status prepare_device(runtime::Stream& stream);
  // Fixed order: sums the unit's finished subtrees down the stack while they are in the cache.
  Status merge_shards(int unit, runtime::Stream& stream);
  Status reduce(const Bucket& bucket, runtime::Stream& stream);
  Status start_sum(const Bucket& bucket, runtime::Stream& stream);
  Status make_progress();
  void completed();
  Status update_half(int half, const kernels::AdamWScalars* scalars, runtime::Stream& stream);
  Status at(StepPoint point) { return probe_ ? probe_(point) : ok_status(); }
  bool last_micro_step() const { return micro_step_ + 1 == layout_.num_micro_steps; }

  const runtime::ParamTable& table_;
  const DataParallelOptions options_;
  runtime::Backend& backend_;
  const std::vector<Bucket> buckets_;
  const int64_t half_;                         // elements of the first of update()'s halves
  const std::vector<int64_t> decay_edges_[2];  // of each
  const GradientStack stack_;                  // fixed order only
  const std::unique_ptr<Vote> vote_;
  std::unique_ptr<DeviceVote> device_vote_;  // on a device
  runtime::Buffer device_edges_;             // both halves' decay_edges_, on a device
  const int64_t* edges_[2] = {};             // where the kernels read them

  runtime::TrainState state_;
  runtime::Buffer compute_copy_;  // empty in fp32
  std::vector<float*> buffers_;   // [0] holds the reduced gradient in the end
  std::vector<float*> parts_;     // fixed order: num_parts pointers a bucket
  comm::Communicator* communicator_ = nullptr;
  std::function<Status(StepPoint)> probe_;
  Around around_;

  BatchLayout layout_;
  int64_t micro_step_ = 0;
  bool in_backward_ = false;
  size_t next_bucket_ = 0;  // first bucket not yet given to the communicator
  std::vector<comm::WorkPtr> in_flight_;
  size_t completed_ = 0;  // of in_flight_

  std::vector<comm::WorkPtr> fetches_;

  trace::Timeline *unit_timeline_ = nullptr, *bucket_timeline_ = nullptr;
  std::vector<std::string> forward_names_, backward_names_, bucket_names_;
  std::vector<int64_t> acquired_ns_;  // by unit
  std::vector<int64_t> issued_ns_;    // by bucket
  int64_t bucket_done_ns_ = 0;
};

}  // namespace kintsugi::parallel
