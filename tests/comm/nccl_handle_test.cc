// Who may be inside NCCL, and who waits for whom when communicators are aborted: over a NCCL that is not one.
#include "comm/nccl/nccl_handle.h"

#include <gtest/gtest.h>

#include <chrono>
#include <random>
#include <thread>
#include <vector>

#include "tests/comm/fake_nccl/fake_nccl.h"

namespace kintsugi::comm {
namespace {

using std::chrono::milliseconds;

Deadline soon() { return Deadline::after(std::chrono::seconds(20)); }
Deadline a_moment() { return Deadline::after(milliseconds(20)); }

class NcclHandleTest : public testing::Test {
 protected:
  NcclHandleTest() {
    fake_.broken_rules = fake_.begun = fake_.aborted = fake_.destroyed = 0;
    fake_.polls_until_ready = 3;
  }
  ~NcclHandleTest() override {
    fake_.told.open();
    fake_.gone.open();
    EXPECT_TRUE(registry_.wait_for_aborts(soon()).ok());
    EXPECT_EQ(fake_.broken_rules, 0);
    EXPECT_EQ(fake_.begun, fake_.aborted + fake_.destroyed) << "each communicator ends once";
  }
  std::shared_ptr<NcclHandle> begin(int64_t generation, std::function<void()> before_abort = nullptr) {
    return *NcclHandle::begin(*NcclHandle::create_id(), {generation, 0, 2}, 0, StopToken(), std::move(before_abort));
  }
  Status call(NcclHandle& handle) {
    return handle.call(
        "sum",
        [](ncclComm_t comm) {
          ncclResult_t result;
          return ncclCommGetAsyncError(comm, &result);
        },
        soon());
  }

  FakeNccl& fake_ = fake_nccl();
  NcclRegistry& registry_ = NcclRegistry::process();
};

TEST_F(NcclHandleTest, TheNextGenerationConnectsWhileNcclLetsGoOfTheLast) {
  auto old = begin(1);
  ASSERT_TRUE(call(*old).ok());
  fake_.gone.close();
  registry_.abort_all(1, aborted("generation 1 is over"));
  EXPECT_EQ(call(*old).code(), StatusCode::kAborted);
  EXPECT_TRUE(old->wait_halted(soon()).ok());
  old.reset();
  auto next = begin(2);
  EXPECT_TRUE(call(*next).ok());
  EXPECT_EQ(registry_.size(), 1);
  EXPECT_EQ(fake_.aborted, 0) << "NCCL still cleans up";
  EXPECT_EQ(registry_.wait_for_aborts(a_moment()).code(), StatusCode::kDeadlineExceeded);
  fake_.gone.open();
  EXPECT_TRUE(registry_.wait_for_aborts(soon()).ok());
  EXPECT_EQ(fake_.aborted, 1);
  EXPECT_TRUE(call(*next).ok());
  next->finish(soon());
  EXPECT_EQ(fake_.destroyed, 1);
}

TEST_F(NcclHandleTest, ASecondDeathIsToldWhileTheFirstIsStillCleanedUp) {
  fake_.gone.close();
  auto first = begin(1);
  registry_.abort_all(1, aborted("over"));
  auto second = begin(2);
  ASSERT_TRUE(call(*second).ok());
  registry_.abort_all(2, aborted("over again"));
  EXPECT_TRUE(second->wait_halted(soon()).ok());
  EXPECT_EQ(fake_.aborted, 0);
}

TEST_F(NcclHandleTest, HaltedMeansThatNoLaunchIsUnderWayAnyMore) {
  auto handle = begin(1);
  fake_.told.close();
  const Status why = handle->fail(deadline_exceeded("too late"));
  EXPECT_EQ(why.code(), StatusCode::kDeadlineExceeded);
  EXPECT_EQ(handle->wait_halted(a_moment()).code(), StatusCode::kDeadlineExceeded);
  fake_.told.open();
  EXPECT_TRUE(handle->wait_halted(soon()).ok());
}

TEST_F(NcclHandleTest, AHealthyEndLeavesNothingToWaitFor) {
  auto handle = begin(1);
  ASSERT_TRUE(call(*handle).ok());
  handle->finish(soon());
  EXPECT_TRUE(handle->wait_halted(a_moment()).ok());
  EXPECT_EQ(fake_.destroyed, 1);
  EXPECT_EQ(fake_.aborted, 0);
}

TEST_F(NcclHandleTest, TheGateIsShutBeforeAnythingIsAborted) {
  bool shut = false;
  int aborted_then = -1;
  auto handle = begin(1, [&] {
    shut = true;
    aborted_then = fake_.aborted;
  });
  registry_.abort_all(5, aborted("over"));
  EXPECT_TRUE(shut);
  EXPECT_EQ(aborted_then, 0);
}

TEST_F(NcclHandleTest, AnOwnerThatGoesAwayAbortsWhatHasNotEnded) {
  begin(1).reset();
  EXPECT_TRUE(registry_.wait_for_aborts(soon()).ok());
  EXPECT_EQ(fake_.aborted, 1);
}

// Callers, a watcher, a destructor and a second watcher at once, many times over: the fixture counts.
TEST_F(NcclHandleTest, WhoeverAbortsFirstNobodyElseIsInsideAndEachEndsOnce) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  constexpr int kRounds = 300;
  for (int64_t generation = 1; generation <= kRounds; ++generation) {
    fake_.polls_until_ready = static_cast<int>(random() % 30);
    auto handle = begin(generation);
    std::vector<std::thread> threads;
    const auto after = [&](auto action) {
      threads.emplace_back([action, wait = milliseconds(0) + std::chrono::microseconds(random() % 300)] {
        std::this_thread::sleep_for(wait);
        action();
      });
    };
    after([&, generation] { registry_.abort_all(generation, aborted("one watcher")); });
    after([&, generation] { registry_.abort_all(generation, aborted("another")); });
    after([&] { (void)registry_.check_all().ok(); });
    after([held = handle] { (void)held->fail(aborted("a caller")).ok(); });
    while (call(*handle).ok()) {
    }
    EXPECT_TRUE(handle->wait_halted(soon()).ok());
    if (random() % 2 == 0) handle.reset();
    for (std::thread& t : threads) t.join();
  }
}

}  // namespace
}  // namespace kintsugi::comm
