// What every backend does when a collective cannot end well: aborts, stops, deadlines, calls that do not match.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "comm/peer/layout.h"
#include "comm/reduction_tree.h"
#include "tests/comm/rank_world.h"

namespace kintsugi::comm {
namespace {

using std::chrono::milliseconds;
using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;

constexpr int kRanks = 4;
constexpr int64_t kCount = 50'000;

// Every way to wait for peers.
using CallFn = Status (*)(Communicator&, float* x, float* big);
struct NamedCall {
  const char* name;
  CallFn call;
};
NullStream g_stream;
Status end(Result<WorkPtr> work) { return work.ok() ? (*work)->wait(soon()) : work.status(); }
const NamedCall kCalls[] = {
    {"all_reduce", [](Communicator& c, float* x, float*) { return end(c.all_reduce(x, kCount, g_stream)); }},
    {"small all_reduce", [](Communicator& c, float* x, float*) { return end(c.all_reduce(x, 16, g_stream)); }},
    {"all_reduce_fixed",
     [](Communicator& c, float* x, float*) {
       float* parts[] = {x};
       return end(c.all_reduce_fixed(x, parts, kRanks, kCount, g_stream));
     }},
    {"reduce_scatter",
     [](Communicator& c, float* x, float* big) { return end(c.reduce_scatter(x, big, kCount, g_stream)); }},
    {"all_gather",
     [](Communicator& c, float* x, float* big) { return end(c.all_gather(big, x, kCount * 4, g_stream)); }},
    {"all_to_all",
     [](Communicator& c, float* x, float* big) { return end(c.all_to_all(big, x, kCount * 4 / kRanks, g_stream)); }},
    {"broadcast", [](Communicator& c, float* x, float*) { return end(c.broadcast(x, kCount * 4, 0, g_stream)); }},
    {"fetch", [](Communicator& c, float* x, float*) { return end(c.fetch(x, kCount * 4, 0, true, g_stream)); }},
    {"barrier", [](Communicator& c, float*, float*) { return c.barrier(soon()); }},
};

class CommunicatorErrorsTest : public testing::TestWithParam<BackendKind> {
 protected:
  CommunicatorErrorsTest() : world_(GetParam(), kRanks, 4 << 20) {
    for (int r = 0; r < kRanks; ++r) {
      x_.push_back(world_.floats(r, kCount));
      big_.push_back(world_.floats(r, kRanks * kCount));
    }
  }
  RankWorld world_;
  std::vector<float*> x_, big_;
};

TEST_P(CommunicatorErrorsTest, AbortFromAnotherThreadEndsEveryCollective) {
  int64_t generation = 0;
  for (const NamedCall& named : kCalls) {
    SCOPED_TRACE(named.name);
    world_.begin(++generation);
    std::vector<std::unique_ptr<Communicator>> comms;
    for (int r = 0; r < kRanks; ++r) comms.push_back(world_.join(r, CommConfig{}));
    // The last rank never calls, so the others wait until they are aborted.
    std::atomic<int> calling{0};
    std::vector<std::thread> threads;
    std::atomic<int64_t> aborted_at{0}, slowest_ns{0};
    for (int r = 0; r + 1 < kRanks; ++r) {
      threads.emplace_back([&, r] {
        calling.fetch_add(1);
        const Status got = named.call(*comms[r], x_[r], big_[r]);
        const int64_t took = monotonic_ns() - aborted_at.load();
        int64_t before = slowest_ns.load();
        while (took > before && !slowest_ns.compare_exchange_weak(before, took)) {
        }
        EXPECT_EQ(got.code(), StatusCode::kAborted) << got.to_string();
        // Its own abort, or the news of a peer's.
        EXPECT_THAT(got.message(), AnyOf(HasSubstr("generation over"), HasSubstr("gave up")));
        comms[r]->abort(aborted("a later reason"));
        EXPECT_EQ(comms[r]->status().message(), got.message());  // the first error stays
        EXPECT_EQ(named.call(*comms[r], x_[r], big_[r]).code(), StatusCode::kAborted);
      });
    }
    while (calling.load() + 1 < kRanks) std::this_thread::yield();
    aborted_at = monotonic_ns();
    for (int r = 0; r + 1 < kRanks; ++r) comms[r]->abort(aborted("generation over"));
    for (auto& t : threads) t.join();
    // A few milliseconds on a quiet machine; the bound leaves room for a busy one.
    EXPECT_LT(slowest_ns.load(), 1'000'000'000);
  }
}

TEST_P(CommunicatorErrorsTest, AnAbortOfOneRankReachesTheOthers) {
  world_.run(1, CommConfig{}, [&](Communicator& comm) {
    if (comm.rank() == 2) return comm.abort(unavailable("the device is gone"));
    const Status got = comm.barrier(soon());
    EXPECT_EQ(got.code(), StatusCode::kAborted);
    EXPECT_THAT(got.message(), HasSubstr("rank 2 gave up generation 1: ABORTED"));
  });
}

TEST_P(CommunicatorErrorsTest, TheStopWordEndsEveryCollective) {
  std::atomic<int64_t> word{0};
  int64_t generation = 0;
  for (const NamedCall& named : kCalls) {
    SCOPED_TRACE(named.name);
    ++generation;
    word = generation;
    std::atomic<int> calling{0};
    world_.run(
        generation, CommConfig{},
        [&](Communicator& comm) {
          if (comm.rank() + 1 == kRanks) {
            while (calling.load() + 1 < kRanks) std::this_thread::yield();
            word = generation + 1;
            return;
          }
          calling.fetch_add(1);
          const Status got = named.call(comm, x_[comm.rank()], big_[comm.rank()]);
          EXPECT_EQ(got.code(), StatusCode::kAborted) << got.to_string();
        },
        StopToken(&word, generation));
  }
}

TEST_P(CommunicatorErrorsTest, ADeadlineThatPassesNamesTheRankThatIsMissing) {
  world_.run(1, CommConfig{}, [&](Communicator& comm) {
    if (comm.rank() == 2) return;
    const Status got = comm.barrier(Deadline::after(milliseconds(50)));
    // Whoever gives up first tells the others.
    if (got.code() == StatusCode::kAborted) {
      EXPECT_THAT(got.message(), HasSubstr("DEADLINE_EXCEEDED"));
      return;
    }
    EXPECT_EQ(got.code(), StatusCode::kDeadlineExceeded) << got.to_string();
    EXPECT_THAT(got.message(), AllOf(HasSubstr("generation 1"), HasSubstr("barrier"), HasSubstr("for rank 2")));
    EXPECT_EQ(comm.status().code(), StatusCode::kDeadlineExceeded);  // sticky
    EXPECT_EQ(comm.all_reduce(x_[comm.rank()], 16, g_stream).status().code(), StatusCode::kDeadlineExceeded);
  });
}

TEST_P(CommunicatorErrorsTest, TheConfiguredTimeoutBoundsEveryWait) {
  CommConfig config;
  config.timeout_ms = 30;
  world_.run(1, config, [&](Communicator& comm) {
    if (comm.rank() == 0) return;
    const Status got = comm.barrier(Deadline::never());  // timeout_ms ends it
    EXPECT_TRUE(got.code() == StatusCode::kDeadlineExceeded || got.code() == StatusCode::kAborted) << got.to_string();
  });
}

TEST_P(CommunicatorErrorsTest, DifferentCallsAreNamedWithBothNumbers) {
  world_.run(3, CommConfig{}, [&](Communicator& comm) {
    const bool odd = comm.rank() == 3;
    const Status got = end(comm.all_reduce(x_[comm.rank()], odd ? 256 : 1024, g_stream));
    if (got.code() == StatusCode::kAborted) {
      EXPECT_THAT(got.message(), HasSubstr("INTERNAL"));
      return;
    }
    EXPECT_EQ(got.code(), StatusCode::kInternal) << got.to_string();
    EXPECT_THAT(got.message(), AllOf(HasSubstr("rank " + std::to_string(comm.rank()) + " generation 3"),
                                     HasSubstr(odd ? "want all_reduce of 1024 bytes" : "want all_reduce of 4096 bytes"),
                                     HasSubstr(odd ? "got all_reduce of 4096 bytes" : "got all_reduce of 1024 bytes")));
  });
  world_.run(4, CommConfig{}, [&](Communicator& comm) {
    const Status got = comm.rank() == 1 ? comm.barrier(soon()) : end(comm.broadcast(x_[comm.rank()], 64, 0, g_stream));
    EXPECT_TRUE(got.code() == StatusCode::kInternal || got.code() == StatusCode::kAborted) << got.to_string();
  });
}

TEST_P(CommunicatorErrorsTest, ACommunicatorThatEndsWithCallsInFlightTellsItsPeers) {
  world_.begin(1);
  std::vector<std::unique_ptr<Communicator>> comms;
  for (int r = 0; r < kRanks; ++r) comms.push_back(world_.join(r, CommConfig{}));
  auto work = comms[0]->all_reduce(x_[0], kCount, g_stream);
  ASSERT_TRUE(work.ok());
  comms[0].reset();
  EXPECT_EQ((*work)->wait(soon()).code(), StatusCode::kAborted);
  EXPECT_EQ((*work)->poll().status().code(), StatusCode::kAborted);
  EXPECT_EQ(end(comms[1]->all_reduce(x_[1], kCount, g_stream)).code(), StatusCode::kAborted);
}

TEST_P(CommunicatorErrorsTest, WhatIsImpossibleIsRefusedAndHarmsNothing) {
  world_.run(1, CommConfig{}, [&](Communicator& comm) {
    float* x = x_[comm.rank()];
    EXPECT_EQ(comm.all_reduce(x, -1, g_stream).status().code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(comm.broadcast(x, 4, kRanks, g_stream).status().code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(comm.fetch(x, 4, -1, true, g_stream).status().code(), StatusCode::kInvalidArgument);
    std::vector<float> outside(64);
    float* parts[] = {outside.data()};
    EXPECT_EQ(comm.all_reduce_fixed(x, parts, kRanks, 64, g_stream).status().code(), StatusCode::kInvalidArgument);
    float* two[] = {x, x};
    EXPECT_EQ(comm.all_reduce_fixed(x, two, kRanks, 64, g_stream).status().code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(comm.all_reduce_fixed(x, {}, 2, 64, g_stream).status().code(), StatusCode::kInvalidArgument);
    EXPECT_TRUE(comm.status().ok());
    EXPECT_TRUE(comm.barrier(soon()).ok());
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, CommunicatorErrorsTest, testing::Values(BackendKind::kLocal, BackendKind::kHost),
                         [](const testing::TestParamInfo<BackendKind>& kind) {
                           return std::string(name_of(kind.param));
                         });

// A dead generation may leave anything behind: flags half written, descriptors torn, sleepers that are gone.
TEST(HostCommunicatorTest, LeftoversOfOlderGenerationsAreIgnoredWhateverTheySay) {
  constexpr unsigned kSeed = 5;
  SCOPED_TRACE(kSeed);
  std::mt19937_64 random(kSeed);
  RankWorld world(BackendKind::kHost, kRanks, 1 << 20);
  std::vector<float*> x;
  for (int r = 0; r < kRanks; ++r) x.push_back(world.floats(r, kCount));
  const auto maps = RankWorld::map_all(world.fds());
  for (int64_t generation = 5; generation < 25; ++generation) {
    const auto old_stamp = [&] { return make_stamp(static_cast<int64_t>(random() % generation), random() % 100); };
    for (const auto& segment : maps) {
      ControlBlock& control = segment->control(0);
      control.completed.stamp = old_stamp();
      control.failed.stamp = old_stamp();
      control.sleeper.asleep = static_cast<uint32_t>(random());
      control.bell = static_cast<uint32_t>(random());
      control.sleeper.offset = static_cast<uint32_t>(random());
      control.sleeper.peers = random();
      control.sleeper.stamp = random();
      for (Slot& slot : control.slots) {
        slot.posted = old_stamp();
        for (Word& lane : slot.lanes) lane.stamp = old_stamp();
        auto* torn = reinterpret_cast<uint8_t*>(&slot.call);
        for (size_t i = 0; i < sizeof(Call); ++i) torn[i] = static_cast<uint8_t>(random());
        slot.in_offset = static_cast<int64_t>(random());
        slot.num_parts = static_cast<int32_t>(random());
      }
    }
    world.run(generation, CommConfig{}, [&](Communicator& comm) {
      for (int64_t count : {int64_t{100}, kCount}) {
        float* mine = x[comm.rank()];
        for (int64_t i = 0; i < count; ++i) mine[i] = static_cast<float>(i % 17 + comm.rank());
        EXPECT_TRUE(end(comm.all_reduce(mine, count, g_stream)).ok());
        int64_t wrong = 0;
        for (int64_t i = 0; i < count; ++i) wrong += mine[i] != static_cast<float>(4 * (i % 17) + 6);
        EXPECT_EQ(wrong, 0);
      }
    });
  }
}

TEST(HostCommunicatorTest, ARankThatIsLeftBehindLearnsThatItsGenerationIsOver) {
  RankWorld world(BackendKind::kHost, kRanks, 1 << 20);
  world.begin(7);
  const auto late = world.join(0, CommConfig{});
  world.run(8, CommConfig{},
            [&](Communicator& comm) { EXPECT_TRUE(comm.rank() == 0 || comm.all_reduce(nullptr, 0, g_stream).ok()); });
  const Status got = late->barrier(soon());
  EXPECT_EQ(got.code(), StatusCode::kAborted) << got.to_string();
  EXPECT_THAT(got.message(), HasSubstr("generation 8"));
}

TEST(HostCommunicatorTest, SixtyFourRanksAgree) {
  constexpr int kMany = 64;
  RankWorld world(BackendKind::kLocal, kMany, 1 << 20);
  for (const char* algorithm : {"direct", "ring", "tree"}) {
    CommConfig config;
    config.algorithm = algorithm;
    world.run(1, config, [&](Communicator& comm) {
      std::vector<float> x(5000, 1.f);
      EXPECT_TRUE(end(comm.all_reduce(x.data(), 5000, g_stream)).ok());
      EXPECT_EQ(std::count(x.begin(), x.end(), static_cast<float>(kMany)), 5000) << algorithm;
    });
  }
}

// Rank 3 gives up on a communicator that it shares with rank 1 alone; ranks 0 and 2 wait on others.
TEST_P(CommunicatorErrorsTest, ARankThatGivesUpOnOneCommunicatorEndsAllOfThem) {
  world_.begin(1);
  std::vector<std::vector<std::unique_ptr<Communicator>>> comms;
  for (int r = 0; r < kRanks; ++r) comms.push_back(world_.join_groups(r, CommConfig{}));
  std::vector<std::thread> threads;
  for (int r = 0; r + 1 < kRanks; ++r) {
    threads.emplace_back([&, r] {
      const Status got = comms[r][r % 2]->barrier(soon());
      EXPECT_EQ(got.code(), StatusCode::kAborted) << got.to_string();
      EXPECT_THAT(got.message(), HasSubstr("rank 3 gave up generation 1: ABORTED"));
      for (const auto& comm : comms[r]) EXPECT_EQ(comm->status().message(), got.message());
    });
  }
  comms[kRanks - 1][2]->abort(unavailable("the device is gone"));
  for (auto& t : threads) t.join();
  for (const auto& comm : comms[kRanks - 1]) EXPECT_THAT(comm->status().message(), HasSubstr("the device is gone"));
}

TEST_P(CommunicatorErrorsTest, ALateRankIsNamedByItsNumberInTheWorld) {
  world_.begin(1);
  std::vector<std::vector<std::unique_ptr<Communicator>>> comms;
  for (int r = 0; r < kRanks; ++r) comms.push_back(world_.join_groups(r, CommConfig{}));
  const Status got = comms[1][2]->barrier(Deadline::after(milliseconds(50)));  // among 1 and 3, where 3 is the second
  EXPECT_EQ(got.code(), StatusCode::kDeadlineExceeded) << got.to_string();
  EXPECT_THAT(got.message(), AllOf(HasSubstr("rank 1 generation 1: barrier"), HasSubstr("for rank 3")));
}

TEST(CommunicatorSetUpTest, GroupsThatCannotBeAreNamed) {
  const auto world = LocalWorld::create(4, 1, {}, /*num_channels=*/2);
  const auto message = [&](std::vector<Group> groups) {
    const auto made = world->join(1, groups, CommConfig{}, {});
    EXPECT_EQ(made.status().code(), StatusCode::kInvalidArgument) << made.status().to_string();
    return made.status().message();
  };
  EXPECT_THAT(message({{{0, 1}, 2}}), HasSubstr("the group of ranks 0 1 on channel 2: the memory has 2 channels"));
  EXPECT_THAT(message({{{0, 1}, 1}, {{1, 2}, 1}}), HasSubstr("this rank has another group there"));
  EXPECT_THAT(message({{{1, 4}, 0}}), HasSubstr("ranks are 0 to 3"));
  EXPECT_THAT(message({{{1, 0}, 0}}), HasSubstr("ranks must ascend"));
  EXPECT_THAT(message({{{1, 1}, 0}}), HasSubstr("ranks must ascend"));
  EXPECT_THAT(message({{{0, 2}, 0}}), HasSubstr("rank 1 is not in it"));
  EXPECT_THAT(message({{{}, 0}}), HasSubstr("rank 1 is not in it"));
}

TEST(CommunicatorSetUpTest, BadMembershipIsNamed) {
  RankWorld world(BackendKind::kHost, 2, 1 << 16);
  const auto maps = RankWorld::map_all(world.fds());
  const auto segments = RankWorld::pointers(maps);
  const auto code = [&](Membership m, std::vector<SharedSegment*> s) {
    return create_host_communicator(m, s, CommConfig{}, {}).status().code();
  };
  EXPECT_EQ(code({0, 2, 2}, segments), StatusCode::kInvalidArgument);
  EXPECT_EQ(code({-1, 0, 2}, segments), StatusCode::kInvalidArgument);
  EXPECT_EQ(code({0, 0, 3}, segments), StatusCode::kInvalidArgument);
  EXPECT_EQ(code({0, 0, 2}, {segments[1], segments[0]}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code({0, 0, 2}, {segments[0], nullptr}), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace kintsugi::comm
