// Saving, interrupted at every call: at every instant a verified checkpoint can be found, and it is the right one.
#include <gmock/gmock.h>

#include "runtime/base/log.h"
#include "tests/checkpoint/checkpoint_fixture.h"
#include "tests/checkpoint/fault_file_system.h"

namespace kintsugi::checkpoint {
namespace {

using Fault = FaultFileSystem::Fault;
using Survivors = FaultFileSystem::Survivors;

constexpr uint64_t kRandomSeed = 7001;  // of what survives a crash

runtime::ModelConfig smallest_model() {
  runtime::ModelConfig config;
  config.num_layers = 1;
  config.dim = 8;
  config.num_heads = 1;
  config.ffn_dim = 8;
  config.vocab_size = 16;
  config.max_seq_len = 8;
  return config;
}

// The state of a step: every step's differs.
TestState state_of(const runtime::ParamTable& table, int64_t step) {
  return TestState(table, kSeed + static_cast<uint64_t>(step));
}

class CrashTest : public CheckpointTest {
 protected:
  CrashTest() : CheckpointTest(memory_dir()) {  // syncs are modelled here
    table_ = runtime::ParamTable::build(smallest_model());
    // A dead process that warns about its housekeeping is what we ask for here.
    EXPECT_TRUE(set_log_level("error").ok());
  }
  CheckpointMeta meta(int64_t step, const std::string& run_id) {
    CheckpointMeta out = meta_at(step, 2, run_id);
    out.model = smallest_model();
    out.tokenizer = "{}\n";  // lies in a file
    return out;
  }
  Status save_step(FileSystem& fs, const std::string& dir, int64_t step, int64_t keep,
                   const std::string& run_id = "run-a", const std::string& attempt = "g1") {
    return save(fs, dir, table_, state_of(table_, step), meta(step, run_id), keep, attempt);
  }
  // A directory with a run's folder in it, and a file system that watches it.
  std::unique_ptr<FaultFileSystem> fresh(const std::string& name) {
    const std::string root = root_ + "/" + name;
    std::filesystem::create_directories(root);
    auto fs = std::make_unique<FaultFileSystem>(root);
    KTG_CHECK(fs->create_dirs(root + "/run").ok() && fs->sync_dir(root).ok());
    return fs;
  }
  // The newest checkpoint's step, verified to the last byte; its state is that step's.
  int64_t verified_newest(const std::string& dir) {
    const auto info = newest_checkpoint(fs_, dir, nullptr);
    if (!info.ok()) {
      ADD_FAILURE() << info.status().to_string();
      return -1;
    }
    KTG_EXPECT_OK(verify_checkpoint(fs_, *info));
    TestState loaded(table_, 0);
    KTG_EXPECT_OK(load_all(fs_, *info, table_, loaded));
    EXPECT_EQ(loaded, state_of(table_, info->meta.step)) << "step " << info->meta.step;
    return info->meta.step;
  }

