#include "runtime/trace/timeline.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "runtime/trace/trace_file.h"

namespace kintsugi::trace {
namespace {

using nlohmann::json;
using testing::HasSubstr;

class TraceFileTest : public testing::Test {
 protected:
  void SetUp() override {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    dir_ = testing::TempDir() + "ktg_trace_" + info->name() + "_" + std::to_string(getpid());
    std::filesystem::create_directories(dir_);
    path_ = dir_ + "/rank-3.json";
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }
  // Strict: throws on anything that JSON does not allow, bare NaN and trailing commas included.
  json parse() { return json::parse(fs_.read_file(path_).value()); }

  FileSystem& fs_ = FileSystem::posix();
  std::string dir_, path_;
};

TEST(TimelineTest, SpansNestAndAddUp) {
  Timeline timeline("compute", 8);
  {
    const ScopedSpan outer(&timeline, "step", 40);
    { const ScopedSpan inner(&timeline, "forward", 40); }
    { const ScopedSpan inner(&timeline, "forward", 40); }
  }
  ASSERT_EQ(timeline.spans().size(), 3u);
  const Span& step = timeline.spans()[0];
  const Span& first = timeline.spans()[1];
  const Span& second = timeline.spans()[2];
  EXPECT_STREQ(step.name, "step");
  EXPECT_EQ(step.step, 40);
  EXPECT_LE(step.begin_ns, first.begin_ns);
  EXPECT_LE(first.begin_ns, first.end_ns);
  EXPECT_LE(first.end_ns, second.begin_ns);
  EXPECT_LE(second.end_ns, step.end_ns);
  EXPECT_EQ(timeline.total_ns("forward"), first.end_ns - first.begin_ns + second.end_ns - second.begin_ns);
  EXPECT_EQ(timeline.total_ns("backward"), 0);
}

TEST(TimelineTest, AFullBufferDropsAndCounts) {
  Timeline timeline("compute", 1);
  const int64_t kept = timeline.begin("a");
  const int64_t lost = timeline.begin("b");
  EXPECT_EQ(lost, -1);
  timeline.end(lost);
  timeline.end(kept);
  timeline.add("c", 1, 2);
  EXPECT_EQ(timeline.spans().size(), 1u);
  EXPECT_EQ(timeline.dropped(), 2);
  timeline.clear();
  timeline.add("c", 1, 3);
  EXPECT_EQ(timeline.total_ns("c"), 2);
  EXPECT_EQ(timeline.dropped(), 0);
}

TEST(TimelineTest, OffMeansNothingIsRecorded) {
  Timeline timeline("compute", 4);
  timeline.enable(false);
  { const ScopedSpan span(&timeline, "a"); }
  { const ScopedSpan span(nullptr, "a"); }
  EXPECT_TRUE(timeline.spans().empty());
  EXPECT_EQ(timeline.dropped(), 0);
}

TEST(MicrosecondsTest, KeepEveryNanosecond) {
  EXPECT_EQ(microseconds(0), "0.000");
  EXPECT_EQ(microseconds(1), "0.001");
  EXPECT_EQ(microseconds(-1), "-0.001");
  EXPECT_EQ(microseconds(1'000), "1.000");
  EXPECT_EQ(microseconds(1'234'567), "1234.567");
  EXPECT_EQ(microseconds(INT64_MAX), "9223372036854775.807");
  EXPECT_EQ(microseconds(INT64_MIN), "-9223372036854775.808");
}

TEST_F(TraceFileTest, TimesKeepTheirDigitsAndSharedOrigin) {
  const int64_t origin = 86'400'000'000'000 * 400;  // a host that has been up for 400 days
  Timeline compute("compute", 8), comm("reduce", 8);
  compute.add("forward", origin + 1, origin + 2, 40);  // sub-microsecond
  compute.add("backward", origin + 2, origin + 1'234'567, 40);
  comm.add("bucket", origin + 3, origin + 4);
  auto file = TraceFile::create(fs_, path_, 3, "rank 3", origin);
  ASSERT_TRUE(file.ok()) << file.status().to_string();
  const Timeline* const lanes[] = {&compute, &comm};
  ASSERT_TRUE(file->write(lanes).ok());
  EXPECT_THAT(fs_.read_file(path_).value(), HasSubstr(R"("ts":0.002,"dur":1234.565)"));
  const json events = parse();
  std::vector<json> spans;
  std::string labels;
  for (const json& event : events) {
    EXPECT_EQ(event["pid"], 3);
    if (event["ph"] == "X") spans.push_back(event);
    if (event["name"] == "process_labels") labels = event["args"]["labels"];
  }
  EXPECT_THAT(labels, HasSubstr(std::to_string(origin)));
  ASSERT_EQ(spans.size(), 3u);
  EXPECT_TRUE(spans[0]["ts"].is_number() && spans[0]["dur"].is_number());
  // In doubles, as a viewer reads them, no span begins before its predecessor ends.
  EXPECT_GE(spans[1]["ts"].get<double>(), spans[0]["ts"].get<double>() + spans[0]["dur"].get<double>() - 1e-3);
  EXPECT_EQ(spans[0]["args"]["step"], 40);
  EXPECT_EQ(spans[0]["tid"], 0);
  EXPECT_EQ(spans[2]["tid"], 1);
}

TEST_F(TraceFileTest, NamesAreEscaped) {
  Timeline timeline("lane \"é\"\n", 8);
  timeline.add("a\"b\\c\x01 é 漢 \xff", 0, 1);
  auto file = TraceFile::create(fs_, path_, 0, "rank \"0\"", 0);
  ASSERT_TRUE(file.ok());
  const Timeline* const lanes[] = {&timeline};
  ASSERT_TRUE(file->write(lanes).ok());
  EXPECT_EQ(parse().back()["name"], "a\"b\\c\x01 é 漢 \xef\xbf\xbd");
}

TEST_F(TraceFileTest, TheArrayIsClosedAfterEveryWriteAndOpenSpansWait) {
  auto file = TraceFile::create(fs_, path_, 1, "rank 1", 0);
  ASSERT_TRUE(file.ok());
  const size_t heads = parse().size();
  Timeline timeline("compute", 8);
  const Timeline* const lanes[] = {&timeline};
  const int64_t open = timeline.begin("open");
  timeline.add("a", 1, 2);
  ASSERT_TRUE(file->write(lanes).ok());
  EXPECT_EQ(parse().size(), heads + 2);  // the lane's name and "a"
  timeline.end(open);
  timeline.clear();
  timeline.add("b", 3, 4);
  ASSERT_TRUE(file->write(lanes).ok());
  EXPECT_EQ(parse().size(), heads + 3);
  EXPECT_EQ(parse().back()["name"], "b");
}

// A kill between the two halves of a write leaves an array that is open at the end, or a torn last event. Perfetto
// takes both; here: every event but the last line parses by itself.
TEST_F(TraceFileTest, ATornFileLosesAtMostItsLastEvent) {
  auto file = TraceFile::create(fs_, path_, 1, "rank 1", 0);
  ASSERT_TRUE(file.ok());
  Timeline timeline("compute", 64);
  for (int i = 0; i < 20; ++i) timeline.add("span", i, i + 1);
  const Timeline* const lanes[] = {&timeline};
  ASSERT_TRUE(file->write(lanes).ok());
  const std::string whole = fs_.read_file(path_).value();
  for (size_t cut = 2; cut < whole.size(); ++cut) {
    const std::string torn = whole.substr(0, cut);
    const size_t last_line = torn.rfind(",\n");
    if (last_line == std::string::npos) continue;
    EXPECT_TRUE(json::accept(torn.substr(0, last_line) + "]")) << cut;
  }
}

}  // namespace
}  // namespace kintsugi::trace
