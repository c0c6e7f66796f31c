// Sharded modes through the whole training loop: ranks are threads, and the last digest is held against one rank that
// keeps everything.
#include <gmock/gmock.h>

#include "launch/plan_report.h"
#include "tests/launch/training_job.h"

namespace kintsugi::launch {
namespace {

using testing::HasSubstr;

struct Mode {
  const char* mode;
  int world_size;
  int64_t replicate;
};

std::string name_of(const Mode& m) {
  return std::string(m.mode) + "_" + std::to_string(m.world_size) + "ranks" +
         (m.replicate > 1 ? "_" + std::to_string(m.replicate) + "replicas" : "");
}

class ShardedTrainerTest : public testing::Test {
 protected:
  ShardedTrainerTest() {
    config_.parallelism.reduce_order = "fixed";
    config_.training.steps = 5;
    config_.training.eval_every = 2;
    config_.training.eval_samples = 20;
  }
  TrainingJob::Outcome whole() { return finished_job(config_, 1); }
  RunConfig sharded(const Mode& m) const {
    RunConfig config = config_;
    config.parallelism.mode = m.mode;
    config.parallelism.replicate = m.replicate;
    config.recovery.snapshot_every = 2;
    return config;
  }
  void kill(RunConfig& config, int rank, int step, const std::string& point) const {
    config.fault.kill.push_back({{"rank", int64_t{rank}}, {"step", int64_t{step}}, {"point", point}});
  }
  // Two steps in each mode in turn, each run going on from the checkpoint of the one before.
  void go_on_through(const std::vector<Mode>& modes, std::vector<TrainingJob::Outcome>& outcomes) {
    int64_t step = 0;
    for (const Mode& m : modes) {
      SCOPED_TRACE(name_of(m));
      RunConfig config = sharded(m);
      config.training.schedule_steps = config_.training.steps;
      config.training.steps = step + 2;
      TrainingJob job(config, m.world_size);
      job.save_checkpoints(dir_.path() + "/checkpoint");
      if (step > 0) job.resume_from(dir_.path() + "/checkpoint/step-" + std::to_string(step), step);
      outcomes.push_back(job.run());
      ASSERT_TRUE(outcomes.back().status.ok()) << outcomes.back().status.to_string();
      step += 2;
    }
    ASSERT_EQ(step, config_.training.steps);
  }
  ScratchDir dir_;
  RunConfig config_ = tiny_config(dir_.path());
};

TEST_F(ShardedTrainerTest, EveryModeEndsWithTheBitsOfOneRank) {
  const TrainingJob::Outcome want = whole();
  for (const Mode& m : {Mode{"zero1", 1, 0},
                        {"zero3", 1, 0},
                        {"zero1", 3, 0},
                        {"zero2", 4, 0},
                        {"zero3", 2, 0},
                        {"zero3", 6, 0},
                        {"zero2", 4, 2},
                        {"zero3", 4, 2},
                        {"zero3", 8, 0}}) {
    SCOPED_TRACE(name_of(m));
    const TrainingJob::Outcome got = finished_job(sharded(m), m.world_size);
    EXPECT_EQ(got.sha256(), want.sha256());
    EXPECT_EQ(got.column("loss_metrics/global_avg_loss"), want.column("loss_metrics/global_avg_loss"));
    EXPECT_EQ(got.column("grad_norm"), want.column("grad_norm"));
    EXPECT_EQ(got.summary.value("validation_loss", 0.0), want.summary.value("validation_loss", 1.0));
  }
}

// Case A03: head and table are one weight with one pair of moments, whoever holds which part of it.
TEST_F(ShardedTrainerTest, ATiedTableIsOneTensorInEveryMode) {
  config_.model.tied_embedding = true;
  config_.training.steps = 3;
  config_.checkpoint.save_last = true;
  const TrainingJob::Outcome want = whole();
  int saved = 0;
  for (const Mode& m : {Mode{"ddp", 4, 0}, {"zero1", 4, 0}, {"zero2", 4, 0}, {"zero3", 4, 0}, {"zero3", 4, 2}}) {
    SCOPED_TRACE(name_of(m));
    const std::string dir = dir_.path() + "/tied-" + std::to_string(++saved);
    TrainingJob job(sharded(m), m.world_size);
    job.save_checkpoints(dir);
    const TrainingJob::Outcome got = job.run();
    ASSERT_TRUE(got.status.ok()) << got.status.to_string();
    EXPECT_EQ(got.sha256(), want.sha256());
    EXPECT_EQ(got.column("grad_norm"), want.column("grad_norm"));
    const auto manifest = nlohmann::json::parse(FileSystem::posix().read_file(dir + "/step-3/manifest.json").value());
    std::vector<std::string> tables;
    for (const nlohmann::json& tensor : manifest["tensors"]) {
      const std::string name = tensor["name"];
      if (name.find("embed") != std::string::npos || name.find("head") != std::string::npos) tables.push_back(name);
    }
    EXPECT_THAT(tables, testing::ElementsAre("model.embed_tokens.weight"));
    // A shard holds its range of weights, first and second moments: of all ranks together, each element once.
    EXPECT_EQ(manifest["total_length"], runtime::ParamTable::build(config_.model).total_length());
  }
}

TEST_F(ShardedTrainerTest, ALostShardComesBackFromSnapshotsInMemory) {
  const std::string want = whole().sha256();
  for (const char* point :
       {"data", "forward", "backward", "mid-reduce", "before-vote", "after-vote", "mid-update", "snapshot"}) {
    for (const Mode& m : {Mode{"zero1", 3, 0}, {"zero2", 3, 0}, {"zero3", 3, 0}}) {
      SCOPED_TRACE(std::string(point) + " " + name_of(m));
      RunConfig config = sharded(m);
      kill(config, 1, 4, point);
      const TrainingJob::Outcome got = run_job(config, m.world_size);
      ASSERT_TRUE(got.status.ok()) << got.status.to_string();
      EXPECT_EQ(got.sha256(), want);
      ASSERT_EQ(got.verdicts.size(), 2u);
      EXPECT_EQ(got.verdicts[1].source, StateSource::kSnapshots);
      EXPECT_EQ(got.verdicts[1].committed_step, 2);
    }
  }
}

TEST_F(ShardedTrainerTest, AReplicaGivesALostShardAndNobodyGoesBack) {
  const std::string want = whole().sha256();
  for (const char* point : {"forward", "mid-reduce", "before-vote", "after-vote", "mid-update"}) {
    for (const Mode& m : {Mode{"zero3", 4, 2}, {"zero1", 4, 2}}) {
      SCOPED_TRACE(std::string(point) + " " + name_of(m));
      RunConfig config = sharded(m);
      kill(config, 2, 4, point);
      const TrainingJob::Outcome got = run_job(config, m.world_size);
      ASSERT_TRUE(got.status.ok()) << got.status.to_string();
      EXPECT_EQ(got.sha256(), want);
      ASSERT_EQ(got.verdicts.size(), 2u);
      EXPECT_EQ(got.verdicts[1].source, StateSource::kSurvivors);
      EXPECT_GE(got.verdicts[1].committed_step, 3);
    }
  }
}

TEST_F(ShardedTrainerTest, ADeathBeforeAnySnapshotBeginsAgain) {
  const std::string want = whole().sha256();
  RunConfig config = sharded({"zero3", 3, 0});
  kill(config, 2, 1, "backward");
  kill(config, 0, 3, "during-recovery");
  const TrainingJob::Outcome got = run_job(config, 3);
  ASSERT_TRUE(got.status.ok()) << got.status.to_string();
  EXPECT_EQ(got.sha256(), want);
  EXPECT_EQ(got.verdicts[1].source, StateSource::kFresh);
}

TEST_F(ShardedTrainerTest, AnyModeAndWorldSizeGoesOnFromAnyOther) {
  config_.checkpoint.every = 2;
  config_.training.steps = 10;
  config_.lr_scheduler.warmup_steps = 0;
  const std::string want = whole().sha256();
  std::vector<TrainingJob::Outcome> got;
  ASSERT_NO_FATAL_FAILURE(
      go_on_through({{"zero3", 8, 0}, {"zero2", 4, 0}, {"zero3", 6, 2}, {"zero1", 3, 0}, {"zero3", 8, 2}}, got));
  for (size_t i = 1; i < got.size(); ++i) EXPECT_THAT(got[i].log.front(), HasSubstr("a rank reads"));
  EXPECT_EQ(got.back().sha256(), want);
}

TEST_F(ShardedTrainerTest, Bf16MomentsEndWithTheBitsOfOneRankThroughModesAndDeaths) {
  config_.optimizer.moments_dtype = "bf16";
  config_.checkpoint.every = 2;
  config_.training.steps = 6;
  const std::string want = whole().sha256();
  RunConfig killed = sharded({"zero3", 3, 0});  // from a snapshot
  kill(killed, 1, 4, "mid-reduce");
  EXPECT_EQ(finished_job(killed, 3).sha256(), want);
  killed = config_;  // from a peer's memory
  kill(killed, 1, 4, "mid-update");
  EXPECT_EQ(finished_job(killed, 3).sha256(), want);
  std::vector<TrainingJob::Outcome> got;
  ASSERT_NO_FATAL_FAILURE(go_on_through({{"zero3", 8, 0}, {"ddp", 3, 0}, {"zero2", 4, 2}}, got));
  EXPECT_EQ(got.back().sha256(), want);
}

TEST_F(ShardedTrainerTest, MomentsOfAnotherTypeAreConvertedAndTheLogSaysHow) {
  config_.checkpoint.every = 2;
  config_.training.steps = 2;
  const std::string dir = dir_.path() + "/checkpoint";
  TrainingJob first(config_, 1);
  first.save_checkpoints(dir);
  ASSERT_TRUE(first.run().status.ok());
  config_.training.steps = 4;
  config_.optimizer.moments_dtype = "bf16";
  std::vector<std::string> digests;
  for (const Mode& m : {Mode{"zero1", 1, 0}, {"zero3", 3, 0}}) {
    TrainingJob job(sharded(m), m.world_size);
    job.save_checkpoints(dir_.path() + "/" + name_of(m));
    job.resume_from(dir + "/step-2", 2);
    const TrainingJob::Outcome outcome = job.run();
    ASSERT_TRUE(outcome.status.ok()) << outcome.status.to_string();
    EXPECT_THAT(outcome.log.front(), HasSubstr("fp32 moments were rounded to the nearest bf16"));
    digests.push_back(outcome.sha256());
  }
  EXPECT_EQ(digests[0], digests[1]);
  config_.training.steps = 5;
  config_.optimizer.moments_dtype = "fp32";
  TrainingJob back(config_, 1);
  back.resume_from(dir_.path() + "/zero3_3ranks/step-4", 4);
  const TrainingJob::Outcome outcome = back.run();
  ASSERT_TRUE(outcome.status.ok()) << outcome.status.to_string();
  EXPECT_THAT(outcome.log.front(), HasSubstr("bf16 moments go on in fp32"));
}

// Cases from the field: a vocabulary, a width and a batch that divide by nothing, ranks that own nothing of a unit.
TEST_F(ShardedTrainerTest, SizesThatDivideByNothingGoOnAtAnyWorldSize) {
  config_.model.vocab_size = 251;
  config_.model.dim = 24;
  config_.model.num_heads = 3;
  config_.model.ffn_dim = 44;
  config_.model.num_layers = 1;
  config_.training.global_batch_size = 105;
  config_.parallelism.virtual_shards = 35;
  config_.training.steps = 10;
  config_.checkpoint.every = 2;
  const std::string want = whole().sha256();
  std::vector<TrainingJob::Outcome> got;
  ASSERT_NO_FATAL_FAILURE(
      go_on_through({{"zero1", 3, 0}, {"zero2", 5, 0}, {"zero3", 7, 0}, {"ddp", 1, 0}, {"zero3", 3, 0}}, got));
  EXPECT_EQ(got.back().sha256(), want);
}

TEST_F(ShardedTrainerTest, AMeshThatDoesNotFitIsRefusedWithBothNumbers) {
  RunConfig config = sharded({"zero3", 4, 0});
  config.parallelism.shard = 3;
  const Status status = config.validate(4);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("3"));
  EXPECT_THAT(status.message(), HasSubstr("4"));
}

TEST_F(ShardedTrainerTest, ThePlanComparesTheModesForMachinesThatAreNotHere) {
  const Result<std::string> report =
      report_plan(sharded({"zero3", 8, 0}), {.world_size = 8, .gpu_gib = 0.0001, .host_gib = 64});
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  for (const char* mode : {"ddp", "zero1", "zero2", "zero3"}) EXPECT_THAT(*report, HasSubstr(mode));
  EXPECT_THAT(*report, HasSubstr("GiB of GPU memory too much"));
  EXPECT_EQ(report_plan(sharded({"zero3", 8, 3}), {.world_size = 8}).status().code(), StatusCode::kInvalidArgument);
}

TEST_F(ShardedTrainerTest, ARunThatDoesNotFitTheHostIsRefusedAndAModeThatWouldIsNamed) {
  config_.model.dim = 480;
  config_.training.seq_len = 8;
  config_.recovery.spares = 0;
  const RunConfig zero3 = sharded({"zero3", 8, 0});
  int64_t fits = 1 << 20;
  while (!check_host_memory(zero3, 8, fits).ok()) fits += 1 << 20;
  const Status status = check_host_memory(config_, 8, fits);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("GiB too much"));
  EXPECT_THAT(status.message(), HasSubstr("would fit"));
  EXPECT_TRUE(check_host_memory(config_, 8, int64_t{1} << 40).ok());
}

}  // namespace
}  // namespace kintsugi::launch