  // Prepares with `before`, then runs `save` with a crash at each of its calls, in turn, and looks at what each kind of
  // crash leaves: the newest is `old_step` or `new_step`, and `new_step` once save() had returned.
  void crash_everywhere(const std::function<void(FaultFileSystem&, const std::string&)>& before,
                        const std::function<Status(FaultFileSystem&, const std::string&)>& save_call, int64_t old_step,
                        int64_t new_step) {
    std::mt19937_64 random(kRandomSeed);
    int64_t k = 0;
    for (bool finished = false; !finished; ++k) {
      ASSERT_LT(k, 500);
      const std::string name = "k" + std::to_string(k);
      auto fs = fresh(name);
      const std::string dir = root_ + "/" + name + "/run/checkpoint";
      before(*fs, dir);
      fs->arm(Fault::kCrash, k);
      const Status status = save_call(*fs, dir);
      finished = !fs->struck();
      int round = 0;
      for (const Survivors survivors :
           {Survivors::kSyncedOnly, Survivors::kNamesOnly, Survivors::kAll, Survivors::kRandom, Survivors::kRandom}) {
        const std::string after = root_ + "/after";
        fs->materialize(after, survivors, random);
        SCOPED_TRACE("crash at call " + std::to_string(k) + ", survivors " +
                     std::to_string(static_cast<int>(survivors)));
        const std::string checkpoints = after + "/run/checkpoint";
        const int64_t step = verified_newest(checkpoints);
        EXPECT_TRUE(step == new_step || (step == old_step && !status.ok())) << step << ", " << status.to_string();
        if ((k + round++) % 3 == 0) {
          // The run that starts again cleans up, saves the step it lost, and rotates.
          KTG_EXPECT_OK(remove_stale(fs_, checkpoints));
          const std::string run_id = newest_checkpoint(fs_, checkpoints, nullptr)->meta.run_id;
          KTG_EXPECT_OK(save_step(fs_, checkpoints, new_step, 1, run_id, "g2"));
          EXPECT_EQ(verified_newest(checkpoints), new_step);
        }
        std::filesystem::remove_all(after);
      }
      std::filesystem::remove_all(root_ + "/" + name);
      if (HasFailure()) return;
    }
    EXPECT_GT(k, 20) << "hardly any call was interrupted";
  }
};

TEST_F(CrashTest, TheFirstCheckpointIsThereOrNot) {
  std::mt19937_64 random(kRandomSeed);
  for (int64_t k = 0;; ++k) {
    ASSERT_LT(k, 500);
    const std::string name = "k" + std::to_string(k);
    auto fs = fresh(name);
    fs->arm(Fault::kCrash, k);
    const Status status = save_step(*fs, root_ + "/" + name + "/run/checkpoint", 5, 1);
    for (const Survivors survivors :
         {Survivors::kSyncedOnly, Survivors::kNamesOnly, Survivors::kAll, Survivors::kRandom}) {
      const std::string after = root_ + "/after";
      fs->materialize(after, survivors, random);
      const auto info = newest_checkpoint(fs_, after + "/run/checkpoint", nullptr);
      if (info.ok()) {
        EXPECT_EQ(verified_newest(after + "/run/checkpoint"), 5);
      } else {
        EXPECT_EQ(info.status().code(), StatusCode::kNotFound);
        EXPECT_FALSE(status.ok()) << "crash at call " << k << " lost a committed checkpoint";
      }
      std::filesystem::remove_all(after);
    }
    std::filesystem::remove_all(root_ + "/" + name);
    if (!fs->struck()) break;
  }
}

TEST_F(CrashTest, KeepOneNeverLosesBoth) {
  crash_everywhere([&](FaultFileSystem& fs, const std::string& dir) { KTG_ASSERT_OK(save_step(fs, dir, 10, 1)); },
                   [&](FaultFileSystem& fs, const std::string& dir) { return save_step(fs, dir, 11, 1); }, 10, 11);
}

TEST_F(CrashTest, ReplacingTheSameStepOfAnAbandonedHistory) {
  // run-a has 8 and 11; run-b went back to 8, saved 9, and now comes to 11.
  crash_everywhere(
      [&](FaultFileSystem& fs, const std::string& dir) {
        KTG_ASSERT_OK(save_step(fs, dir, 8, 0));
        KTG_ASSERT_OK(save_step(fs, dir, 11, 0));
        ASSERT_TRUE(resume_history(fs, dir, open_checkpoint(fs, dir + "/step-8").value(), "run-b").ok());
        KTG_ASSERT_OK(save_step(fs, dir, 9, 0, "run-b"));
      },
      [&](FaultFileSystem& fs, const std::string& dir) { return save_step(fs, dir, 11, 1, "run-b"); }, 9, 11);
}

TEST_F(CrashTest, SavingTheOnlyCheckpointAgain) {
  // A run that rolled back saves step 10 once more: the old one is moved, never lost.
  crash_everywhere([&](FaultFileSystem& fs, const std::string& dir) { KTG_ASSERT_OK(save_step(fs, dir, 10, 1)); },
                   [&](FaultFileSystem& fs, const std::string& dir) { return save_step(fs, dir, 10, 1); }, 10, 10);
}

TEST_F(CrashTest, AFullDiskAtAnyCallLeavesTheOldOneAndAClearError) {
  bool finished = false;
  for (int64_t k = 0; !finished; ++k) {
    ASSERT_LT(k, 500);
    const std::string name = "k" + std::to_string(k);
    auto fs = fresh(name);
    const std::string dir = root_ + "/" + name + "/run/checkpoint";
    KTG_ASSERT_OK(save_step(*fs, dir, 10, 1));
    fs->arm(Fault::kFull, k);
    const Status status = save_step(*fs, dir, 11, 1);
    finished = !fs->struck();
    fs->disarm();
    if (status.ok()) {
      EXPECT_EQ(verified_newest(dir), 11);
    } else {
      EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << status.to_string();
      EXPECT_EQ(verified_newest(dir), 10);
    }
    // Space again: the next save works and nothing of the failed one remains.
    KTG_ASSERT_OK(save_step(*fs, dir, 12, 1, "run-a", "g2"));
    EXPECT_EQ(verified_newest(dir), 12);
    const auto names = fs->list_dir(dir);
    for (const std::string& left : *names) {
      EXPECT_TRUE(left == "step-12" || left == "LATEST" || left == "histories.json" || left.ends_with(".tmp")) << left;
    }
    std::filesystem::remove_all(root_ + "/" + name);
  }
}

}  // namespace
}  // namespace kintsugi::checkpoint
