#include "parallel/vote.h"

#include <cstring>

namespace kintsugi::parallel {
namespace {

// Enough blocks for every rank to have a share, few enough that they cost nothing to gather.
constexpr int64_t kWantedBlocks = 256;
constexpr int64_t kBlockAlignment = 1024;

int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

}  // namespace

int64_t losses_per_rank(const ParallelConfig& config, int world_size) {
  return config.fixed_order() ? (config.virtual_shards + world_size - 1) / world_size : 1;
}

Vote::Vote(int64_t gradient_length, int64_t losses_per_rank, int rank, int world_size)
    : gradient_length_(gradient_length),
      block_length_(round_up((gradient_length + kWantedBlocks - 1) / kWantedBlocks, kBlockAlignment)),
      shape_{.world_size = world_size,
             .num_blocks = (gradient_length + block_length_ - 1) / block_length_,
             .losses_per_rank = losses_per_rank},
      rank_(rank) {}

int64_t Vote::memory_bytes() const { return shape_.world_size * shape_.record_bytes(); }

Status Vote::sum_squares(const float* gradient, const runtime::Backend& backend, runtime::Stream& stream) const {
  auto* partials = reinterpret_cast<double*>(record() + shape_.partials_offset());
  const int64_t first = shape_.first_block(rank_), end = shape_.first_block(rank_ + 1);
  return stream.launched(
      backend.kernels().reduce->sum_squares(partials, gradient + first * block_length_, first, end - first,
                                            block_length_, gradient_length_, stream.handle()),
      "sum_squares");
}

Result<VoteResult> Vote::run(const float* gradient, const VoteBallot& ballot, comm::Communicator& communicator,
                             const runtime::Backend& backend, runtime::Stream& stream, Deadline deadline) {
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
