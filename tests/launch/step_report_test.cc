#include "launch/step_report.h"

#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>

namespace kintsugi::launch {
namespace {

StepReport report() {
  StepReport r;
  r.vote = {.step = 7, .gradient_norm = 1.5, .loss_sum = 4096, .num_tokens = 2048, .skip = 0, .stop_requested = 0};
  r.generation = 3;
  r.lr = 1e-3;
  r.flops_per_token = 1e6;
  StepTimes times;
  times.total_ns = 500'000'000;
  times.data_ns = 5'000'000;
  r.times = times;
  return r;
}

TEST(StepReportTest, NamesAreTorchtitansAndRatesFollowFromTheTimes) {
  const nlohmann::json line = nlohmann::json::parse(to_json(report()));
  EXPECT_EQ(line["step"], 7);
  EXPECT_EQ(line["generation"], 3);
  EXPECT_EQ(line["loss_metrics/global_avg_loss"], 2.0);
  EXPECT_EQ(line["grad_norm"], 1.5);
  EXPECT_DOUBLE_EQ(line["throughput(tps)"], 4096.0);
  EXPECT_DOUBLE_EQ(line["time_metrics/end_to_end(s)"], 0.5);
  EXPECT_DOUBLE_EQ(line["time_metrics/data_loading(%)"], 1.0);
  EXPECT_DOUBLE_EQ(line["tflops"], 4096.0 * 1e6 * 1e-12);
  EXPECT_FALSE(line.contains("mfu(%)")) << "the peak is not known";
}

TEST(StepReportTest, WhatIsNotFiniteIsNull) {
  StepReport r = report();
  r.vote.loss_sum = std::numeric_limits<double>::quiet_NaN();
  r.vote.gradient_norm = std::numeric_limits<double>::infinity();
  const nlohmann::json line = nlohmann::json::parse(to_json(r));
  EXPECT_TRUE(line["loss_metrics/global_avg_loss"].is_null());
  EXPECT_TRUE(line["grad_norm"].is_null());
}

TEST(StepReportTest, AStepWithoutTimesHasNoRates) {
  StepReport r = report();
  r.times = StepTimes{};
  EXPECT_FALSE(nlohmann::json::parse(to_json(r)).contains("throughput(tps)"));
  r.times.reset();
  EXPECT_FALSE(nlohmann::json::parse(to_json(r)).contains("throughput(tps)"));
}

}  // namespace
}  // namespace kintsugi::launch
