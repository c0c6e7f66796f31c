#include "kernels/cuda/background_builds.h"

#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace kintsugi::kernels::cuda {
namespace {

using Builds = BackgroundBuilds<int, std::unique_ptr<std::string>>;

constexpr std::chrono::minutes kLong{1};

// Holds builds until it is opened, and counts those that have begun.
class Gate {
 public:
  void pass() {
    std::unique_lock lock(mutex_);
    ++begun_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return open_; });
  }
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void await_begun(int count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return begun_ >= count; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int begun_ = 0;
  bool open_ = false;
};

std::unique_ptr<std::string> text(const std::string& s) { return std::make_unique<std::string>(s); }

std::function<std::unique_ptr<std::string>()> once_open(Gate& gate, const std::string& s) {
  return [&gate, s] {
    gate.pass();
    return text(s);
  };
}

TEST(BackgroundBuildsTest, BuildsRunAtOnceAndAreTakenInAnyOrder) {
  Gate gate;
  Builds builds;
  for (const int key : {1, 2, 3}) builds.begin(key, once_open(gate, "built " + std::to_string(key)));
  gate.await_begun(3);  // none waits for another
  gate.open();
  for (const int key : {2, 3, 1}) {
    const auto built = builds.take(key);
    ASSERT_TRUE(built);
    EXPECT_EQ(**built, "built " + std::to_string(key));
  }
}

TEST(BackgroundBuildsTest, WhoeverTakesWaits) {
  Gate gate;
  Builds builds;
  builds.begin(1, once_open(gate, "one"));
  std::atomic<bool> taken = false;
  std::thread taker([&] {
    const auto built = builds.take(1);
    taken = true;
    EXPECT_EQ(**built, "one");
  });
  gate.await_begun(1);
  EXPECT_FALSE(taken);
  gate.open();
  taker.join();
  EXPECT_TRUE(taken);
}

TEST(BackgroundBuildsTest, AKeyIsBuiltOnceUntilItIsTaken) {
  std::atomic<int> calls = 0;
  Builds builds;
  const auto build = [&calls] { return text(std::to_string(++calls)); };
  EXPECT_FALSE(builds.take(1));
  builds.begin(1, build);
  builds.begin(1, build);
  EXPECT_EQ(**builds.take(1), "1");
  EXPECT_FALSE(builds.take(1));
  builds.begin(1, build);
  EXPECT_EQ(**builds.take(1), "2");
  EXPECT_EQ(calls, 2);
}

TEST(BackgroundBuildsTest, WhatABuildThrowsReachesWhoeverTakesIt) {
  Builds builds;
  builds.begin(1, []() -> std::unique_ptr<std::string> { throw std::runtime_error("no plan"); });
  builds.begin(2, [] { return text("two"); });
  EXPECT_TRUE(builds.wait(kLong));  // does not throw
  try {
    (void)builds.take(1);
    FAIL() << "want what the build threw";
  } catch (const std::runtime_error& e) {
    EXPECT_STREQ(e.what(), "no plan");
  }
  EXPECT_FALSE(builds.take(1));
  EXPECT_EQ(**builds.take(2), "two");
}

TEST(BackgroundBuildsTest, DestructionAndWaitJoinWhatIsInFlight) {
  for (const bool waits : {true, false}) {
    std::atomic<int> ended = 0;
    Gate gate;
    std::thread opener;
    {
      Builds builds;
      for (const int key : {1, 2}) {
        builds.begin(key, [&] {
          gate.pass();
          ++ended;
          return text("");
        });
      }
      gate.await_begun(2);
      opener = std::thread([&gate] { gate.open(); });
      if (waits) {
        EXPECT_TRUE(builds.wait(kLong));
        EXPECT_EQ(ended, 2);
      }
    }
    EXPECT_EQ(ended, 2);
    opener.join();
  }
}

TEST(BackgroundBuildsTest, WaitingEndsWhenItsTimeIsOver) {
  Gate gate;
  Builds builds;
  builds.begin(1, once_open(gate, "one"));
  gate.await_begun(1);
  EXPECT_FALSE(builds.wait(std::chrono::milliseconds(20)));
  gate.open();
  EXPECT_EQ(**builds.take(1), "one");
}

// Threads whose stacks no address space holds cannot be had.
class NoThreads {
 public:
  NoThreads() {
    pthread_attr_init(&attributes_);
    pthread_getattr_default_np(&attributes_);
    pthread_attr_t huge;
    pthread_attr_init(&huge);
    pthread_attr_setstacksize(&huge, size_t{1} << 48);
    refused_ = pthread_setattr_default_np(&huge) == 0;
    pthread_attr_destroy(&huge);
  }
  ~NoThreads() {
    pthread_setattr_default_np(&attributes_);
    pthread_attr_destroy(&attributes_);
  }
  bool refused() const { return refused_; }

 private:
  pthread_attr_t attributes_;
  bool refused_ = false;
};

TEST(BackgroundBuildsTest, WithoutAThreadTheBuildIsThatOfWhoeverTakesIt) {
  Builds builds;
  std::thread::id built_on;
  {
    const NoThreads no_threads;
    if (!no_threads.refused()) GTEST_SKIP() << "the default size of stacks cannot be set";
    EXPECT_THROW(std::thread([] {}).join(), std::system_error);
    builds.begin(1, [&built_on] {
      built_on = std::this_thread::get_id();
      return text("one");
    });
    builds.begin(2, [] { return text("nobody wants it"); });
  }
  EXPECT_TRUE(builds.wait(kLong));  // for nothing
  EXPECT_EQ(built_on, std::thread::id());
  EXPECT_EQ(**builds.take(1), "one");
  EXPECT_EQ(built_on, std::this_thread::get_id());
}

}  // namespace
}  // namespace kintsugi::kernels::cuda
