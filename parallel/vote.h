// The vote: the one exchange between the reduced gradients and the update. Each rank brings the sums of squares of its
// share of the gradient, its losses and its flags; a single all-gather carries them, and every rank computes the same
// outcome from the same bytes. A rank leaves the vote only after every rank has entered it, so each then knows that
// all hold the complete gradient.
//
// Each unit of the gradient is cut into blocks (layout/unit_shards.h) which every mode counts alike: a shard has some
// of them, and its replicas share these. Sums over blocks, units and losses run in ascending order, so the outcome has
// the same bits in every mode and at every number of ranks whenever the gradients and the losses of the virtual shards
// have. The arithmetic is that of kernels/vote.h; on a GPU it never leaves the device (device_vote.h).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "comm/communicator.h"
#include "kernels/vote.h"
#include "parallel/layout/unit_shards.h"
#include "parallel/mesh.h"
#include "parallel/parallel_config.h"
#include "runtime/backend.h"
#include "runtime/model/transformer.h"

namespace kintsugi::parallel {

struct VoteBallot {
  int64_t step = 0;
  std::span<const runtime::LossSums> losses;  // of this rank: one a virtual shard; in fast order one in all
  bool stop_requested = false;
};

struct VoteResult {
  double gradient_norm = 0;  // of the mean gradient over all valid targets, before clipping
  double loss_sum = 0;
  int64_t num_tokens = 0;
  bool skip = false;            // something was not finite, or no target was valid: no update
  bool stop_requested = false;  // by any rank
};

// What was counted of `step`'s records. A record of another step is a bug: KTG_CHECK.
VoteResult result_of(const kernels::VoteCount& count, int64_t step);

// Losses that the rank with the most virtual shards brings.
int64_t losses_per_rank(const ParallelConfig& config, int world_size);

class Vote {
 public:
  Vote(const std::vector<runtime::UnitInfo>& units, const Mesh& mesh, const ParallelConfig& config, int rank);
  int64_t memory_bytes() const;
  // `memory`: memory_bytes(), best in the symmetric heap; not written before run().
  void attach(void* memory) { memory_ = static_cast<uint8_t*>(memory); }

  // `gradient` is reduced: this rank's shard, or the whole, which is one shard of one. Collective; blocks until every
  // rank has entered.
  Result<VoteResult> run(const kernels::Gradient& gradient, const VoteBallot& ballot, comm::Communicator& communicator,
                         const runtime::Backend& backend, runtime::Stream& stream, Deadline deadline);

  // Queues the sums of squares of this rank's blocks into its record.
  Status sum_squares(const kernels::Gradient& gradient, const runtime::Backend& backend, runtime::Stream& stream) const;

  const kernels::VoteShape& shape() const { return shape_; }
  uint8_t* records() const { return memory_; }
  uint8_t* record() const { return memory_ + rank_ * shape_.record_bytes(); }  // this rank's

 private:
  UnitShards shards_;
  std::vector<int64_t> block_lengths_;  // by unit
  kernels::VoteShape shape_;
  int rank_;
  int64_t replica_;
  uint8_t* memory_ = nullptr;
};

}  // namespace kintsugi::parallel
