#include "launch/start_times.h"

#include <gtest/gtest.h>

namespace kintsugi::launch {
namespace {

constexpr int64_t kMs = 1'000'000;

TEST(StartTimesTest, PhasesLastFromTheEndOfTheOneBefore) {
  StartTimes times(500 * kMs);
  times.mark("agent", 512 * kMs);
  times.mark("context", 830 * kMs);
  EXPECT_EQ(times.to_string(), "agent 12, context 318: 330 ms");
}

TEST(StartTimesTest, NothingIsAddedOnceTheStartIsOver) {
  StartTimes times(0);
  times.mark("agent", kMs);
  EXPECT_FALSE(times.finished());
  times.finish();
  times.mark("late");
  EXPECT_TRUE(times.finished());
  EXPECT_EQ(times.to_string(), "agent 1: 1 ms");
}

}  // namespace
}  // namespace kintsugi::launch
