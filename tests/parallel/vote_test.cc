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

struct Rank {
  Result<VoteResult> result = internal_error("not run");
};

// All ranks hold the same gradient; each brings the losses of its shards.
VoteResult vote(int N, const std::vector<float>& gradient, const std::vector<runtime::LossSums>& losses,
                int stop_rank = -1) {
  const ParallelConfig config{.mode = "ddp", .reduce_order = "fixed", .virtual_shards = kShards};
  std::vector<std::unique_ptr<comm::SymmetricHeap>> heaps;
  std::vector<comm::SymmetricHeap*> heap_pointers;
  for (int r = 0; r < N; ++r) {
    heaps.push_back(comm::LocalWorld::create_heap(1 << 20));
    heap_pointers.push_back(heaps.back().get());
  }
  const auto world = comm::LocalWorld::create(N, 1, heap_pointers);
  std::vector<Rank> ranks(N);
  std::vector<std::thread> threads;
  for (int r = 0; r < N; ++r) {
    threads.emplace_back([&, r] {
      const auto backend = runtime::create_cpu_backend({.num_threads = 1});
      const auto stream = backend->create_stream().value();
      const auto communicator = world->join(r, comm::CommConfig(), StopToken()).value();
      Vote vote(kLength, losses_per_rank(config, N), r, N);
      vote.attach(heaps[r]->allocate(vote.memory_bytes(), "vote").value());
      const int begin = r * kShards / N, end = (r + 1) * kShards / N;
      ranks[r].result = vote.run(
          gradient.data(),
          {.step = 4, .losses = std::span(losses).subspan(begin, end - begin), .stop_requested = r == stop_rank},
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
