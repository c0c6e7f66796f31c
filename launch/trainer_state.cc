// The state on its way into and out of a device, in pieces through pinned host memory, and its digests. Threads share
// the work: what the host does with a piece (random numbers, SHA-256) costs far more than moving it.
#include <algorithm>
#include <atomic>
#include <thread>

#include "checkpoint/state_digest.h"
#include "kernels/digest.h"
#include "launch/trainer_impl.h"

namespace kintsugi::launch {
namespace {

constexpr int64_t kPieceElements = 1 << 20;  // of a thread
constexpr int64_t kBlocksATurn = 32;         // that a thread takes at a time

}  // namespace

// One thread's way to the device.
struct TrainerImpl::Lane {
  runtime::Buffer staging;
  std::unique_ptr<runtime::Stream> stream;

  Status open(runtime::Backend& backend, int64_t elements) {
    KTG_ASSIGN_OR_RETURN(staging,
                         backend.allocate_host(elements * static_cast<int64_t>(sizeof(float)), "staged state"));
    KTG_ASSIGN_OR_RETURN(stream, backend.create_stream());
    return ok_status();
  }
  Status move(runtime::Backend& backend, void* to, const void* from, int64_t size_bytes, Deadline deadline) {
    KTG_RETURN_IF_ERROR(backend.copy(to, from, size_bytes, *stream));
    return stream->synchronize(deadline);
  }
};

// body(lane, begin, count) for pieces of [0, n), on as many threads as the rank has; the first error ends all.
Status TrainerImpl::in_pieces(int64_t n, int64_t piece, int64_t staged_elements,
                              const std::function<Status(Lane&, int64_t, int64_t)>& body) {
  const int64_t num_pieces = (n + piece - 1) / piece;
  const int64_t num_threads = std::clamp<int64_t>(environment_.num_threads, 1, std::max<int64_t>(num_pieces, 1));
  std::vector<Status> outcomes(static_cast<size_t>(num_threads));
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  const auto work = [&](int64_t thread) -> Status {
    Lane lane;
    if (device_ || state().moments_dtype != kernels::DType::kF32) {
      KTG_RETURN_IF_ERROR(lane.open(*backend_, staged_elements));
    }
    for (int64_t i = next++; i < num_pieces && !failed; i = next++) {
      KTG_RETURN_IF_ERROR(body(lane, i * piece, std::min(piece, n - i * piece)));
      if (thread == 0) environment_.link->alive();
    }
    return ok_status();
  };
  const auto run = [&](int64_t thread) {
    outcomes[static_cast<size_t>(thread)] = work(thread);
    if (!outcomes[static_cast<size_t>(thread)].ok()) failed = true;
  };
  std::vector<std::thread> threads;
  for (int64_t t = 1; t < num_threads; ++t) threads.emplace_back(run, t);
  run(0);
  for (std::thread& thread : threads) thread.join();
  for (const Status& outcome : outcomes) KTG_RETURN_IF_ERROR(outcome);
  return ok_status();
}

Status TrainerImpl::fill_state(const std::function<Status(float*, float*, float*, int64_t, int64_t)>& fill) {
  runtime::TrainState& s = state();
  // Padding between the ranges is zero.
  if (config_.parallelism.sharded()) {
    for (int part = 0; part < runtime::kStateParts; ++part) {
      KTG_RETURN_IF_ERROR(backend_->zero(s.at(part, 0), s.bytes_of(part, s.length), *stream_));
    }
    KTG_RETURN_IF_ERROR(stream_->synchronize(collective_deadline()));
  }
  for (const runtime::StateRange& range : s.ranges) {
    if (!device_ && s.moments_dtype == kernels::DType::kF32) {
      const int64_t at = range.local_begin;
      KTG_RETURN_IF_ERROR(
          fill(s.weights + at, static_cast<float*>(s.m) + at, static_cast<float*>(s.v) + at, range.begin, range.count));
      environment_.link->alive();
      continue;
    }
    const auto body = [&](Lane& lane, int64_t begin, int64_t count) -> Status {
      auto* weights = lane.staging.as<float>();
      KTG_RETURN_IF_ERROR(
          fill(weights, weights + kPieceElements, weights + 2 * kPieceElements, range.begin + begin, count));
      for (int part = 0; part < runtime::kStateParts; ++part) {
        float* const values = weights + part * kPieceElements;
        runtime::narrow(values, s.dtype_of(part), values, count);
        KTG_RETURN_IF_ERROR(lane.move(*backend_, s.at(part, range.local_begin + begin), values, s.bytes_of(part, count),
                                      collective_deadline()));
      }
      return ok_status();
    };
    KTG_RETURN_IF_ERROR(in_pieces(range.count, kPieceElements, 3 * kPieceElements, body));
  }
  return ok_status();
}

// Elements of a part as fp32: where they lie, or in the lane's staging memory, which has room for twice as many.
Result<const float*> TrainerImpl::values_of(Lane& lane, int part, int64_t local_begin, int64_t count) {
  const runtime::TrainState& s = state();
  const void* from = s.at(part, local_begin);
  const bool wide = s.dtype_of(part) == kernels::DType::kF32;
  if (!device_ && wide) return static_cast<const float*>(from);
  auto* const values = lane.staging.as<float>();
  if (device_) {
    float* const staged = wide ? values : values + count;
    KTG_RETURN_IF_ERROR(lane.move(*backend_, staged, from, s.bytes_of(part, count), collective_deadline()));
    from = staged;
  }
  if (!wide) runtime::widen(values, from, s.dtype_of(part), count);
  return values;
}

// The quick comparison of ranks: every bit of weights, moments, step and cursor, by the backend's own kernels.
Result<uint64_t> TrainerImpl::state_digest() {
  const runtime::TrainState& s = state();
  uint64_t on_host[3];
  uint64_t* parts = device_ ? device_->sums.as<uint64_t>() + 2 : on_host;
  for (int part = 0; part < runtime::kStateParts; ++part) {
    const int64_t words = s.bytes_of(part, s.length) / static_cast<int64_t>(sizeof(float));  // whatever they hold
    KTG_RETURN_IF_ERROR(
        stream_->launched(backend_->kernels().reduce->digest(&parts[part], static_cast<const float*>(s.at(part, 0)),
                                                             words, static_cast<uint64_t>(part + 1), stream_->handle()),
                          "digest"));
  }
  KTG_RETURN_IF_ERROR(stream_->synchronize(collective_deadline()));
  uint64_t digest = 0;
  for (const uint64_t word :
       {parts[0], parts[1], parts[2], static_cast<uint64_t>(s.step), static_cast<uint64_t>(s.cursor)}) {
    digest = kernels::digest_word(digest ^ word, kernels::kDigestStep);
  }
  return digest;
}

Status TrainerImpl::digest_whole_blocks(std::span<const checkpoint::DigestBlock> blocks,
                                        std::span<checkpoint::BlockDigest> out) {
  std::vector<size_t> mine;
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (!blocks[i].split() && blocks[i].owner() == environment_.rank) mine.push_back(i);
  }
  const auto body = [&](Lane& lane, int64_t first, int64_t count) -> Status {
    for (int64_t k = first; k < first + count; ++k) {
      const checkpoint::DigestBlock& block = blocks[mine[static_cast<size_t>(k)]];
      KTG_ASSIGN_OR_RETURN(const float* values,
                           values_of(lane, block.part, block.pieces.front().local_begin, block.count));
      out[mine[static_cast<size_t>(k)]] = checkpoint::digest_of({values, static_cast<size_t>(block.count)});
    }
    return ok_status();
  };
  return in_pieces(static_cast<int64_t>(mine.size()), kBlocksATurn, 2 * checkpoint::kDigestBlockElements, body);
}

