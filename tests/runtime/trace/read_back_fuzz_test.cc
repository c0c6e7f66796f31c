// What a run wrote is read back when it goes on: metrics.jsonl and event files with any damage are continued, and what
// is appended can be read.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "runtime/trace/event_file.h"
#include "runtime/trace/step_metrics.h"
#include "tests/mutation.h"

namespace kintsugi::trace {
namespace {

using nlohmann::json;

class ReadBackFuzzTest : public testing::Test {
 protected:
  void SetUp() override {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    dir_ = testing::TempDir() + "ktg_read_back_" + info->name() + "_" + std::to_string(getpid());
    std::filesystem::create_directories(dir_);
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  FileSystem& fs_ = FileSystem::posix();
  std::string dir_;
};

TEST_F(ReadBackFuzzTest, AnyMetricsFileIsContinuedByWholeLines) {
  auto random = mutation::make_random();
  const std::string path = dir_ + "/metrics.jsonl";
  for (int round = mutation::rounds(1000); round > 0; --round) {
    std::string text;
    for (int step = 1; step <= 3; ++step) {
      json line = {{"attempt", 1}, {"step", step}, {"loss_metrics/global_avg_loss", 0.5}};
      if (random() % 2 == 0) mutation::mutate_json(line, random);
      text += line.dump() + "\n";
    }
    if (random() % 2 == 0) text = mutation::mutate_bytes(text, random);
    ASSERT_TRUE(fs_.write_file(path, text).ok());
    auto metrics = StepMetrics::open(fs_, dir_, false, 3);
    ASSERT_TRUE(metrics.ok()) << metrics.status().to_string();
    ASSERT_TRUE(metrics->append(R"({"step":4,"x":1.5})").ok());
    const std::string now = fs_.read_file(path).value();
    ASSERT_EQ(now.back(), '\n');
    const size_t last = now.rfind('\n', now.size() - 2);
    const json line = json::parse(now.substr(last == std::string::npos ? 0 : last + 1), nullptr, false);
    ASSERT_TRUE(line.is_object()) << now;
    EXPECT_EQ(line["step"], 4);
    EXPECT_GE(line["attempt"], 1);
  }
}

TEST_F(ReadBackFuzzTest, AnyEventFileIsContinuedByWholeRecords) {
  auto random = mutation::make_random();
  std::string good;
  {
    auto events = EventFile::open(fs_, dir_);
    ASSERT_TRUE(events.ok());
    for (int step = 1; step <= 3; ++step) ASSERT_TRUE(events->add(step, 1e9, {{Scalar{"loss", 0.5}}}).ok());
    good = fs_.read_file(events->path()).value();
  }
  for (int round = mutation::rounds(1000); round > 0; --round) {
    const std::string path = dir_ + "/events.out.tfevents.kintsugi";
    ASSERT_TRUE(fs_.write_file(path, mutation::mutate_bytes(good, random)).ok());
    auto events = EventFile::open(fs_, dir_);
    ASSERT_TRUE(events.ok()) << events.status().to_string();
    ASSERT_TRUE(events->add(4, 1e9, {{Scalar{"loss", 0.25}}}).ok());
    const std::string now = fs_.read_file(path).value();
    EXPECT_EQ(whole_records_end(now), static_cast<int64_t>(now.size()));
  }
}

TEST_F(ReadBackFuzzTest, ScalarsComeFromAnyObjectOrNone) {
  auto random = mutation::make_random();
  for (int round = mutation::rounds(3000); round > 0; --round) {
    json line = {{"step", 3}, {"a", 1.5}, {"b", nullptr}, {"c", true}, {"d", {1, 2}}};
    mutation::mutate_json(line, random);
    const std::string text = random() % 2 == 0 ? line.dump() : mutation::mutate_bytes(line.dump(), random);
    const auto scalars = scalars_of(text);
    if (scalars.ok()) {
      EXPECT_GE(scalars->step, 0);
    }
  }
}

}  // namespace
}  // namespace kintsugi::trace
