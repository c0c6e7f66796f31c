#include "launch/trainer.h"

#include <gmock/gmock.h>

#include <cmath>

#include "checkpoint/checkpoint.h"
#include "training_job.h"

namespace kintsugi::launch {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class TrainerTest : public testing::Test {
 protected:
  RunConfig config() const { return tiny_config(dir_.path()); }
  static RunConfig fixed(RunConfig config) {
    config.parallelism.reduce_order = "fixed";
    return config;
  }
  ScratchDir dir_;
};

TrainingJob::Outcome finished(const RunConfig& config, int world_size) {
  TrainingJob::Outcome outcome = run_job(config, world_size);
  EXPECT_TRUE(outcome.status.ok()) << outcome.status.to_string();
  EXPECT_EQ(outcome.sha256().size(), 64u);
  return outcome;
}

TEST_F(TrainerTest, OneRankTrains) {
  RunConfig c = config();
  c.training.steps = 20;
  const TrainingJob::Outcome outcome = finished(c, 1);
  const std::vector<double> loss = outcome.column("loss_metrics/global_avg_loss");
  ASSERT_EQ(loss.size(), 20u);
  EXPECT_NEAR(loss.front(), std::log(256.0), 0.2);
  EXPECT_LT(loss.back(), loss.front() - 0.3);
}

TEST_F(TrainerTest, FixedOrderGivesTheSameBitsAtEveryWorldSize) {
  const TrainingJob::Outcome one = finished(fixed(config()), 1);
  for (const int N : {2, 3, 4, 8}) {
    const TrainingJob::Outcome many = finished(fixed(config()), N);
    EXPECT_EQ(many.column("loss_metrics/global_avg_loss"), one.column("loss_metrics/global_avg_loss")) << N << " ranks";
    EXPECT_EQ(many.column("grad_norm"), one.column("grad_norm")) << N << " ranks";
    EXPECT_EQ(many.sha256(), one.sha256()) << N << " ranks";
  }
}

}  // namespace
}  // namespace kintsugi::launch
