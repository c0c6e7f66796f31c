// Who chooses the algorithms of a run, who reads them, and where they are kept. The CPU plays a device: its calls are
// done when they return, and its algorithms are texts. Nothing here depends on what is in them.
#include <gmock/gmock.h>

#include <filesystem>

#include "launch/tuning_file.h"
#include "runtime/base/file_system.h"
#include "tests/launch/training_job.h"
#include "tests/runtime/cpu_backed.h"

namespace kintsugi::launch {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr const char* kCacheName = "algorithms-of-device-one.txt";
constexpr const char* kOfAnother = "device two: 1";

// Takes texts that begin with "device one", and finds `choice` by timing.
class TunedDevice final : public runtime::CpuBacked {
 public:
  explicit TunedDevice(std::string choice) : choice_(std::move(choice)) {}
  std::string description() const override { return "tuned"; }
  bool asynchronous() const override { return true; }

  void begin_tuning(const TunedWork&, const std::string& known) override { begun.push_back(known); }
  Result<std::string> tune(const TunedWork& work, const std::string& known, const runtime::Buffer& scratch,
                           runtime::Stream&) override {
    EXPECT_FALSE(work.layers.empty());
    EXPECT_GT(scratch.size_bytes(), 0);
    asked.push_back(known);
    if (is_mine(known)) return known;
    ++timed;
    return choice_;
  }
  Status use_tuning(const std::string& text) override {
    if (!is_mine(text)) return failed_precondition("chosen on another device");
    used.push_back(text);
    return ok_status();
  }
  std::string tuning_name() const override { return kCacheName; }

  std::vector<std::string> begun, asked;  // with what they knew
  int timed = 0;
  std::vector<std::string> used;

 private:
  static bool is_mine(const std::string& text) { return text.starts_with("device one"); }
  const std::string choice_;
};

class TrainerTuningTest : public testing::Test {
 protected:
  using Devices = std::vector<std::shared_ptr<TunedDevice>>;

  TrainerTuningTest() : config_(tiny_config(scratch_.path())) {
    config_.training.steps = 2;
    config_.training.cuda_graphs = false;
    config_.device = "cpu";
  }

  std::string path(const std::string& name) const { return scratch_.path() + "/" + name; }
  static std::string text_of(const std::string& path) {
    Result<std::string> text = FileSystem::posix().read_file(path);
    return text.ok() ? *text : "none";
  }
  static void write(const std::string& dir, const std::string& name, const std::string& text) {
    ASSERT_TRUE(FileSystem::posix().create_dirs(dir).ok());
    ASSERT_TRUE(FileSystem::posix().write_file(dir + "/" + name, text).ok());
  }
  // Unless ranks share a folder, the others find nothing that rank 0 has just written: they have what they are sent.
  std::string folder_of(int rank) const {
    return rank == 0 || one_folder_ ? out_dir_ : out_dir_ + ".rank" + std::to_string(rank);
  }
  std::string run_file(int rank = 0) const { return text_of(folder_of(rank) + "/" + kTuningFile); }
  std::string cache_file() const { return text_of(cache_dir_ + "/" + kCacheName); }

  // Trains to the end, each rank on a device of its own that would choose "device one: `choice` of rank R", and keeps
  // what was warned of in warnings_.
  Devices train(int world_size, const std::string& choice) {
    std::vector<std::unique_ptr<comm::SymmetricHeap>> heaps;
    std::vector<comm::SymmetricHeap*> heap_of;
    Devices devices;
    for (int r = 0; r < world_size; ++r) {
      devices.push_back(std::make_shared<TunedDevice>("device one: " + choice + " of rank " + std::to_string(r)));
      heaps.push_back(comm::LocalWorld::create_heap(1 << 20));
      heap_of.push_back(heaps.back().get());
    }
    const auto world = comm::LocalWorld::create(world_size, 0, heap_of);
    TrainingJob job(config_, world_size);
    job.write_to(out_dir_);
    if (!save_to_.empty()) job.save_checkpoints(save_to_);
    if (!resume_from_.empty()) job.resume_from(resume_from_, 1);
    job.change_environment([&](WorkerEnvironment& environment) {
      environment.backend = devices[environment.rank];
      environment.out_dir = folder_of(environment.rank);
      environment.cache_dir = cache_dir_;
      environment.warm_up = warm_up_;
      environment.create_device_communicator = [&, rank = environment.rank](comm::Communicator&, StopToken stop,
                                                                            std::function<void()>) {
        return world->join(rank, config_.comm, stop);
      };
    });
    testing::internal::CaptureStderr();
    const TrainingJob::Outcome outcome = job.run();
    warnings_ = testing::internal::GetCapturedStderr();
    EXPECT_TRUE(outcome.status.ok()) << outcome.status.to_string();
    EXPECT_EQ(outcome.metrics.size(), static_cast<size_t>(resume_from_.empty() ? 2 : 1));
    return devices;
  }

