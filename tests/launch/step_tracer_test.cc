#include "launch/step_tracer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

namespace kintsugi::launch {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(StepRangesTest, RangesAndSingleStepsAreOneAscendingList) {
  EXPECT_THAT(*parse_step_ranges("20,10-12,11"), ElementsAre(10, 11, 12, 20));
  EXPECT_THAT(*parse_step_ranges("1"), ElementsAre(1));
}

TEST(StepRangesTest, WhatIsNoRangeIsRefusedWithAnExample) {
  for (const char* text : {"", "0", "a", "3-", "-3", "5-4", "1,,2", "1-99999999", "1-2-3"}) {
    const auto steps = parse_step_ranges(text);
    ASSERT_FALSE(steps.ok()) << text;
    EXPECT_EQ(steps.status().code(), StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(steps.status().message(), HasSubstr("10-12,20")) << text;
  }
}

class StepTracerTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = testing::TempDir() + "step_tracer_test";
    std::filesystem::remove_all(folder_);
  }
  nlohmann::json events() const {
    std::ifstream file(folder_ + "/trace/rank-2-generation-5.json");
    return nlohmann::json::parse(file);
  }
  std::string folder_;
};

TEST_F(StepTracerTest, TheHostsSpansOfEachTracedStepAreInTheFile) {
  StepTracer tracer({.rank = 2, .out_dir = folder_, .steps = {3, 4}});
  trace::Timeline timeline("step", 8);
  int drained = 0;
  for (int64_t step = 1; step <= 5; ++step) {
    tracer.begin(step);
    timeline.clear();
    timeline.add("forward", 1000 * step, 1000 * step + 500, step);
    if (!tracer.traced(step)) continue;
    const trace::Timeline* const timelines[] = {&timeline};
    ASSERT_TRUE(tracer.write(step, 5, timelines, [&] { return ++drained, ok_status(); }).ok());
  }
  std::vector<int64_t> steps;
  for (const auto& event : events()) {
    if (event.value("name", "") == "forward") steps.push_back(event["args"]["step"]);
  }
  EXPECT_THAT(steps, ElementsAre(3, 4));
  EXPECT_EQ(drained, 0);  // nothing runs behind the host's back
  EXPECT_EQ(tracer.listener(), nullptr);
}

TEST_F(StepTracerTest, WithoutAFolderNoStepIsTraced) {
  EXPECT_FALSE(StepTracer({.out_dir = "", .steps = {3}}).traced(3));
  EXPECT_TRUE(StepTracer({.out_dir = folder_, .steps = {3}}).traced(3));
}

}  // namespace
}  // namespace kintsugi::launch
