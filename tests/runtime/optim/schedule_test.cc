#include "runtime/optim/schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

namespace kintsugi::runtime {
namespace {

using ::testing::HasSubstr;

// The values are the formula's, worked out by hand to seven digits.
TEST(ScheduleTest, CosineGoesFromTheFirstStepsShareToThePeakToTheFloor) {
  const SchedulerConfig schedule{.kind = "cosine", .warmup_steps = 4, .min_lr_ratio = 0.1};
  const double want[] = {2.5e-4,      5e-4,   7.5e-4,      1e-3,        9.657458e-4, 8.681981e-4,
                         7.222075e-4, 5.5e-4, 3.777925e-4, 2.318019e-4, 1.342542e-4, 1e-4};
  for (int64_t s = 1; s <= 12; ++s) EXPECT_NEAR(learning_rate(schedule, 1e-3, s, 12), want[s - 1], 5e-11) << s;
  EXPECT_EQ(learning_rate(schedule, 1e-3, 4, 12), 1e-3);  // exactly
  EXPECT_EQ(learning_rate(schedule, 1e-3, 12, 12), 1e-3 * 0.1);
}

TEST(ScheduleTest, EveryShapeIsFiniteWithinItsBoundsAndStartsAboveZero) {
  for (const char* kind : {"cosine", "linear", "wsd", "constant"}) {
    for (const int64_t steps : {1, 2, 3, 12, 100}) {
      for (int64_t warmup = 0; warmup <= std::min<int64_t>(steps, 13); ++warmup) {
        for (const double floor : {0.0, 0.1, 1.0}) {
          const SchedulerConfig c{.kind = kind, .warmup_steps = warmup, .min_lr_ratio = floor};
          ASSERT_TRUE(c.validate(steps).ok());
          double most = 0;
          for (int64_t s = 1; s <= steps; ++s) {
            const double lr = learning_rate(c, 2e-3, s, steps);
            ASSERT_TRUE(std::isfinite(lr)) << kind << " " << warmup << " " << s << "/" << steps;
            ASSERT_LE(lr, 2e-3);
            ASSERT_GE(lr, s > warmup ? 2e-3 * floor : 0.0);
            most = std::max(most, lr);
          }
          EXPECT_EQ(most, 2e-3) << kind << " warm-up " << warmup << " of " << steps << ": the peak is reached";
          EXPECT_GT(learning_rate(c, 2e-3, 1, steps), 0.0);
          if (steps > std::max<int64_t>(warmup, 1) && std::string(kind) != "constant") {
            const bool decays = std::string(kind) != "wsd" || std::llround(c.decay_ratio * double(steps)) > 0;
            EXPECT_EQ(learning_rate(c, 2e-3, steps, steps), decays ? 2e-3 * floor : 2e-3) << kind << " " << steps;
          }
        }
      }
    }
  }
}

TEST(ScheduleTest, LinearFallsByEqualSteps) {
  const SchedulerConfig c{.kind = "linear", .warmup_steps = 2, .min_lr_ratio = 0};
  const double want[] = {0.5, 1, 0.75, 0.5, 0.25, 0};
  for (int64_t s = 1; s <= 6; ++s) EXPECT_DOUBLE_EQ(learning_rate(c, 1, s, 6), want[s - 1]);
}

TEST(ScheduleTest, WsdIsStableUntilItsDecay) {
  const SchedulerConfig c{.kind = "wsd", .warmup_steps = 1, .min_lr_ratio = 0, .decay_ratio = 0.4};
  const double want[] = {1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0};
  for (int64_t s = 1; s <= 10; ++s) EXPECT_DOUBLE_EQ(learning_rate(c, 1, s, 10), want[s - 1]);
}

TEST(ScheduleTest, AWarmUpLongerThanTheRunIsRefused) {
  const SchedulerConfig c{.warmup_steps = 13};
  const Status status = c.validate(12);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "lr_scheduler.warmup_steps = 13: must lie in 0 .. training.steps = 12");
  EXPECT_TRUE(c.validate(13).ok());
}

TEST(ScheduleTest, BadValuesAreNamedWithWhatIsAllowed) {
  SchedulerConfig c{.kind = "cosin"};
  EXPECT_THAT(c.validate(10).message(), HasSubstr("lr_scheduler.kind = \"cosin\""));
  c = {.min_lr_ratio = 1.5};
  EXPECT_THAT(c.validate(10).message(), HasSubstr("lr_scheduler.min_lr_ratio = 1.5"));
  c = {.decay_ratio = std::nan("")};
  EXPECT_THAT(c.validate(10).message(), HasSubstr("lr_scheduler.decay_ratio"));
}

TEST(OptimizerConfigTest, BadValuesAreNamedWithWhatIsAllowed) {
  EXPECT_TRUE(OptimizerConfig{}.validate().ok());
  const auto message = [](auto set) {
    OptimizerConfig c;
    set(c);
    return c.validate().message();
  };
  EXPECT_THAT(message([](auto& c) { c.lr = -1; }), HasSubstr("optimizer.lr = -1"));
  EXPECT_THAT(message([](auto& c) { c.beta1 = 1; }), HasSubstr("optimizer.beta1 = 1: must be at least 0 and below 1"));
  EXPECT_THAT(message([](auto& c) { c.beta2 = std::nan(""); }), HasSubstr("optimizer.beta2 = nan"));
  EXPECT_THAT(message([](auto& c) { c.eps = 0; }), HasSubstr("optimizer.eps"));
  EXPECT_THAT(message([](auto& c) { c.weight_decay = -0.1; }), HasSubstr("optimizer.weight_decay"));
  EXPECT_THAT(message([](auto& c) { c.clip_norm = -1; }), HasSubstr("optimizer.clip_norm"));
}

TEST(OptimizerConfigTest, KeysAreBoundToTheirFields) {
  OptimizerConfig optimizer;
  SchedulerConfig schedule;
  ConfigTable table;
  describe(table, optimizer);
  describe(table, schedule);
  ASSERT_TRUE(table.load_text("[optimizer]\nlr = 0.5\nclip_norm = 0.0\n[lr_scheduler]\nkind = \"wsd\"\n", "test").ok());
  EXPECT_EQ(optimizer.lr, 0.5);
  EXPECT_EQ(optimizer.clip_norm, 0.0);
  EXPECT_EQ(schedule.kind, "wsd");
  EXPECT_FALSE(table.set("lr_scheduler.kind=step").ok());
}

}  // namespace
}  // namespace kintsugi::runtime