  ScratchDir scratch_;
  RunConfig config_;
  std::string out_dir_ = path("run"), cache_dir_ = path("cache"), save_to_, resume_from_, warnings_;
  bool warm_up_ = false, one_folder_ = false;
};

TEST_F(TrainerTuningTest, RankZeroTimesOnceWhatNobodyKnowsAndAllRanksUseIt) {
  const Devices devices = train(3, "first");
  EXPECT_THAT(devices[0]->begun, ElementsAre(""));
  EXPECT_THAT(devices[0]->asked, ElementsAre(""));
  EXPECT_EQ(devices[0]->timed, 1);
  for (const auto& device : devices) EXPECT_THAT(device->used, ElementsAre("device one: first of rank 0"));
  for (const int rank : {1, 2}) {
    EXPECT_THAT(devices[rank]->asked, IsEmpty());
    EXPECT_EQ(run_file(rank), "none");
  }
  EXPECT_EQ(run_file(), "device one: first of rank 0");
  EXPECT_EQ(cache_file(), "device one: first of rank 0");
  EXPECT_EQ(warnings_, "");
}

TEST_F(TrainerTuningTest, WhatTheCacheKnowsIsNotTimed) {
  write(cache_dir_, kCacheName, "device one: cached");
  const Devices devices = train(2, "timed");
  EXPECT_THAT(devices[0]->begun, ElementsAre("device one: cached"));
  EXPECT_THAT(devices[0]->asked, ElementsAre("device one: cached"));
  EXPECT_THAT(devices[1]->begun, ElementsAre("")) << "the cache is rank 0's to read";
  EXPECT_THAT(devices[1]->asked, IsEmpty());
  for (const auto& device : devices) {
    EXPECT_EQ(device->timed, 0);
    EXPECT_THAT(device->used, ElementsAre("device one: cached"));
  }
  EXPECT_EQ(run_file(), "device one: cached");
  EXPECT_EQ(cache_file(), "device one: cached");
}

TEST_F(TrainerTuningTest, WhatWasTimedThoroughlyHasACacheOfItsOwn) {
  write(cache_dir_, kCacheName, "device one: quick");
  config_.training.tune_thoroughly = true;
  EXPECT_EQ(train(1, "thorough")[0]->timed, 1);
  EXPECT_EQ(cache_file(), "device one: quick");
  EXPECT_EQ(text_of(cache_dir_ + "/thorough-" + kCacheName), "device one: thorough of rank 0");
}

TEST_F(TrainerTuningTest, ACacheThatIsOfNoUseIsMadeAnew) {
  for (const char* cached : {kOfAnother, "", "\x01\x02"}) {
    SCOPED_TRACE(cached);
    std::filesystem::remove_all(out_dir_);
    write(cache_dir_, kCacheName, cached);
    EXPECT_EQ(train(1, "timed")[0]->timed, 1);
    EXPECT_EQ(cache_file(), "device one: timed of rank 0");
  }
}

TEST_F(TrainerTuningTest, ACacheThatCannotBeWrittenCostsAWarning) {
  write(scratch_.path(), "no-folder", "");
  cache_dir_ = path("no-folder/cache");
  const Devices devices = train(1, "timed");
  EXPECT_THAT(devices[0]->used, ElementsAre("device one: timed of rank 0"));
  EXPECT_EQ(run_file(), "device one: timed of rank 0");
  EXPECT_THAT(warnings_, HasSubstr("cache of algorithms: "));
}

// As a resumed run does, whoever takes a rank's place, and spares of all ranks.
TEST_F(TrainerTuningTest, WhatTheRunHasIsReadAndNeverTimed) {
  one_folder_ = true;
  write(out_dir_, kTuningFile, "device one: the run's");
  write(cache_dir_, kCacheName, "device one: cached");
  for (const bool warm_up : {false, true}) {
    warm_up_ = warm_up;
    for (const auto& device : train(2, "timed")) {
      EXPECT_THAT(device->begun, ElementsAre("device one: the run's"));
      EXPECT_THAT(device->asked, IsEmpty());
      EXPECT_THAT(device->used, ElementsAre("device one: the run's"));
    }
  }
  EXPECT_EQ(run_file(), "device one: the run's");
  EXPECT_EQ(cache_file(), "device one: cached");
}

TEST_F(TrainerTuningTest, ASpareOfRankZeroChoosesNothing) {
  write(cache_dir_, kCacheName, "device one: cached");
  warm_up_ = true;
  const Devices devices = train(1, "timed");
  EXPECT_THAT(devices[0]->begun, ElementsAre(""));
  EXPECT_THAT(devices[0]->asked, IsEmpty());
  EXPECT_THAT(devices[0]->used, IsEmpty());
  EXPECT_EQ(run_file(), "none");
}

TEST_F(TrainerTuningTest, ARunThatMovedToAnotherDeviceWarnsAndChoosesAnew) {
  one_folder_ = true;
  write(out_dir_, kTuningFile, kOfAnother);
  const Devices devices = train(2, "timed");
  EXPECT_EQ(devices[0]->timed, 1);
  EXPECT_THAT(devices[1]->asked, IsEmpty());
  for (const auto& device : devices) EXPECT_THAT(device->used, ElementsAre("device one: timed of rank 0"));
  EXPECT_EQ(run_file(), "device one: timed of rank 0");
  EXPECT_THAT(warnings_, HasSubstr(std::string(kTuningFile) + ": chosen on another device"));
}

TEST_F(TrainerTuningTest, WithoutTuningNobodyChoosesOrReads) {
  one_folder_ = true;
  write(out_dir_, kTuningFile, "device one: the run's");
  config_.training.tune = false;
  for (const auto& device : train(2, "timed")) {
    EXPECT_THAT(device->begun, IsEmpty());
    EXPECT_THAT(device->asked, IsEmpty());
    EXPECT_THAT(device->used, IsEmpty());
  }
}

// A new run that begins with another's checkpoint goes on with its algorithms, whatever it chose itself.
TEST_F(TrainerTuningTest, ACheckpointBringsItsAlgorithms) {
  config_.checkpoint.every = 1;
  save_to_ = path("checkpoint");
  train(2, "old");
  save_to_ = "";
  resume_from_ = path("checkpoint/step-1");
  out_dir_ = path("second-run");
  cache_dir_ = "";
  const Devices devices = train(2, "new");
  for (const auto& device : devices) {
    EXPECT_THAT(device->used, ElementsAre("device one: new of rank 0", "device one: old of rank 0"));
  }
  EXPECT_EQ(run_file(), "device one: old of rank 0");
  EXPECT_EQ(run_file(1), "none");
  EXPECT_EQ(warnings_, "");
}

TEST_F(TrainerTuningTest, ACheckpointOfAnotherDeviceLeavesTheRunsOwn) {
  config_.checkpoint.every = 1;
  config_.training.tune = false;  // what lies in the run's folder goes into the checkpoint unread
  write(out_dir_, kTuningFile, kOfAnother);
  save_to_ = path("checkpoint");
  train(1, "old");
  config_.training.tune = true;
  save_to_ = "";
  resume_from_ = path("checkpoint/step-1");
  out_dir_ = path("second-run");
  const Devices devices = train(2, "new");
  for (const auto& device : devices) EXPECT_THAT(device->used, ElementsAre("device one: new of rank 0"));
  EXPECT_EQ(run_file(), "device one: new of rank 0");
  EXPECT_THAT(warnings_, HasSubstr("the checkpoint's algorithms: chosen on another device"));
}

}  // namespace
}  // namespace kintsugi::launch
