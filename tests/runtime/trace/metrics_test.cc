// metrics.jsonl and TensorBoard event files over crashes and resumes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "runtime/trace/event_file.h"
#include "runtime/trace/json_lines.h"
#include "runtime/trace/step_metrics.h"

namespace kintsugi::trace {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;

class MetricsTest : public testing::Test {
 protected:
  void SetUp() override {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    dir_ = testing::TempDir() + "ktg_metrics_" + info->name() + "_" + std::to_string(getpid());
    std::filesystem::create_directories(dir_);
    jsonl_ = dir_ + "/metrics.jsonl";
    events_ = dir_ + "/tensorboard/events.out.tfevents.kintsugi";
  }
  void TearDown() override { std::filesystem::remove_all(dir_); }

  std::vector<json> lines() {
    std::vector<json> out;
    std::istringstream in(fs_.read_file(jsonl_).value());
    for (std::string line; std::getline(in, line);) out.push_back(json::parse(line));  // throws unless strict JSON
    return out;
  }
  void cut(const std::string& path, int64_t bytes) {
    ASSERT_TRUE(fs_.truncate_file(path, fs_.file_size(path).value() - bytes).ok());
  }

  FileSystem& fs_ = FileSystem::posix();
  std::string dir_, jsonl_, events_;
};

// A reader of event files written against the format, not against the writer.
struct Event {
  double wall_time = 0;
  int64_t step = 0;
  std::string file_version;
  int session_status = 0;
  std::map<std::string, float> scalars;
};

uint64_t take_varint(std::string_view& in) {
  uint64_t value = 0;
  for (int shift = 0;; shift += 7) {
    const auto byte = static_cast<uint8_t>(in.front());
    in.remove_prefix(1);
    value |= static_cast<uint64_t>(byte & 0x7f) << shift;
    if (byte < 0x80) return value;
  }
}

template <class T>
T take(std::string_view& in) {
  T value;
  std::memcpy(&value, in.data(), sizeof value);
  in.remove_prefix(sizeof value);
  return value;
}

std::string_view take_bytes(std::string_view& in) {
  const size_t size = take_varint(in);
  const std::string_view bytes = in.substr(0, size);
  in.remove_prefix(size);
  return bytes;
}

Event decode(std::string_view in) {
  Event event;
  while (!in.empty()) {
    switch (take_varint(in)) {
      case 1 << 3 | 1:
        event.wall_time = take<double>(in);
        break;
      case 2 << 3 | 0:
        event.step = static_cast<int64_t>(take_varint(in));
        break;
      case 3 << 3 | 2:
        event.file_version = take_bytes(in);
        break;
      case 5 << 3 | 2:
        for (std::string_view summary = take_bytes(in); !summary.empty();) {
          EXPECT_EQ(take_varint(summary), 1u << 3 | 2);
          std::string_view value = take_bytes(summary);
          EXPECT_EQ(take_varint(value), 1u << 3 | 2);
          const std::string tag(take_bytes(value));
          EXPECT_EQ(take_varint(value), 2u << 3 | 5);
          event.scalars[tag] = take<float>(value);
        }
        break;
      case 7 << 3 | 2: {
        std::string_view session = take_bytes(in);
        EXPECT_EQ(take_varint(session), 1u << 3 | 0);
        event.session_status = static_cast<int>(take_varint(session));
        break;
      }
      default:
        ADD_FAILURE() << "unknown field";
        return event;
    }
  }
  return event;
}

// Bit by bit from the polynomial, as the definition has it.
uint32_t plain_crc32c(std::string_view bytes) {
  uint32_t crc = 0xffffffffu;
  for (const char byte : bytes) {
    crc ^= static_cast<uint8_t>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78u : 0);
  }
  return ~crc;
}

uint32_t plain_masked(std::string_view bytes) {
  const uint32_t crc = plain_crc32c(bytes);
  return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
}

std::vector<Event> read_events(const std::string& bytes) {
  std::vector<Event> events;
  std::string_view in = bytes;
  while (!in.empty()) {
    if (in.size() < 16) {
      ADD_FAILURE() << "torn record";
      break;
    }
    const std::string_view head = in.substr(0, 8);
    const auto length = take<uint64_t>(in);
    EXPECT_EQ(take<uint32_t>(in), plain_masked(head));
    const std::string_view body = in.substr(0, length);
    in.remove_prefix(length);
    EXPECT_EQ(take<uint32_t>(in), plain_masked(body));
    events.push_back(decode(body));
  }
  return events;
}