Status TrainerImpl::digest_split_blocks(std::span<const checkpoint::DigestBlock> blocks,
                                        std::span<checkpoint::BlockDigest> out) {
  const int N = environment_.world_size;
  std::vector<float> gathered, together;
  for (const checkpoint::DigestRound& round : checkpoint::plan_rounds(blocks, N)) {
    gathered.resize(static_cast<size_t>(N * round.most));
    float* const mine = &gathered[static_cast<size_t>(environment_.rank * round.most)];
    Status copied;
    checkpoint::visit_round(round, blocks, N, [&](const auto& block, const auto& piece, int64_t at) {
      if (piece.rank != environment_.rank || !copied.ok()) return;
      const int64_t bytes = state().bytes_of(block.part, piece.count);
      uint8_t* const end = reinterpret_cast<uint8_t*>(mine + at + piece.count);
      copied = backend_->copy(end - bytes, state().at(block.part, piece.local_begin), bytes, *stream_);
    });
    KTG_RETURN_IF_ERROR(copied);
    KTG_RETURN_IF_ERROR(stream_->synchronize(collective_deadline()));
    checkpoint::visit_round(round, blocks, N, [&](const auto& block, const auto& piece, int64_t at) {
      if (piece.rank != environment_.rank) return;
      const uint8_t* const end = reinterpret_cast<const uint8_t*>(mine + at + piece.count);
      runtime::widen(mine + at, end - state().bytes_of(block.part, piece.count), state().dtype_of(block.part),
                     piece.count);
    });
    KTG_ASSIGN_OR_RETURN(
        const comm::WorkPtr work,
        communicator_->all_gather(gathered.data(), mine, round.most * static_cast<int64_t>(sizeof(float)), *stream_));
    KTG_RETURN_IF_ERROR(work->wait(collective_deadline()));
    environment_.link->alive();
    checkpoint::visit_round(round, blocks, N, [&](const auto& block, const auto& piece, int64_t at) {
      if (block.owner() != environment_.rank) return;
      if (piece.begin == 0) together.resize(static_cast<size_t>(block.count));
      std::copy_n(&gathered[static_cast<size_t>(piece.rank * round.most + at)], piece.count,
                  &together[static_cast<size_t>(piece.begin)]);
      if (piece.begin + piece.count == block.count) out[&block - blocks.data()] = checkpoint::digest_of(together);
    });
  }
  return ok_status();
}

