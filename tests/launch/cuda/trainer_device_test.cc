// The training loop on a GPU, one rank: against the CPU's, with and without recorded graphs, and from a checkpoint.
#include <gmock/gmock.h>

#include <cmath>

#include "tests/launch/training_job.h"

namespace kintsugi::launch {
namespace {

constexpr const char* kLoss = "loss_metrics/global_avg_loss";

class DeviceTrainerTest : public testing::Test {
 protected:
  RunConfig config() const {
    RunConfig c = tiny_config(dir_.path());
    c.model.dim = 192;  // heads of 64
    c.training.steps = 8;
    c.training.micro_batch_size = 8;
    c.training.tune = false;  // no folder keeps a choice from one run to the next
    c.device = "cuda";
    return c;
  }
  ScratchDir dir_;
};

void expect_losses_of_the_cpu(RunConfig c) {
  c.training.eval_every = 4;
  c.training.eval_samples = 10;
  const TrainingJob::Outcome gpu = finished_job(c, 1);
  c.device = "cpu";
  const TrainingJob::Outcome cpu = finished_job(c, 1);
  const std::vector<double> got = gpu.column(kLoss), want = cpu.column(kLoss);
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-4 * want[i]) << "step " << i + 1;
  EXPECT_NEAR(gpu.summary["validation_loss"].get<double>(), cpu.summary["validation_loss"].get<double>(), 1e-3);
}

void expect_same_bits_recorded_or_not(RunConfig c) {
  for (const char* dtype : {"fp32", "bf16"}) {
    SCOPED_TRACE(dtype);
    c.training.dtype = dtype;
    c.training.cuda_graphs = true;
    const TrainingJob::Outcome recorded = finished_job(c, 1);
    EXPECT_EQ(finished_job(c, 1).sha256(), recorded.sha256());
    c.training.cuda_graphs = false;
    const TrainingJob::Outcome eager = finished_job(c, 1);
    EXPECT_EQ(eager.sha256(), recorded.sha256());
    EXPECT_EQ(eager.column(kLoss), recorded.column(kLoss));
    EXPECT_EQ(eager.column("grad_norm"), recorded.column("grad_norm"));
  }
}

TEST_F(DeviceTrainerTest, LossesFollowTheCpus) { expect_losses_of_the_cpu(config()); }

TEST_F(DeviceTrainerTest, GraphsChangeNoBitAndTwoRunsAreOne) { expect_same_bits_recorded_or_not(config()); }

// Every step has borders of its own.
TEST_F(DeviceTrainerTest, SeparateDocumentsTrainAsOnTheCpu) {
  RunConfig c = config();
  c.data.document_separator = "59";  // the text's semicolons
  expect_losses_of_the_cpu(c);
  expect_same_bits_recorded_or_not(c);
}

TEST_F(DeviceTrainerTest, RecomputationChangesNoBit) {
  RunConfig c = config();
  c.training.dtype = "bf16";
  const std::string want = finished_job(c, 1).sha256();
  for (const char* recompute : {"norms_and_activations", "attention", "block"}) {
    c.training.recompute = recompute;
    EXPECT_EQ(finished_job(c, 1).sha256(), want) << recompute;
  }
}

TEST_F(DeviceTrainerTest, FixedOrderRuns) {
  RunConfig c = config();
  c.parallelism.reduce_order = "fixed";
  EXPECT_EQ(finished_job(c, 1).sha256(), finished_job(c, 1).sha256());
}

TEST_F(DeviceTrainerTest, ARunResumedFromACheckpointEndsInTheSameState) {
  RunConfig c = config();
  c.checkpoint.every = 3;
  const std::string whole = finished_job(c, 1).sha256();
  const std::string dir = dir_.path() + "/checkpoint";
  TrainingJob first(c, 1);
  first.save_checkpoints(dir);
  EXPECT_EQ(first.run().sha256(), whole) << "snapshots change nothing";
  TrainingJob second(c, 1);
  second.resume_from(dir + "/step-3", 3);
  EXPECT_EQ(second.run().sha256(), whole);
}

TEST_F(DeviceTrainerTest, AFaultAnywhereInTheStepIsMendedFromTheCheckpoint) {
  RunConfig c = config();
  c.checkpoint.every = 3;
  const std::string whole = finished_job(c, 1).sha256();
  for (const char* point : {"data", "forward", "backward", "before-vote", "after-vote", "mid-update", "snapshot"}) {
    SCOPED_TRACE(point);
    RunConfig faulty = c;
    faulty.fault.kill = {ConfigTable::Row{{"rank", int64_t{0}}, {"step", int64_t{6}}, {"point", std::string(point)}}};
    TrainingJob job(faulty, 1);
    job.save_checkpoints(dir_.path() + "/" + point);
    EXPECT_EQ(job.run().sha256(), whole);
  }
}

TEST_F(DeviceTrainerTest, StepsThatAreNotFiniteAreSkipped) {
  RunConfig c = diverging(config());
  const TrainingJob::Outcome gpu = finished_job(c, 1);
  EXPECT_GT(gpu.summary["skipped_steps"].get<int64_t>(), 0);
  c.training.debug_nan = true;
  const TrainingJob::Outcome looked_at = finished_job(c, 1);
  EXPECT_EQ(looked_at.sha256(), gpu.sha256()) << "looking changes nothing";
  EXPECT_THAT(looked_at.log, testing::Contains(testing::HasSubstr("stop being finite in the")));
}

TEST_F(DeviceTrainerTest, ThePlanIsWhatIsUsed) {
  RunConfig c = config();
  c.training.micro_batch_size = 0;
  c.model.num_layers = 8;
  c.model.vocab_size = 50304;
  // Used is what the whole GPU has less than before: another process that comes or goes meanwhile is in it, too.
  constexpr int kAttempts = 4;
  double planned = 0, used = 0, allowed = 0;
  for (int i = 0; i == 0 || (i < kAttempts && std::abs(used - planned) > allowed); ++i) {
    const TrainingJob::Outcome outcome = finished_job(c, 1);
    planned = outcome.summary["planned_device_bytes"].get<double>();
    used = outcome.summary["used_device_bytes"].get<double>();
    allowed = 0.02 * planned + 10 * (2 << 20);  // allocations round up to 2 MiB each, and some are small
    printf("planned %.1f MiB, used %.1f MiB\n", planned / (1 << 20), used / (1 << 20));
  }
  EXPECT_NEAR(used, planned, allowed);
}

TEST_F(DeviceTrainerTest, AStepThatDoesNotFitIsRefusedWithTheSettingThatWould) {
  RunConfig c = config();
  c.training.global_batch_size = 1 << 20;
  c.training.micro_batch_size = 1 << 20;
  const TrainingJob::Outcome outcome = run_job(c, 1);
  EXPECT_EQ(outcome.status.code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(outcome.status.message(), testing::HasSubstr("training.micro_batch_size = "));
}

}  // namespace
}  // namespace kintsugi::launch
