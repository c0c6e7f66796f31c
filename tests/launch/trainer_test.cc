#include "launch/trainer.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <cmath>
#include <map>

#include "training_job.h"

namespace kintsugi::launch {
namespace {

using testing::DoubleNear;
using testing::Each;
using testing::HasSubstr;
using testing::Pointwise;

constexpr const char* kLoss = "loss_metrics/global_avg_loss";

class TrainerTest : public testing::Test {
 protected:
  RunConfig config() const { return tiny_config(dir_.path()); }
  RunConfig fixed() const {
    RunConfig c = config();
    c.parallelism.reduce_order = "fixed";
    return c;
  }
  ScratchDir dir_;
};

TEST_F(TrainerTest, LossFallsFromTheUniformOne) {
  RunConfig c = config();
  c.training.steps = 20;
  const std::vector<double> loss = finished_job(c, 1).column(kLoss);
  ASSERT_EQ(loss.size(), 20u);
  EXPECT_NEAR(loss.front(), std::log(256.0), 0.2);
  EXPECT_LT(loss.back(), loss.front() - 0.3);
}

TEST_F(TrainerTest, DebugNanNamesTheLayerThatStopsBeingFinite) {
  RunConfig c = diverging(config());
  c.training.debug_nan = true;
  const TrainingJob::Outcome outcome = finished_job(c, 1);
  ASSERT_GT(outcome.summary["skipped_steps"].get<int64_t>(), 0);
  ASSERT_FALSE(outcome.log.empty());
  EXPECT_THAT(outcome.log.front(), AllOf(HasSubstr("was skipped"), HasSubstr("stop being finite in the")));
  c.training.debug_nan = false;
  EXPECT_EQ(finished_job(c, 1).sha256(), outcome.sha256()) << "looking changes nothing";
}

TEST_F(TrainerTest, FixedOrderGivesTheSameBitsAtEveryWorldSize) {
  RunConfig c = fixed();
  c.training.eval_every = 2;
  c.training.eval_samples = 10;
  const TrainingJob::Outcome one = finished_job(c, 1);
  for (const int N : {2, 3, 4, 8}) {
    const TrainingJob::Outcome many = finished_job(c, N);
    EXPECT_EQ(many.column(kLoss), one.column(kLoss)) << N << " ranks";
    EXPECT_EQ(many.column("grad_norm"), one.column("grad_norm")) << N << " ranks";
    EXPECT_EQ(many.summary["validation_loss"], one.summary["validation_loss"]) << N << " ranks";
    EXPECT_EQ(many.sha256(), one.sha256()) << N << " ranks";
  }
}

TEST_F(TrainerTest, SeparateDocumentsTrainToTheSameBitsAtEveryWorldSize) {
  RunConfig c = fixed();
  c.training.eval_every = 3;
  c.training.eval_samples = 10;
  for (const char* family : {"llama", "gpt2"}) {
    c.model.family = family;
    c.data.document_separator = "";
    const std::string whole = finished_job(c, 1).sha256();
    c.data.document_separator = "59";  // the text's semicolons
    const TrainingJob::Outcome one = finished_job(c, 1);
    EXPECT_NE(one.sha256(), whole);
    for (const int N : {2, 3}) {
      const TrainingJob::Outcome many = finished_job(c, N);
      EXPECT_EQ(many.column(kLoss), one.column(kLoss)) << N << " ranks";
      EXPECT_EQ(many.summary["validation_loss"], one.summary["validation_loss"]) << N << " ranks";
      EXPECT_EQ(many.sha256(), one.sha256()) << N << " ranks";
    }
    RunConfig sharded = c;
    sharded.parallelism.mode = "zero3";
    EXPECT_EQ(finished_job(sharded, 2).sha256(), one.sha256());
  }
}

TEST_F(TrainerTest, FixedOrderIsFixedInBf16AndForTiedModelsToo) {
  RunConfig c = fixed();
  c.training.dtype = "bf16";
  c.model.family = "gpt2";
  c.model.tied_embedding = true;
  const std::string one = finished_job(c, 1).sha256();
  EXPECT_EQ(finished_job(c, 3).sha256(), one);
  EXPECT_EQ(finished_job(c, 8).sha256(), one);
}

// Ranks, micro-batch and accumulation share out one batch of 24; in fixed order no layout changes a bit, and a clip
// threshold above the norm changes none against clipping off.
TEST_F(TrainerTest, OneBatchInManyLayouts) {
  struct Layout {
    int ranks;
    int64_t micro_batch;
  };
  RunConfig c = fixed();
  c.optimizer.clip_norm = 0;
  const TrainingJob::Outcome unclipped = finished_job(c, 1);
  const double norm = unclipped.column("grad_norm").front();
  for (const double clip : {0.0, 1e6, norm / 2}) {
    c.optimizer.clip_norm = clip;
    std::string sha256 = clip == norm / 2 ? "" : unclipped.sha256();
    for (const Layout& layout : {Layout{1, 24}, Layout{1, 1}, Layout{2, 3}, Layout{3, 8}, Layout{8, 3}}) {
      c.training.micro_batch_size = layout.micro_batch;
      const TrainingJob::Outcome outcome = finished_job(c, layout.ranks);
      EXPECT_EQ(outcome.column("grad_norm").front(), norm) << "the norm is that before clipping";
      if (sha256.empty()) sha256 = outcome.sha256();
      EXPECT_EQ(outcome.sha256(), sha256) << layout.ranks << " ranks, micro-batch " << layout.micro_batch;
      if (clip != norm / 2) {
        EXPECT_EQ(outcome.column(kLoss), unclipped.column(kLoss));
      }
    }
    EXPECT_EQ(sha256 == unclipped.sha256(), clip != norm / 2);
  }
}

// Sums of the same terms in another order: each of the norm's and loss's sums has relative error below n eps with n the
// longest chain, here 24 x 32 rows of a gradient; three steps carry it on. eps = 2^-24.
TEST_F(TrainerTest, FastOrderAgreesWithFixedOrderWithinRounding) {
  const double tolerance = 24 * 32 * std::ldexp(1.0, -24);
  const TrainingJob::Outcome want = finished_job(fixed(), 2);
  for (const int64_t micro_batch : {0, 2}) {
    for (const int N : {1, 3, 4}) {
      RunConfig c = config();
      c.training.micro_batch_size = micro_batch;
      const TrainingJob::Outcome outcome = finished_job(c, N);
      EXPECT_THAT(outcome.column(kLoss), Pointwise(DoubleNear(tolerance * 6), want.column(kLoss)));
      EXPECT_THAT(outcome.column("grad_norm"), Pointwise(DoubleNear(tolerance * 6), want.column("grad_norm")));
    }
  }
}

TEST_F(TrainerTest, FastOrderRepeatsItself) {
  EXPECT_EQ(finished_job(config(), 4).sha256(), finished_job(config(), 4).sha256());
}

TEST_F(TrainerTest, OverlapChangesNoBit) {
  for (RunConfig c : {config(), fixed()}) {
    const std::string with = finished_job(c, 3).sha256();
    c.comm.overlap = false;
    EXPECT_EQ(finished_job(c, 3).sha256(), with);
  }
}

TEST_F(TrainerTest, StepsThatAreNotFiniteAreSkippedByAllAndCounted) {
  RunConfig c = diverging(config());
  const TrainingJob::Outcome outcome = finished_job(c, 3);
  int64_t skipped = 0;
  for (const nlohmann::json& line : outcome.metrics) {
    if (line["skipped"]) ++skipped;
    EXPECT_EQ(line["skipped"], skipped > 0) << "weights that overflow stay as they are";
    EXPECT_EQ(line["skipped_steps"], skipped);
    EXPECT_EQ(line["grad_norm"].is_null(), skipped > 0) << "what is not finite is null";
  }
  EXPECT_GE(skipped, 2);
  EXPECT_LT(skipped, c.training.steps);
  EXPECT_EQ(outcome.summary["skipped_steps"], skipped);
  EXPECT_EQ(outcome.summary["steps"], c.training.steps) << "a skipped step is a step";
}

TEST_F(TrainerTest, TheLearningRateOfEachStepIsReportedAlsoAfterAResume) {
  RunConfig c = config();
  c.training.steps = 12;
  c.training.global_batch_size = 2;
  c.optimizer.lr = 1e-3;
  c.lr_scheduler.warmup_steps = 4;
  c.lr_scheduler.min_lr_ratio = 0.1;
  c.checkpoint.every = 1;
  const std::vector<double> want = {2.5e-4,      5e-4,   7.5e-4,      1e-3,        9.657458e-4, 8.681981e-4,
                                    7.222075e-4, 5.5e-4, 3.777925e-4, 2.318019e-4, 1.342542e-4, 1e-4};
  TrainingJob job(c, 1);
  job.save_checkpoints(dir_.path() + "/checkpoint");
  const std::vector<double> lr = job.run().column("lr");
  EXPECT_THAT(lr, Pointwise(DoubleNear(1e-9), want));
  EXPECT_EQ(lr[3], 1e-3);
  for (const int step : {1, 3, 4, 11}) {
    TrainingJob resumed(c, 1);
    resumed.resume_from(dir_.path() + "/checkpoint/step-" + std::to_string(step), step);
    EXPECT_EQ(resumed.run().column("lr"), std::vector<double>(lr.begin() + step, lr.end()));
  }
}

class ResumeTest : public TrainerTest {
 protected:
  TrainingJob::Outcome resume(const RunConfig& c, int64_t step, int world_size = 2) const {
    TrainingJob job(c, world_size);
    job.resume_from(dir_.path() + "/checkpoint/step-" + std::to_string(step), step);
    return job.run();
  }
  TrainingJob::Outcome run_and_save(const RunConfig& c, int world_size = 2) const {
    TrainingJob job(c, world_size);
    job.save_checkpoints(dir_.path() + "/checkpoint");
    TrainingJob::Outcome outcome = job.run();
    EXPECT_TRUE(outcome.status.ok()) << outcome.status.to_string();
    return outcome;
  }
};

TEST_F(ResumeTest, AResumedRunEndsWithTheSameBits) {
  RunConfig c = config();
  c.training.steps = 6;
  c.checkpoint.every = 2;
  const TrainingJob::Outcome whole = run_and_save(c);
  for (const int step : {2, 4}) {
    const TrainingJob::Outcome rest = resume(c, step);
    EXPECT_EQ(rest.sha256(), whole.sha256());
    EXPECT_EQ(rest.metrics.front()["step"], step + 1);
    EXPECT_EQ(rest.metrics.back()["tokens_seen"], whole.metrics.back()["tokens_seen"]);
  }
}

TEST_F(ResumeTest, AFinishedRunHasNothingLeftToDo) {
  RunConfig c = config();
  c.checkpoint.save_last = true;
  const TrainingJob::Outcome whole = run_and_save(c);
  const TrainingJob::Outcome again = resume(c, 3);
  EXPECT_TRUE(again.metrics.empty());
  EXPECT_EQ(again.sha256(), whole.sha256());
  EXPECT_EQ(again.summary["steps"], 3);
  EXPECT_TRUE(whole.summary["final_loss"].is_number());
  EXPECT_EQ(again.summary["final_loss"], whole.summary["final_loss"]);
  EXPECT_TRUE(whole.summary["tokens_per_second"].is_number());
  EXPECT_TRUE(again.summary["tokens_per_second"].is_null());
}

TEST_F(ResumeTest, SkippedStepsAreCountedOn) {
  RunConfig c = diverging(config());
  c.checkpoint.every = c.training.steps - 1;
  const TrainingJob::Outcome whole = run_and_save(c);
  EXPECT_EQ(resume(c, c.checkpoint.every).summary["skipped_steps"], whole.summary["skipped_steps"]);
}

TEST_F(ResumeTest, AShorterRunThanTheCheckpointIsRefused) {
  RunConfig c = config();
  c.checkpoint.save_last = true;
  run_and_save(c);
  c.training.steps = 2;
  const TrainingJob::Outcome outcome = resume(c, 3);
  EXPECT_EQ(outcome.status.code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(outcome.status.message(), HasSubstr("the run is at step 3, training.steps = 2"));
}

TEST_F(ResumeTest, OneStepMoreIsTheStepOfAnUnbrokenRun) {
  RunConfig c = config();
  c.training.schedule_steps = 4;
  c.checkpoint.save_last = true;
  run_and_save(c);
  c.training.steps = 4;
  const TrainingJob::Outcome more = resume(c, 3);
  ASSERT_EQ(more.metrics.size(), 1u);
  EXPECT_EQ(more.metrics[0]["step"], 4);
  EXPECT_EQ(more.sha256(), finished_job(c, 2).sha256());
}

TEST_F(ResumeTest, ALongerCurveIsSaidWithBothRates) {
  RunConfig c = config();
  c.checkpoint.save_last = true;
  run_and_save(c);
  c.training.steps = 6;
  const TrainingJob::Outcome outcome = resume(c, 3);
  ASSERT_EQ(outcome.log.size(), 1u);
  EXPECT_THAT(outcome.log[0], testing::AllOf(HasSubstr("training.steps = 6 (was 3)"), HasSubstr("curve over 6 steps"),
                                             HasSubstr("training.schedule_steps = 3 keeps the old one")));
}

TEST_F(ResumeTest, ARequestToStopSavesAndTheRestGivesTheSameBits) {
  RunConfig c = config();
  c.training.steps = 6;
  TrainingJob job(c, 3);
  job.save_checkpoints(dir_.path() + "/checkpoint");
  job.request_stop(/*rank=*/2, /*step=*/4);
  const TrainingJob::Outcome stopped = job.run();
  EXPECT_EQ(stopped.outcome, RunOutcome::kStopRequested);
  EXPECT_EQ(stopped.metrics.back()["step"], 4);
  EXPECT_EQ(resume(c, 4, 3).sha256(), finished_job(c, 3).sha256());
}

TEST_F(ResumeTest, FixedOrderGoesOnAtAnotherWorldSize) {
  RunConfig c = fixed();
  c.checkpoint.every = 1;
  const TrainingJob::Outcome whole = run_and_save(c, 3);
  EXPECT_EQ(resume(c, 1, 4).sha256(), whole.sha256());
}

TEST_F(TrainerTest, TracedStepsShowUnitsAndBucketsOneAfterAnother) {
  RunConfig c = config();
  c.metrics.trace_steps = {2};
  TrainingJob job(c, 2);
  job.write_to(dir_.path());
  const std::string sha256 = job.run().sha256();
  for (const int rank : {0, 1}) {
    const std::string path = fmt::format("{}/trace/rank-{}-generation-1.json", dir_.path(), rank);
    std::map<std::string, int> spans;
    double bucket_end = 0;
    for (const nlohmann::json& event : nlohmann::json::parse(FileSystem::posix().read_file(path).value())) {
      if (event["ph"] != "X") continue;
      const std::string name = event["name"];
      ++spans[name];
      if (!name.starts_with("sum of bucket")) continue;
      EXPECT_GE(event["ts"].get<double>(), bucket_end - 0.001) << name;
      bucket_end = event["ts"].get<double>() + event["dur"].get<double>();
    }
    for (const char* name : {"fetch", "forward and backward", "wait for sums", "vote", "update", "forward block.0",
                             "backward block.1", "sum of bucket 0"}) {
      EXPECT_EQ(spans[name], 1) << name;
    }
  }
  EXPECT_EQ(sha256, finished_job(c, 2).sha256()) << "tracing changes no bit";
}

TEST_F(TrainerTest, TooShortValidationTextIsAMessageNotANumber) {
  RunConfig c = config();
  c.training.eval_every = 1;
  c.data.validation = {dir_.path() + "/short.txt"};
  ASSERT_TRUE(FileSystem::posix().write_file(c.data.validation[0], std::string(32, 'x')).ok());
  const Status status = run_job(c, 1).status;
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("33"));
}

TEST_F(TrainerTest, ATextOfOneWindowTrains) {
  RunConfig c = config();
  c.data.train = {dir_.path() + "/short.txt"};
  ASSERT_TRUE(FileSystem::posix().write_file(c.data.train[0], std::string(33, 'x')).ok());
  EXPECT_EQ(finished_job(c, 1).metrics.size(), 3u);
}

}  // namespace
}  // namespace kintsugi::launch
