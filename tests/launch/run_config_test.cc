#include "launch/run_config.h"

#include <gmock/gmock.h>

#include "launch/memory_plan.h"
#include "runtime/base/file_system.h"
#include "training_job.h"

namespace kintsugi::launch {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class RunConfigTest : public testing::Test {
 protected:
  std::string write(const std::string& name, const std::string& text) {
    const std::string path = dir_.path() + "/" + name;
    EXPECT_TRUE(FileSystem::posix().write_file(path, text).ok());
    return path;
  }
  std::string error(const std::string& text, int world_size = 1) {
    const Result<RunConfig> config = RunConfig::load(write("run.toml", "data.train = \"text.txt\"\n" + text), {});
    return config.ok() ? config->validate(world_size).message() : config.status().message();
  }
  ScratchDir dir_;
};

TEST_F(RunConfigTest, PathsInTheFileStartAtItsFolder) {
  const std::string path = write("run.toml", "[data]\ntrain = [\"text.txt\", \"../other.txt\", \"/abs.txt\"]\n");
  const RunConfig config = RunConfig::load(path, {}).value();
  EXPECT_EQ(config.data.train[0], dir_.path() + "/text.txt");
  EXPECT_EQ(config.data.train[2], "/abs.txt");
  EXPECT_EQ(config.data.train[1].find(".."), std::string::npos);
}

TEST_F(RunConfigTest, PathsOnTheCommandLineStartAtTheWorkingFolder) {
  const RunConfig config = RunConfig::load(write("run.toml", ""), {"data.train=[\"text.txt\"]"}).value();
  EXPECT_TRUE(config.data.train[0].starts_with('/'));
  EXPECT_NE(config.data.train[0], dir_.path() + "/text.txt");
}

TEST_F(RunConfigTest, TheResolvedTextReadsBackToTheSame) {
  RunConfig config = tiny_config(dir_.path());
  config.optimizer.lr = 3.3e-4;
  config.fault.kill.push_back({{"rank", int64_t{0}}, {"step", int64_t{2}}, {"point", std::string("mid-update")}});
  const RunConfig again = RunConfig::parse(config.to_toml(), "text").value();
  EXPECT_EQ(again.to_toml(), config.to_toml());
  EXPECT_EQ(again.fault.entries(1)->at(0).point, FaultPoint::kMidUpdate);
}

TEST_F(RunConfigTest, AVocabularyOfZeroIsThatOfTheText) {
  write("text.txt", std::string(300, 'a'));
  const RunConfig config =
      RunConfig::load(write("run.toml", "data.train = \"text.txt\"\nmodel.vocab_size = 0\n"), {}).value();
  EXPECT_EQ(config.model.vocab_size, 256);
}

TEST_F(RunConfigTest, UnknownKeysNameTheNearestKnownOne) {
  EXPECT_THAT(error("[training]\nstep = 3\n"), AllOf(HasSubstr("run.toml:3"), HasSubstr("training.steps")));
}

TEST_F(RunConfigTest, ImpossibleNumbersNameTheKeyAndWhatIsAllowed) {
  EXPECT_THAT(error("training.steps = 0"), HasSubstr("training.steps = 0: must be at least 1"));
  EXPECT_THAT(error("model.num_heads = 7"), HasSubstr("model.num_heads = 7"));
  EXPECT_THAT(error("training.seq_len = 512"),
              AllOf(HasSubstr("training.seq_len = 512"), HasSubstr("max_seq_len = 256")));
  EXPECT_THAT(error("training.global_batch_size = 24", 5), HasSubstr("20 or 25"));
  EXPECT_THAT(error("parallelism.mode = \"zero4\""), HasSubstr("allowed: ddp, zero1, zero2, zero3"));
  EXPECT_THAT(error("parallelism.mode = \"zero3\"\nparallelism.keep_after_forward = [\"block.99\"]"),
              HasSubstr("there is no block \"block.99\"; allowed: block.0 to block."));
  EXPECT_THAT(error("parallelism.accumulation = \"whole\""), HasSubstr("mode \"ddp\" adds up whole"));
  EXPECT_THAT(error("training.dtype = \"fp16\""), HasSubstr("fp32, bf16"));
  EXPECT_THAT(error("training.eval_every = 5"), HasSubstr("data.validation"));
  EXPECT_THAT(error("metrics.trace_steps = [0]"), HasSubstr("metrics.trace_steps"));
  EXPECT_THAT(error("recovery.source = \"disk\""), HasSubstr("auto, peer, checkpoint"));
  EXPECT_THAT(error("comm.protocol = \"ll256\""),
              AllOf(HasSubstr("comm.protocol"), HasSubstr("auto, simple, ll, ll128")));
  EXPECT_THAT(error("comm.algorithm = \"star\""), AllOf(HasSubstr("comm.algorithm"), HasSubstr("ring, tree")));
  EXPECT_THAT(error("comm.nccl_buffsize = 5000"),
              HasSubstr("comm.nccl_buffsize = 5000: must be 0 or a multiple of 4096"));
  EXPECT_EQ(error("training.steps = 1"), "");
}

TEST_F(RunConfigTest, TheDeviceIsAGpuWhereThereIsOneAndAskingForOneElsewhereSaysWhatIsMissing) {
  const auto resolved = [](const char* device, bool built_with_cuda, bool has_driver) {
    RunConfig config;
    config.device = device;
    const Status status = config.resolve_device(built_with_cuda, has_driver);
    return status.ok() ? config.device : status.message();
  };
  EXPECT_EQ(resolved("auto", true, true), "cuda");
  EXPECT_EQ(resolved("auto", true, false), "cpu");
  EXPECT_EQ(resolved("auto", false, true), "cpu");
  EXPECT_EQ(resolved("cpu", true, true), "cpu");
  EXPECT_EQ(resolved("cuda", true, true), "cuda");
  EXPECT_THAT(resolved("cuda", true, false),
              AllOf(HasSubstr("no NVIDIA driver is loaded"), HasSubstr("\"cpu\" trains")));
  EXPECT_THAT(resolved("cuda", false, true), AllOf(HasSubstr("built without CUDA"), HasSubstr("cuda-release")));
}

TEST_F(RunConfigTest, DeathsThatCannotHappenAreRefused) {
  EXPECT_THAT(error("fault.kill = [{rank = 4, step = 1}]", 4),
              HasSubstr("fault.kill[0].rank = 4: must be from 0 to 3"));
  EXPECT_THAT(error("fault.kill = [{rank = 0, step = 0}]"), HasSubstr("steps count from 1"));
  EXPECT_THAT(error("fault.kill = [{rank = 0}]"), HasSubstr("step is missing"));
  EXPECT_THAT(error("fault.kill = [{rank = 0, step = 1, point = \"lunch\"}]"), HasSubstr("mid-reduce"));
  EXPECT_THAT(error("fault.kill = [{rank = 0, step = 1, by = \"age\"}]"), HasSubstr("\"signal\" or \"device\""));
}

TEST_F(RunConfigTest, HelpListsEveryKey) {
  const std::string help = RunConfig::help();
  for (const char* key :
       {"training.steps", "training.seed", "training.dtype", "training.global_batch_size", "training.deterministic",
        "parallelism.mode", "parallelism.reduce_order", "recovery.spares", "checkpoint.every", "fault.kill",
        "comm.overlap", "data.train", "model.dim", "optimizer.lr"}) {
    EXPECT_THAT(help, HasSubstr(key));
  }
}

TEST(FaultPlanTest, StrikesOnceAtItsRankStepAndPoint) {
  std::vector<bool> claimed(2);
  const FaultPlan plan(
      {{.rank = 1, .step = 5, .point = FaultPoint::kData}, {.rank = 2, .step = 5, .point = FaultPoint::kData}}, 2,
      [&](int64_t i) {
        const bool first = !claimed[i];
        claimed[i] = true;
        return first;
      },
      [] { return device_lost("struck"); });
  EXPECT_TRUE(plan.at(FaultPoint::kData, 4).ok());
  EXPECT_TRUE(plan.at(FaultPoint::kForward, 5).ok());
  EXPECT_FALSE(plan.at(FaultPoint::kData, 5).ok());
  EXPECT_TRUE(plan.at(FaultPoint::kData, 5).ok()) << "an entry strikes once a job";
  EXPECT_EQ(claimed, (std::vector<bool>{false, true}));
}

TEST(FaultPlanTest, AnEntryByTheDeviceBreaksItInPlaceOfDying) {
  const auto claim = [](int64_t) { return true; };
  const auto die = [] { return device_lost("struck"); };
  const FaultEntry entry{.rank = 0, .step = 1, .point = FaultPoint::kForward, .by_device = true};
  EXPECT_TRUE(FaultPlan({entry}, 0, claim, die, [] { return ok_status(); }).at(FaultPoint::kForward, 1).ok());
  EXPECT_FALSE(FaultPlan({entry}, 0, claim, die).at(FaultPoint::kForward, 1).ok()) << "where there is no device";
}

TEST(MemoryPlanTest, CountsEachKindOnceAndSharesWhatPeersRead) {
  RunConfig config;
  config.data.train = {"text"};
  const MemoryPlan plan = plan_memory(config, 8);
  const int64_t flat = 4 * (plan.num_parameters + plan.padding_elements);
  EXPECT_EQ(plan.num_parameters, 4 * (2 * 256 + 4 * 256 * 256 + 3 * 256 * 704) + 256 + 2 * 256 * 256);
  EXPECT_GE(plan.heap_bytes(), 4 * flat + plan.snapshot_slot_bytes);
  EXPECT_LT(plan.heap_bytes(), 5 * flat);
  EXPECT_THAT(plan.to_string(), AllOf(HasSubstr("weights"), HasSubstr("moments"), HasSubstr("gradients"),
                                      HasSubstr("activations"), HasSubstr("3344640 parameters")));
}

TEST(MemoryPlanTest, TheHeapIsExactlyUsed) {
  const ScratchDir dir;
  RunConfig config = tiny_config(dir.path());
  config.parallelism.reduce_order = "fixed";
  for (const int N : {1, 3}) {
    const MemoryPlan plan = plan_memory(config, N);
    const auto heap = comm::LocalWorld::create_heap(plan.heap_bytes());
    WorkerEnvironment environment;
    environment.world_size = N;
    environment.heap = heap.get();
    ASSERT_TRUE(Trainer::create(config, environment).ok());
    EXPECT_EQ(heap->used_bytes(), plan.heap_bytes());
  }
}

TEST(MemoryPlanTest, ASpareTouchesButNeverWritesTheHeapOfTheLivingWorker) {
  const ScratchDir dir;
  RunConfig config = tiny_config(dir.path());
  const MemoryPlan plan = plan_memory(config, 2);
  const auto heap = comm::LocalWorld::create_heap(plan.heap_bytes());
  std::fill_n(heap->data(), plan.heap_bytes(), uint8_t{0x5a});
  WorkerEnvironment environment;
  environment.world_size = 2;
  environment.heap = heap.get();
  environment.warm_up = true;
  ASSERT_TRUE(Trainer::create(config, environment).ok());
  EXPECT_TRUE(std::all_of(heap->data(), heap->data() + plan.heap_bytes(), [](uint8_t b) { return b == 0x5a; }));
}

}  // namespace
}  // namespace kintsugi::launch