// What TensorBoard keeps of a tag: a session's start at step s forgets s and later.
std::vector<int64_t> shown_steps(const std::vector<Event>& events, const std::string& tag) {
  std::vector<int64_t> steps;
  for (const Event& event : events) {
    if (event.session_status == 1) std::erase_if(steps, [&](int64_t step) { return step >= event.step; });
    if (event.scalars.contains(tag)) steps.push_back(event.step);
  }
  return steps;
}

std::string step_line(int64_t step) {
  return R"({"step":)" + std::to_string(step) + R"(,"loss_metrics/global_avg_loss":)" +
         std::to_string(1.0 / static_cast<double>(step)) + "}";
}

TEST(MaskedCrcTest, EqualsTheDefinitionAndAKnownValue) {
  EXPECT_EQ(plain_crc32c("123456789"), 0xe3069283u);  // the check value of CRC-32C
  std::string bytes;
  for (int i = 0; i < 300; ++i) {
    EXPECT_EQ(masked_crc32c(bytes), plain_masked(bytes)) << i;
    bytes += static_cast<char>(i * 7);
  }
}

TEST_F(MetricsTest, EveryLineIsAnObjectWithItsAttempt) {
  auto log = JsonLines::open(fs_, jsonl_);
  ASSERT_TRUE(log.ok());
  EXPECT_EQ(log->last_step(), -1);
  ASSERT_TRUE(log->append(R"({"step":1,"x":null})").ok());
  ASSERT_TRUE(log->append("{}").ok());
  EXPECT_EQ(fs_.read_file(jsonl_).value(), "{\"attempt\":1,\"step\":1,\"x\":null}\n{\"attempt\":1}\n");
  for (const char* bad : {"", "[1]", "{", R"({"x":nan})", "{\n}", " {}", R"({"a":1}{"b":2})"}) {
    EXPECT_EQ(log->append(bad).code(), StatusCode::kInvalidArgument) << bad;
  }
  EXPECT_EQ(lines().size(), 2u);
  EXPECT_EQ(log->last_step(), 1);
  EXPECT_EQ(JsonLines::open(fs_, jsonl_).value().attempt(), 2);
}

TEST_F(MetricsTest, ATornLastLineIsClosedOrRemovedAtEveryCut) {
  auto log = JsonLines::open(fs_, jsonl_);
  ASSERT_TRUE(log.ok());
  for (int step = 1; step <= 3; ++step) ASSERT_TRUE(log->append(step_line(step)).ok());
  const std::string whole = fs_.read_file(jsonl_).value();
  for (size_t size = 0; size <= whole.size(); ++size) {
    ASSERT_TRUE(fs_.write_file(jsonl_, whole.substr(0, size)).ok());
    auto reopened = JsonLines::open(fs_, jsonl_);
    ASSERT_TRUE(reopened.ok());
    const size_t kept = lines().size();
    ASSERT_TRUE(reopened->append(step_line(4)).ok());
    const std::vector<json> all = lines();
    ASSERT_EQ(all.size(), kept + 1);
    EXPECT_EQ(all.back()["step"], 4);
    const auto breaks =
        static_cast<size_t>(std::count(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size), '\n'));
    EXPECT_GE(kept, breaks);
  }
}

TEST_F(MetricsTest, ScalarsComeFromNumbersBooleansAndNulls) {
  const auto out = scalars_of(R"({"step":7,"a":1.5,"b":null,"c":true,"d":"text","e":[1],"generation":2})");
  ASSERT_TRUE(out.ok());
  EXPECT_EQ(out->step, 7);
  ASSERT_EQ(out->scalars.size(), 4u);
  EXPECT_EQ(out->scalars[0].tag, "a");
  EXPECT_TRUE(std::isnan(out->scalars[1].value));
  EXPECT_EQ(out->scalars[2].value, 1.0);
  EXPECT_EQ(out->scalars[3].tag, "generation");
  for (const char* bad : {"", "[]", "{}", R"({"step":"7"})", R"({"step":-1})", R"({"step":1.5})"}) {
    EXPECT_EQ(scalars_of(bad).status().code(), StatusCode::kInvalidArgument) << bad;
  }
}

TEST_F(MetricsTest, EventsCarryTagsValuesAndSteps) {
  auto file = EventFile::open(fs_, dir_ + "/tensorboard");
  ASSERT_TRUE(file.ok()) << file.status().to_string();
  const Scalar scalars[] = {{"loss/é", 0.5}, {"nan", std::nan("")}, {"inf", std::numeric_limits<double>::infinity()}};
  ASSERT_TRUE(file->add(int64_t{1} << 40, 1700000000.25, scalars).ok());
  const std::vector<Event> events = read_events(fs_.read_file(events_).value());
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0].file_version, "brain.Event:2");
  EXPECT_EQ(events[1].step, int64_t{1} << 40);
  EXPECT_EQ(events[1].wall_time, 1700000000.25);
  EXPECT_EQ(events[1].scalars.at("loss/é"), 0.5f);
  EXPECT_TRUE(std::isnan(events[1].scalars.at("nan")));
  EXPECT_TRUE(std::isinf(events[1].scalars.at("inf")));
}

