// What a job's processes take of the machine's memory.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "train_job.h"

namespace kintsugi::fault_test {
namespace {

// The peak of what rank 0's process took for itself, files and peers' memory aside, against the plan: within 2 % for a
// model whose state is some hundred MiB.
TEST(MemoryTest, AProcessTakesWhatThePlanSays) {
  Workspace w;
  for (const char* const mode : {"ddp", "zero3"}) {
    std::vector<std::string> arguments;
    for (const char* const key_value :
         {"model.dim=512", "model.num_heads=8", "model.ffn_dim=1408", "model.num_layers=4", "training.steps=3",
          "training.global_batch_size=8", "lr_scheduler.warmup_steps=1", "checkpoint.every=2"}) {
      arguments.insert(arguments.end(), {"--set", key_value});
    }
    arguments.insert(arguments.end(), {"--set", std::string("parallelism.mode=") + mode});
    TrainJob job(w, mode, {.world_size = 2, .arguments = arguments, .variables = {{"OMP_NUM_THREADS", "1"}}});
    ASSERT_TRUE(job.wait().all(0)) << job.output();
    const auto planned = job.summary()["planned_memory_bytes"].get<double>();
    const auto used = job.summary()["used_memory_bytes"].get<double>();
    EXPECT_GT(planned, 200e6);
    EXPECT_NEAR(used / planned, 1, 0.02) << mode << ": planned " << planned << ", used " << used;
  }
}

}  // namespace
}  // namespace kintsugi::fault_test
