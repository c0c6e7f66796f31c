#include "parallel/vote.h"

#include <algorithm>
#include <cmath>
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

// A rank's record: this, then losses_per_rank LossSums, then the sums of squares of its blocks.
struct Vote::Header {
  int64_t step;
  int32_t num_losses;
  int32_t stop_requested;
};

Vote::Vote(int64_t gradient_length, int64_t losses_per_rank, int rank, int world_size)
    : gradient_length_(gradient_length),
      block_length_(round_up((gradient_length + kWantedBlocks - 1) / kWantedBlocks, kBlockAlignment)),
      num_blocks_((gradient_length + block_length_ - 1) / block_length_),
      losses_per_rank_(losses_per_rank),
      rank_(rank),
      world_size_(world_size) {}

int64_t Vote::record_bytes() const {
  const int64_t most_blocks = (num_blocks_ + world_size_ - 1) / world_size_;
  const int64_t bytes = static_cast<int64_t>(sizeof(Header)) +
                        losses_per_rank_ * static_cast<int64_t>(sizeof(runtime::LossSums)) +
                        most_blocks * static_cast<int64_t>(sizeof(double));
  return round_up(bytes, 64);
}

int64_t Vote::memory_bytes() const { return world_size_ * record_bytes(); }

Result<VoteResult> Vote::run(const float* gradient, const VoteBallot& ballot, comm::Communicator& communicator,
                             const runtime::Backend& backend, runtime::Stream& stream, Deadline deadline) {
  KTG_CHECK(static_cast<int64_t>(ballot.losses.size()) <= losses_per_rank_)
      << ballot.losses.size() << " losses, room for " << losses_per_rank_;
  uint8_t* record = memory_ + rank_ * record_bytes();
  const Header header{.step = ballot.step,
                      .num_losses = static_cast<int32_t>(ballot.losses.size()),
                      .stop_requested = ballot.stop_requested ? 1 : 0};
  std::memcpy(record, &header, sizeof(header));
  uint8_t* losses = record + sizeof(Header);
  std::memcpy(losses, ballot.losses.data(), ballot.losses.size_bytes());
  double* partials =
      reinterpret_cast<double*>(losses + losses_per_rank_ * static_cast<int64_t>(sizeof(runtime::LossSums)));
  const int64_t first = first_block(rank_), end = first_block(rank_ + 1);
  KTG_RETURN_IF_ERROR(stream.launched(
      backend.kernels().reduce->sum_squares(partials, gradient + first * block_length_, first, end - first,
                                            block_length_, gradient_length_, stream.handle()),
      "sum_squares"));
  KTG_ASSIGN_OR_RETURN(const comm::WorkPtr work, communicator.all_gather(memory_, record, record_bytes(), stream));
  KTG_RETURN_IF_ERROR(work->wait(deadline));
  return count(ballot);
}

Result<VoteResult> Vote::count(const VoteBallot& ballot) const {
  VoteResult result;
  double sum_squares = 0;
  for (int r = 0; r < world_size_; ++r) {
    const uint8_t* record = memory_ + r * record_bytes();
    Header header;
    std::memcpy(&header, record, sizeof(header));
    KTG_CHECK(header.step == ballot.step)
        << "rank " << r << " votes on step " << header.step << ", this rank on " << ballot.step;
    result.stop_requested |= header.stop_requested != 0;
    const uint8_t* losses = record + sizeof(Header);
    for (int32_t i = 0; i < header.num_losses; ++i) {
      runtime::LossSums loss;
      std::memcpy(&loss, losses + i * sizeof(loss), sizeof(loss));
      result.loss_sum += loss.loss;
      result.num_tokens += loss.num_tokens;
    }
    const uint8_t* partials = losses + losses_per_rank_ * static_cast<int64_t>(sizeof(runtime::LossSums));
    for (int64_t b = 0; b < first_block(r + 1) - first_block(r); ++b) {
      double partial;
      std::memcpy(&partial, partials + b * sizeof(partial), sizeof(partial));
      sum_squares += partial;
    }
  }
  result.gradient_norm = std::sqrt(sum_squares) / static_cast<double>(std::max<int64_t>(result.num_tokens, 1));
  result.skip = !std::isfinite(sum_squares) || !std::isfinite(result.loss_sum) || result.num_tokens == 0;
  return result;
}

}  // namespace kintsugi::parallel
