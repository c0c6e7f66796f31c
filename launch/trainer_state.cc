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
constexpr int64_t kBlockElements = 1 << 18;  // of checkpoint/state_digest.h
constexpr int64_t kBlocksATurn = 32;         // that a thread takes at a time

// The first item of `rank`'s share of n items; shares differ by at most one.
int64_t share_begin(int64_t n, int rank, int world_size) { return rank * n / world_size; }

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
  Status move(runtime::Backend& backend, float* to, const float* from, int64_t count, Deadline deadline) {
    KTG_RETURN_IF_ERROR(backend.copy(to, from, count * static_cast<int64_t>(sizeof(float)), *stream));
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
    if (device_) KTG_RETURN_IF_ERROR(lane.open(*backend_, staged_elements));
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
  if (!device_) return fill(s.weights, s.m, s.v, 0, s.length);
  return in_pieces(s.length, kPieceElements, 3 * kPieceElements, [&](Lane& lane, int64_t begin, int64_t count) {
    auto* weights = lane.staging.as<float>();
    float *const m = weights + kPieceElements, *const v = m + kPieceElements;
    KTG_RETURN_IF_ERROR(fill(weights, m, v, begin, count));
    KTG_RETURN_IF_ERROR(lane.move(*backend_, s.weights + begin, weights, count, collective_deadline()));
    KTG_RETURN_IF_ERROR(lane.move(*backend_, s.m + begin, m, count, collective_deadline()));
    return lane.move(*backend_, s.v + begin, v, count, collective_deadline());
  });
}

// The quick comparison of ranks: every bit of weights, moments, step and cursor, by the backend's own kernels.
Result<uint64_t> TrainerImpl::state_digest() {
  const runtime::TrainState& s = state();
  uint64_t on_host[3];
  uint64_t* parts = device_ ? device_->sums.as<uint64_t>() + 2 : on_host;
  int i = 0;
  for (const float* buffer : {s.weights, s.m, s.v}) {
    KTG_RETURN_IF_ERROR(
        stream_->launched(backend_->kernels().reduce->digest(&parts[i], buffer, s.length, static_cast<uint64_t>(i + 1),
                                                             stream_->handle()),
                          "digest"));
    ++i;
  }
  KTG_RETURN_IF_ERROR(stream_->synchronize(collective_deadline()));
  uint64_t digest = 0;
  for (const uint64_t word :
       {parts[0], parts[1], parts[2], static_cast<uint64_t>(s.step), static_cast<uint64_t>(s.cursor)}) {
    digest = kernels::digest_word(digest ^ word, kernels::kDigestStep);
  }
  return digest;
}

Status TrainerImpl::digest_share(int64_t begin, int64_t end, checkpoint::BlockDigest* out) {
  // The state is whole once what is queued has been done.
  KTG_RETURN_IF_ERROR(stream_->synchronize(collective_deadline()));
  return in_pieces(end - begin, kBlocksATurn, kBlockElements, [&](Lane& lane, int64_t first, int64_t count) {
    checkpoint::ReadBlock read;
    if (device_) {
      read = [&](const float* block, int64_t elements) -> Result<const float*> {
        auto* staged = lane.staging.as<float>();
        KTG_RETURN_IF_ERROR(lane.move(*backend_, staged, block, elements, collective_deadline()));
        return static_cast<const float*>(staged);
      };
    }
    return checkpoint::digest_blocks(model_->params(), state(), begin + first,
                                     {out + first, static_cast<size_t>(count)}, read);
  });
}

// The gather of the digests is the run's last collective, and each rank enters it with its snapshots durable: whoever
// leaves it knows that nothing is left to do anywhere.
Result<std::string> TrainerImpl::state_sha256() {
  const runtime::ParamTable& table = model_->params();
  const int64_t blocks = checkpoint::num_digest_blocks(table);
  const int64_t most = (blocks + environment_.world_size - 1) / environment_.world_size;
  std::vector<checkpoint::BlockDigest> gathered(environment_.world_size * most);
  checkpoint::BlockDigest* mine = &gathered[environment_.rank * most];
  const int64_t begin = share_begin(blocks, environment_.rank, environment_.world_size);
  const int64_t end = share_begin(blocks, environment_.rank + 1, environment_.world_size);
  KTG_RETURN_IF_ERROR(digest_share(begin, end, mine));
  // Ends by the end of the generation; how long a disk takes is not ours to limit.
  KTG_RETURN_IF_ERROR(environment_.link->await_snapshots(Deadline::never()));
  KTG_ASSIGN_OR_RETURN(
      const comm::WorkPtr work,
      communicator_->all_gather(gathered.data(), mine, most * sizeof(checkpoint::BlockDigest), *stream_));
  KTG_RETURN_IF_ERROR(work->wait(collective_deadline()));
  std::vector<checkpoint::BlockDigest> all;
  for (int r = 0; r < environment_.world_size; ++r) {
    const int64_t count =
        share_begin(blocks, r + 1, environment_.world_size) - share_begin(blocks, r, environment_.world_size);
    all.insert(all.end(), &gathered[r * most], &gathered[r * most] + count);
  }
  return checkpoint::combine_digests(table, all, state().step, state().cursor);
}

}  // namespace kintsugi::launch
