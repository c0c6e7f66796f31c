#include "parallel/vote.h"

#include <cstring>

namespace kintsugi::parallel {

int64_t losses_per_rank(const ParallelConfig& config, int world_size) {
  return config.fixed_order() ? (config.virtual_shards + world_size - 1) / world_size : 1;
}

Vote::Vote(const std::vector<runtime::UnitInfo>& units, const Mesh& mesh, const ParallelConfig& config, int rank)
    : shards_(units, mesh.size(kShardAxis), mesh.coordinate(rank, kShardAxis)),
      shape_{.num_shards = mesh.size(kShardAxis),
             .num_replicas = mesh.size(kReplicateAxis),
             .num_units = static_cast<int64_t>(units.size()),
             .blocks_per_unit = kUnitBlocks,
             .losses_per_rank = parallel::losses_per_rank(config, mesh.world_size()),
             .interleaved = config.sharded()},
      rank_(rank),
      replica_(mesh.coordinate(rank, kReplicateAxis)) {
  for (const runtime::UnitInfo& unit : units) block_lengths_.push_back(unit_block_length(unit.length));
}

int64_t Vote::memory_bytes() const { return shape_.world_size() * shape_.record_bytes(); }

Status Vote::sum_squares(const kernels::Gradient& gradient, const runtime::Backend& backend,
                         runtime::Stream& stream) const {
  auto* partials = reinterpret_cast<double*>(record() + shape_.partials_offset());
  const int64_t count = shape_.blocks_per_rank(), first = replica_ * count;
  for (int u = 0; u < shards_.num_units(); ++u) {
    const int64_t block = block_lengths_[static_cast<size_t>(u)];
    KTG_RETURN_IF_ERROR(stream.launched(backend.kernels().reduce->sum_squares(
                                            partials + u * count, gradient.from(shards_[u].local_begin + first * block),
                                            first, count, block, shards_[u].count, stream.handle()),
                                        "sum_squares"));
  }
  return ok_status();
}

Result<VoteResult> Vote::run(const kernels::Gradient& gradient, const VoteBallot& ballot,
                             comm::Communicator& communicator, const runtime::Backend& backend, runtime::Stream& stream,
                             Deadline deadline) {
  KTG_CHECK(static_cast<int64_t>(ballot.losses.size()) <= shape_.losses_per_rank)
      << ballot.losses.size() << " losses, room for " << shape_.losses_per_rank;
  const kernels::VoteHeader header{.step = ballot.step,
                                   .num_losses = static_cast<int32_t>(ballot.losses.size()),
                                   .stop_requested = ballot.stop_requested ? 1 : 0};
  std::memcpy(record(), &header, sizeof(header));
  std::memcpy(record() + shape_.losses_offset(), ballot.losses.data(), ballot.losses.size_bytes());
  KTG_RETURN_IF_ERROR(sum_squares(gradient, backend, stream));
  KTG_ASSIGN_OR_RETURN(const comm::WorkPtr work,
                       communicator.all_gather(memory_, record(), shape_.record_bytes(), stream));
  KTG_RETURN_IF_ERROR(work->wait(deadline));
  return result_of(kernels::count_votes(shape_, memory_, ballot.step), ballot.step);
}

VoteResult result_of(const kernels::VoteCount& count, int64_t step) {
  KTG_CHECK(count.odd_rank < 0) << "rank " << count.odd_rank << " votes on another step than " << step;
  return {.gradient_norm = count.gradient_norm,
          .loss_sum = count.loss_sum,
          .num_tokens = count.num_tokens,
          .skip = count.skip != 0,
          .stop_requested = count.stop_requested != 0};
}

}  // namespace kintsugi::parallel
