#include "parallel/vote.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <thread>

#include "comm/local/local_world.h"

namespace kintsugi::parallel {
namespace {

constexpr int64_t kLength = 64 * 1000;
constexpr int kShards = 8;

std::vector<runtime::UnitInfo> units() {
  std::vector<runtime::UnitInfo> out;
  int64_t offset = 0;
  for (const int64_t lines : {10, 500, 127, 363}) {
    out.push_back({.name = "", .offset = offset, .length = 64 * lines, .first_tensor = 0, .num_tensors = 0});
    offset += 64 * lines;
  }
  return out;
}

ParallelConfig config(const char* mode = "ddp", int64_t shard = 0) {
  ParallelConfig c;
  c.mode = mode;
  c.reduce_order = "fixed";
  c.virtual_shards = kShards;
  c.shard = shard;
  return c;
}

struct Rank {
  Result<VoteResult> result = internal_error("not run");
};

// What of the gradient lies on `rank`. Padding is zero.
std::vector<float> part_of(const std::vector<float>& gradient, const Mesh& mesh, int rank) {
  const UnitShards shards(units(), mesh.size(kShardAxis), mesh.coordinate(rank, kShardAxis));
  std::vector<float> part(shards.local_length(), 0.0f);
  for (const runtime::StateRange& r : shards.ranges()) {
    std::copy_n(gradient.begin() + r.begin, r.count, part.begin() + r.local_begin);
  }
  return part;
}

// Every rank brings the losses of its virtual shards.
std::vector<runtime::LossSums> losses_of(const std::vector<runtime::LossSums>& losses, bool interleaved, int r, int N) {
  if (!interleaved) return {losses.begin() + r * kShards / N, losses.begin() + (r + 1) * kShards / N};
  std::vector<runtime::LossSums> mine;
  for (int v = r; v < kShards; v += N) mine.push_back(losses[v]);
  return mine;
}

VoteResult vote(const ParallelConfig& c, int N, const std::vector<float>& gradient,
                const std::vector<runtime::LossSums>& losses, int stop_rank = -1) {
  std::vector<std::unique_ptr<comm::SymmetricHeap>> heaps;
  std::vector<comm::SymmetricHeap*> heap_pointers;
  for (int r = 0; r < N; ++r) {
    heaps.push_back(comm::LocalWorld::create_heap(1 << 20));
    heap_pointers.push_back(heaps.back().get());
  }
  const auto world = comm::LocalWorld::create(N, 1, heap_pointers);
  const Mesh mesh = Mesh::of_run(c, N).value();
  std::vector<Rank> ranks(N);
  std::vector<std::thread> threads;
  for (int r = 0; r < N; ++r) {
    threads.emplace_back([&, r] {
      const auto backend = runtime::create_cpu_backend({.num_threads = 1});
      const auto stream = backend->create_stream().value();
      const auto communicator = world->join(r, comm::CommConfig(), StopToken()).value();
      Vote vote(units(), mesh, c, r);
      vote.attach(heaps[r]->allocate(vote.memory_bytes(), "vote").value());
      ranks[r].result =
          vote.run(part_of(gradient, mesh, r).data(),
                   {.step = 4, .losses = losses_of(losses, c.sharded(), r, N), .stop_requested = r == stop_rank},
                   *communicator, *backend, *stream, Deadline::after(std::chrono::seconds(60)));
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int r = 1; r < N; ++r) {
    // Bits, so that NaN equals itself.
    EXPECT_EQ(std::bit_cast<uint64_t>(ranks[r].result->gradient_norm),
              std::bit_cast<uint64_t>(ranks[0].result->gradient_norm));
    EXPECT_EQ(ranks[r].result->stop_requested, ranks[0].result->stop_requested);
  }
  return ranks[0].result.value();
}

VoteResult vote(int N, const std::vector<float>& gradient, const std::vector<runtime::LossSums>& losses,
                int stop_rank = -1) {
  return vote(config(), N, gradient, losses, stop_rank);
}

class VoteTest : public testing::Test {
 protected:
  VoteTest() : gradient_(kLength), losses_(kShards) {
    for (int64_t i = 0; i < kLength; ++i) gradient_[i] = 0.01f * static_cast<float>((i * 7919) % 1013 - 500);
    for (int i = 0; i < kShards; ++i) losses_[i] = {.loss = 100.1 + 0.3 * i, .num_tokens = 50 + i};
  }
  std::vector<float> gradient_;
  std::vector<runtime::LossSums> losses_;
};

TEST_F(VoteTest, TheNormIsThatOfTheMeanGradient) {
  double sum = 0;
  int64_t tokens = 0;
  for (const float g : gradient_) sum += static_cast<double>(g) * g;
  for (const runtime::LossSums& loss : losses_) tokens += loss.num_tokens;
  const VoteResult result = vote(3, gradient_, losses_);
  EXPECT_NEAR(result.gradient_norm, std::sqrt(sum) / static_cast<double>(tokens), 1e-12 * std::sqrt(sum));
  EXPECT_EQ(result.num_tokens, tokens);
  EXPECT_FALSE(result.skip);
}

TEST_F(VoteTest, TheOutcomeHasTheSameBitsAtEveryWorldSize) {
  const VoteResult one = vote(1, gradient_, losses_);
  for (const int N : {2, 3, 5, 8}) {
    const VoteResult many = vote(N, gradient_, losses_);
    EXPECT_EQ(many.gradient_norm, one.gradient_norm) << N;
    EXPECT_EQ(many.loss_sum, one.loss_sum) << N;
  }
}

TEST_F(VoteTest, TheOutcomeHasTheSameBitsInEveryMode) {
  const VoteResult one = vote(1, gradient_, losses_);
  for (const int N : {1, 2, 3, 4, 6, 8}) {
    for (int shard = 1; shard <= N; ++shard) {
      if (N % shard != 0) continue;
      const VoteResult many = vote(config("zero3", shard), N, gradient_, losses_);
      EXPECT_EQ(many.gradient_norm, one.gradient_norm) << N << " ranks, " << shard << " shards";
      EXPECT_EQ(many.loss_sum, one.loss_sum) << N << " ranks, " << shard << " shards";
      EXPECT_EQ(many.num_tokens, one.num_tokens);
    }
  }
}

TEST_F(VoteTest, OneElementThatIsNotFiniteSkipsTheStepForAll) {
  for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    gradient_[kLength - 1] = bad;
    EXPECT_TRUE(vote(4, gradient_, losses_).skip);
  }
}

TEST_F(VoteTest, AStepWithoutValidTargetsIsSkipped) {
  EXPECT_TRUE(vote(2, gradient_, std::vector<runtime::LossSums>(kShards)).skip);
}

TEST_F(VoteTest, OneRankThatIsAskedToStopStopsAll) {
  EXPECT_FALSE(vote(4, gradient_, losses_).stop_requested);
  EXPECT_TRUE(vote(4, gradient_, losses_, /*stop_rank=*/2).stop_requested);
}

}  // namespace
}  // namespace kintsugi::parallel
