// Data parallelism: every rank holds weights, gradients and both moments whole, runs its part of the global batch, and
// sums the gradients with its peers while backward is still running.
//
// State and gradients lie in the symmetric heap (on a GPU: of device memory), where peers read them in place: that
// makes the all-reduce cheap, and lets a replacement copy the state out of a living rank. Sums are fp32 and cover the
// sum of token losses; the division by the global number of targets happens once, in the update. How a step goes:
// parallel_mode.h.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "parallel/bucket_plan.h"
#include "parallel/gradient_stack.h"
#include "parallel/owned_update.h"
#include "parallel/parallel_mode.h"
#include "parallel/state_memory.h"
#include "runtime/model/param_table.h"

namespace kintsugi::parallel {

struct DataParallelOptions {
  ParallelConfig config;
  kernels::DType dtype = kernels::DType::kF32;  // of the compute copy that the kernels read
  MomentsOptions moments{};
  int rank = 0, world_size = 1;
  int64_t num_micro_steps = 1;  // of this rank
  bool overlap = true;          // reduce buckets while backward runs
  int64_t first_bucket_bytes = 1 << 20, bucket_bytes = 4 << 20;
};

class DataParallel final : public ParallelMode {
 public:
  // Takes plan_state_memory() bytes from `heap`, always in the same order, and writes nothing to it: another process of
  // this rank may be training there. `table`, `backend` and `heap` outlive it. `stream` carries what little a device
  // must be told before the first step.
  static Result<std::unique_ptr<DataParallel>> create(const runtime::ParamTable& table,
                                                      const DataParallelOptions& options, runtime::Backend& backend,
                                                      comm::SymmetricHeap& heap, runtime::Stream& stream);

  // Device memory that create() takes beside the heap and the compute copy.
  static int64_t device_bytes(const runtime::ParamTable& table, const DataParallelOptions& options);

  // Rows of the token table of which gradient() marks those with a token; 0: all are written.
  static int64_t marked_rows(const runtime::ParamTable& table, const ParallelConfig& config, int world_size);

  // The reduced gradient. With one rank, which no other adds its own to, rows of the token table that no token of the
  // step named are never written, and count as zeros; not where the table is tied or virtual shards are added up.
  kernels::Gradient gradient() const;
  const std::vector<Bucket>& buckets() const { return buckets_; }

  // ParallelMode. Only Communicators::world is used; null at one rank of a device: then nothing is summed with anybody.
  using ParallelMode::state;
  runtime::TrainState& state() override { return state_; }
  uint64_t holders_of(int rank) const override;
  void set_communicators(const Communicators& communicators) override;
  Status weights_changed(runtime::Stream& stream, Deadline deadline) override;
  Status begin_fetch(uint64_t joining, int source_rank, runtime::Stream& stream) override;
  Status finish_fetch(runtime::Stream& stream, Deadline deadline) override;
  void begin_step(const BatchLayout& layout) override;
  void begin_micro_step(int64_t micro_step) override;
  // Nothing: a rank without samples has no micro-step here.
  Status idle_micro_step(runtime::Stream&) override { return ok_status(); }
  void begin_forward() override {}
  Status idle_forward(runtime::Stream&) override { return ok_status(); }
  Status finish_reduce(runtime::Stream& stream, Deadline deadline) override;
  Result<VoteResult> vote(const VoteBallot& ballot, runtime::Stream& stream, Deadline deadline) override;
  DeviceVote& device_vote() override { return *device_vote_; }
  Status enter_vote(runtime::Stream& stream) override { return device_vote_->enter(gradient(), stream); }
  Status update(const kernels::AdamWScalars* scalars, runtime::Stream& stream) override;
  void set_probe(std::function<Status(StepPoint)> probe) override { probe_ = std::move(probe); }
  void set_timelines(trace::Timeline* units, trace::Timeline* buckets) override;

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
  // The next bucket's sum.
  Status reduce(runtime::Stream& stream);
  Status start_sum(size_t bucket, runtime::Stream& stream);
  Status make_progress();
  void completed();
  Status at(StepPoint point) { return probe_ ? probe_(point) : ok_status(); }
  bool last_micro_step() const { return micro_step_ + 1 == layout_.num_micro_steps; }

  const runtime::ParamTable& table_;
  const DataParallelOptions options_;
  runtime::Backend& backend_;
  const std::vector<Bucket> buckets_;
  OwnedUpdate owned_update_;
  const GradientStack stack_;  // fixed order only
  const std::unique_ptr<Vote> vote_;
  std::unique_ptr<DeviceVote> device_vote_;  // on a device

  runtime::TrainState state_;
  runtime::Buffer compute_copy_;  // empty in fp32
  std::vector<float*> buffers_;   // [0] holds the reduced gradient in the end
  runtime::Buffer used_rows_;     // of the token table; empty: every row is written
  std::vector<float*> parts_;     // fixed order: num_parts pointers a bucket
  comm::Communicator* communicator_ = nullptr;
  std::function<Status(StepPoint)> probe_;

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