// Saved every 5, killed in step 14, resumed to 20.
TEST_F(MetricsTest, AfterAResumeTensorBoardShowsEachStepOnce) {
  for (const bool torn : {false, true}) {
    std::filesystem::remove_all(dir_);
    {
      auto metrics = StepMetrics::open(fs_, dir_, true, 0);
      ASSERT_TRUE(metrics.ok()) << metrics.status().to_string();
      for (int step = 1; step <= 13; ++step) ASSERT_TRUE(metrics->append(step_line(step)).ok());
    }
    if (torn) {
      cut(jsonl_, 3);
      cut(events_, 3);
    }
    {
      auto metrics = StepMetrics::open(fs_, dir_, true, 10);
      ASSERT_TRUE(metrics.ok()) << metrics.status().to_string();
      EXPECT_EQ(metrics->attempt(), 2);
      for (int step = 11; step <= 20; ++step) ASSERT_TRUE(metrics->append(step_line(step)).ok());
    }
    std::vector<int64_t> every(20);
    for (int i = 0; i < 20; ++i) every[static_cast<size_t>(i)] = i + 1;
    const auto events = read_events(fs_.read_file(events_).value());
    EXPECT_EQ(shown_steps(events, "loss_metrics/global_avg_loss"), every);
    std::map<int64_t, std::vector<int>> attempts;  // of each step
    for (const json& line : lines()) attempts[line["step"]].push_back(line["attempt"]);
    EXPECT_THAT(attempts[10], ElementsAre(1));
    EXPECT_THAT(attempts[12], ElementsAre(1, 2));
    if (torn) {
      EXPECT_THAT(attempts[13], ElementsAre(2));
    } else {
      EXPECT_THAT(attempts[13], ElementsAre(1, 2));
    }
    EXPECT_THAT(attempts[20], ElementsAre(2));
  }
}

TEST_F(MetricsTest, AJobThatGoesBackByItselfBeginsANewAttempt) {
  auto metrics = StepMetrics::open(fs_, dir_, true, 0);
  ASSERT_TRUE(metrics.ok());
  for (const int step : {1, 2, 3, 2, 3, 4}) ASSERT_TRUE(metrics->append(step_line(step)).ok());
  EXPECT_EQ(metrics->attempt(), 2);
  EXPECT_THAT(shown_steps(read_events(fs_.read_file(events_).value()), "loss_metrics/global_avg_loss"),
              ElementsAre(1, 2, 3, 4));
  std::vector<int> attempts;
  for (const json& line : lines()) attempts.push_back(line["attempt"]);
  EXPECT_THAT(attempts, ElementsAre(1, 1, 1, 2, 2, 2));
}

TEST_F(MetricsTest, AnEventFileTornAnywhereIsContinued) {
  {
    auto metrics = StepMetrics::open(fs_, dir_, true, 0);
    ASSERT_TRUE(metrics.ok());
    for (int step = 1; step <= 3; ++step) ASSERT_TRUE(metrics->append(step_line(step)).ok());
  }
  const std::string whole = fs_.read_file(events_).value();
  for (size_t size = 0; size <= whole.size(); ++size) {
    ASSERT_TRUE(fs_.write_file(events_, whole.substr(0, size)).ok());
    auto file = EventFile::open(fs_, dir_ + "/tensorboard");
    ASSERT_TRUE(file.ok());
    const Scalar scalar{"x", 1};
    ASSERT_TRUE(file->add(4, 0, std::span(&scalar, 1)).ok());
    const auto events = read_events(fs_.read_file(events_).value());
    EXPECT_EQ(events.front().file_version, "brain.Event:2");
    EXPECT_EQ(events.back().scalars.at("x"), 1);
  }
}

TEST_F(MetricsTest, WithoutTensorBoardNoFolderAppears) {
  auto metrics = StepMetrics::open(fs_, dir_ + "/out", false, 0);
  ASSERT_TRUE(metrics.ok());
  ASSERT_TRUE(metrics->append(step_line(1)).ok());
  EXPECT_FALSE(fs_.exists(dir_ + "/out/tensorboard"));
  EXPECT_EQ(metrics->append("{}").code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace kintsugi::trace