// The gather of the digests is the run's last collective, and each rank enters it with its snapshots durable: whoever
// leaves it knows that nothing is left to do anywhere.
Result<std::string> TrainerImpl::state_sha256() {
  const runtime::ParamTable& table = model_->params();
  const int N = environment_.world_size;
  const std::vector<checkpoint::DigestBlock> blocks = checkpoint::plan_digest(table, state_cover(config_, table, N));
  std::vector<checkpoint::BlockDigest> all(blocks.size());
  // The state is whole once what is queued has been done.
  KTG_RETURN_IF_ERROR(stream_->synchronize(collective_deadline()));
  KTG_RETURN_IF_ERROR(digest_whole_blocks(blocks, all));
  KTG_RETURN_IF_ERROR(digest_split_blocks(blocks, all));

  std::vector<int64_t> owned(static_cast<size_t>(N), 0);
  for (const checkpoint::DigestBlock& block : blocks) ++owned[static_cast<size_t>(block.owner())];
  const int64_t most = *std::max_element(owned.begin(), owned.end());
  std::vector<checkpoint::BlockDigest> gathered(static_cast<size_t>(N * most));
  checkpoint::BlockDigest* const mine = &gathered[static_cast<size_t>(environment_.rank * most)];
  int64_t next = 0;
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (blocks[i].owner() == environment_.rank) mine[next++] = all[i];
  }
  // Ends by the end of the generation; how long a disk takes is not ours to limit.
  KTG_RETURN_IF_ERROR(environment_.link->await_snapshots(Deadline::never()));
  KTG_ASSIGN_OR_RETURN(
      const comm::WorkPtr work,
      communicator_->all_gather(gathered.data(), mine, most * sizeof(checkpoint::BlockDigest), *stream_));
  KTG_RETURN_IF_ERROR(work->wait(collective_deadline()));
  std::fill(owned.begin(), owned.end(), 0);
  for (size_t i = 0; i < blocks.size(); ++i) {
    const auto owner = static_cast<size_t>(blocks[i].owner());
    all[i] = gathered[owner * static_cast<size_t>(most) + static_cast<size_t>(owned[owner]++)];
  }
  return checkpoint::combine_digests(table, all, state().step, state().cursor);
}

}  // namespace kintsugi::launch
