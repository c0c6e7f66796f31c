// The suite of communicator_suite.h on GPU ranks, in processes that live through all cases; then what is NCCL's alone.
#include <gtest/gtest.h>

#include <cstring>

#include "tests/comm/gpu_ranks.h"

namespace kintsugi::comm {
namespace {

class NcclTest : public testing::TestWithParam<int> {};

// A heap that no case gives back: room for all of them.
int64_t heap_bytes_for(std::span<const SuiteCase> cases) {
  return kCaseHeapBytes * 2 * (static_cast<int64_t>(cases.size()) + 1);
}

Status enter_all(GpuRank& rank, const CommConfig& config) {
  return rank.enter_groups(1, config, groups_of_seat(rank.rank(), rank.world_size()));
}

void run_suite(GpuRank& rank, std::span<const SuiteCase> cases, bool groups, const CommConfig& config) {
  int64_t began = monotonic_ns();
  const Status entered = groups ? enter_all(rank, config) : rank.enter(1, config);
  ASSERT_TRUE(entered.ok()) << entered.to_string();
  EXPECT_OK(rank.comm().barrier(soon()));
  if (rank.rank() == 0) std::printf("  connected in %.0f ms\n", static_cast<double>(monotonic_ns() - began) / 1e6);
  for (const SuiteCase& c : cases) {
    began = monotonic_ns();
    SCOPED_TRACE(c.name);
    const bool failed_before = testing::Test::HasFailure();
    Seat seat = rank.seat();
    c.body(seat);
    if (rank.rank() == 0) {
      std::printf("  %-55s %7.0f ms%s\n", c.name, static_cast<double>(monotonic_ns() - began) / 1e6,
                  !failed_before && testing::Test::HasFailure() ? "  FAILED" : "");
      std::fflush(stdout);
    }
    if (!rank.comm().status().ok()) {
      ADD_FAILURE() << "rank " << rank.rank() << ": " << rank.comm().status().to_string();
      return;
    }
  }
}

TEST_P(NcclTest, EveryCaseOfTheSuiteHolds) {
  GpuWorld world(GetParam(), heap_bytes_for(communicator_suite()));
  world.start_all([&](GpuRank& rank) { run_suite(rank, communicator_suite(), /*groups=*/false, {}); });
  world.join(std::chrono::seconds(100));
}

TEST_P(NcclTest, CommunicatorsOfGroupsAndChannelsRunSideBySide) {
  GpuWorld world(GetParam(), heap_bytes_for(group_suite()));
  world.start_all([&](GpuRank& rank) {
    run_suite(rank, group_suite(), /*groups=*/true, {});
    rank.gate(1);
    EXPECT_EQ(NcclRegistry::process().size(), 0);
  });
  world.join(std::chrono::seconds(60));
}

TEST(NcclErrorsTest, AnAbortOfOneCommunicatorEndsAllOfTheGeneration) {
  GpuWorld world(2, kCaseHeapBytes);
  world.start_all([&](GpuRank& rank) {
    ASSERT_TRUE(enter_all(rank, {}).ok());
    Seat seat = rank.seat();
    Floats x(seat, 64, true);
    // The first sum of each connects the ranks, and that takes both.
    EXPECT_OK(run_to_end(seat.comm.all_reduce(x, 64, rank.stream()), seat));
    EXPECT_OK(run_to_end(seat.second->all_reduce(x, 64, rank.stream()), seat));
    if (rank.rank() == 1) {
      const Deadline away = soon();
      while (rank.page().counter.load() == 0 && !away.passed()) ::usleep(1000);
      return;
    }
    // Rank 1 stays away from both.
    EXPECT_TRUE(seat.comm.all_reduce(x, 32, rank.stream()).ok());
    EXPECT_TRUE(seat.second->all_reduce(x + 32, 32, rank.stream()).ok());
    seat.comm.abort(aborted("enough"));
    EXPECT_EQ(seat.comm.status().code(), StatusCode::kAborted);
    EXPECT_EQ(seat.second->status().code(), StatusCode::kAborted);
    EXPECT_OK(rank.stream().synchronize(soon()));
    rank.page().counter = 1;
  });
  world.join(std::chrono::seconds(40));
}

TEST(NcclQueueTest, EveryCaseHoldsWhenOneCollectiveIsQueuedAtATime) {
  GpuWorld world(2, heap_bytes_for(communicator_suite()));
  world.start_all([&](GpuRank& rank) {
    CommConfig config;
    config.max_queued = 1;
    run_suite(rank, communicator_suite(), /*groups=*/false, config);
  });
  world.join(std::chrono::seconds(60));
}

TEST_P(NcclTest, EveryGenerationSumsToTheSameBitsAndCallsThatAgreePassTheCheck) {
  GpuWorld world(GetParam(), kCaseHeapBytes);
  world.start_all([&](GpuRank& rank) {
    std::vector<float> first;
    for (int64_t generation = 1; generation <= 3; ++generation) {
      CommConfig config;
      config.check_calls = generation == 3;
      const int64_t began = monotonic_ns();
      ASSERT_TRUE(rank.enter(generation, config).ok());
      Seat seat = rank.seat();
      Floats x(seat, kRandomCount, false);
      const std::vector<float> sums = sum_of_random_floats(seat, x);
      if (rank.rank() == 0) {
        std::printf("  generation %ld: first sum after %.0f ms\n", static_cast<long>(generation),
                    static_cast<double>(monotonic_ns() - began) / 1e6);
      }
      if (first.empty()) first = sums;
      EXPECT_EQ(std::memcmp(first.data(), sums.data(), kRandomCount * 4), 0) << "generation " << generation;
      EXPECT_OK(rank.comm().status());
      rank.gate(generation);
      EXPECT_EQ(NcclRegistry::process().size(), 0);
    }
  });
  world.join(std::chrono::seconds(60));
}

TEST(NcclErrorsTest, MemoryOfTheHostIsRefusedAndTheCommunicatorGoesOn) {
  GpuWorld world(2, kCaseHeapBytes);
  world.start_all([&](GpuRank& rank) {
    ASSERT_TRUE(rank.enter(1, {}).ok());
    std::vector<float> host(16);
    const auto refused = rank.comm().all_reduce(host.data(), 16, rank.stream());
    EXPECT_EQ(refused.status().code(), StatusCode::kInvalidArgument) << refused.status().to_string();
    EXPECT_EQ(rank.comm().broadcast(host.data(), 4, 2, rank.stream()).status().code(), StatusCode::kInvalidArgument);
    Seat seat = rank.seat();
    Floats x(seat, 16, true);
    x.write(std::vector<float>(16, 1.5f));
    EXPECT_OK(run_to_end(rank.comm().all_reduce(x, 16, rank.stream()), seat));
    EXPECT_EQ(x.read(0, 16), std::vector<float>(16, 3.0f));
  });
  world.join(std::chrono::seconds(40));
}

// Moments that are kept on the host come from a peer's host.
TEST(NcclErrorsTest, AFetchReadsPinnedMemoryOfTheHost) {
  GpuWorld world(2, kCaseHeapBytes);
  world.start_all([&](GpuRank& rank) {
    ASSERT_TRUE(rank.enter(1, {}).ok());
    Seat seat = rank.seat();
    constexpr int64_t kCount = 300'001;
    auto memory = rank.backend().allocate_host(kCount * 4, "moments");
    ASSERT_TRUE(memory.ok()) << memory.status().to_string();
    auto* x = memory->as<float>();
    for (int64_t i = 0; i < kCount; ++i) x[i] = static_cast<float>(rank.rank() == 1 ? i : -1);
    EXPECT_OK(run_to_end(rank.comm().fetch(x, kCount * 4, 1, rank.rank() == 0, rank.stream()), seat));
    EXPECT_OK(rank.stream().synchronize(soon()));
    int64_t wrong = 0;
    for (int64_t i = 0; i < kCount; ++i) wrong += x[i] != static_cast<float>(i);
    EXPECT_EQ(wrong, 0) << "rank " << rank.rank();
    std::vector<float> host(16);
    EXPECT_EQ(rank.comm().fetch(host.data(), 64, 1, false, rank.stream()).status().code(),
              StatusCode::kInvalidArgument);
  });
  world.join(std::chrono::seconds(40));
}

TEST(NcclErrorsTest, ACallThatDiffersFromAPeersIsNamedWhenCallsAreChecked) {
  GpuWorld world(2, kCaseHeapBytes);
  world.start_all([&](GpuRank& rank) {
    CommConfig config;
    config.check_calls = true;
    bool told = false;
    ASSERT_TRUE(rank.enter(1, config, [&] { told = true; }).ok());
    Seat seat = rank.seat();
    Floats x(seat, 64, true);
    const auto work = rank.comm().all_reduce(x, rank.rank() == 0 ? 32 : 64, rank.stream());
    EXPECT_EQ(work.status().code(), StatusCode::kInternal) << work.status().to_string();
    EXPECT_NE(work.status().message().find("all_reduce of 32"), std::string::npos) << work.status().message();
    EXPECT_NE(work.status().message().find("all_reduce of 64"), std::string::npos) << work.status().message();
    EXPECT_TRUE(told) << "an abort was not announced";
    EXPECT_EQ(rank.comm().status().code(), StatusCode::kInternal);
  });
  world.join(std::chrono::seconds(40));
}

TEST(NcclErrorsTest, ARankThatStaysAwayEndsTheWaitAtItsDeadline) {
  GpuWorld world(2, kCaseHeapBytes);
  world.start_all([&](GpuRank& rank) {
    ASSERT_TRUE(rank.enter(1, {}).ok());
    Seat seat = rank.seat();
    Floats x(seat, 64, true);
    EXPECT_OK(run_to_end(rank.comm().all_reduce(x, 64, rank.stream()), seat));
    if (rank.rank() == 1) {
      const Deadline away = soon();
      while (rank.page().counter.load() == 0 && !away.passed()) ::usleep(1000);
      return;
    }
    const auto work = rank.comm().all_reduce(x, 64, rank.stream());
    ASSERT_TRUE(work.ok()) << work.status().to_string();
    const Status waited = rank.comm().barrier(Deadline::after(std::chrono::milliseconds(500)));
    EXPECT_EQ(waited.code(), StatusCode::kDeadlineExceeded) << waited.to_string();
    EXPECT_EQ(rank.comm().status().code(), StatusCode::kDeadlineExceeded);
    EXPECT_FALSE((*work)->poll().ok()) << "an aborted sum counts as complete";
    EXPECT_OK(rank.stream().synchronize(soon()));
    rank.page().counter = 1;
  });
  world.join(std::chrono::seconds(40));
}

INSTANTIATE_TEST_SUITE_P(Ranks, NcclTest, testing::Values(2, 3, 4),
                         [](const auto& n) { return std::to_string(n.param) + "_ranks"; });

}  // namespace
}  // namespace kintsugi::comm
