#include "parallel/recorded_step.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <string>

#include "tests/runtime/cpu_backed.h"

namespace kintsugi::parallel {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

using Log = std::vector<std::string>;

class LoggedGraph final : public runtime::Graph {
 public:
  LoggedGraph(Log operations, Log& log) : operations_(std::move(operations)), log_(log) {}
  int64_t num_operations() const override { return static_cast<int64_t>(operations_.size()); }
  Status launch(runtime::Stream&) override {
    std::string text = "graph";
    for (const std::string& operation : operations_) text += " " + operation;
    log_.push_back(text);
    return ok_status();
  }

 private:
  const Log operations_;
  Log& log_;
};

// The CPU's backend, and recordings of operations that are names.
class LoggedBackend final : public runtime::CpuBacked {
 public:
  std::string description() const override { return "logged"; }
  Status begin_recording(runtime::Stream&) override {
    EXPECT_FALSE(recording);
    recording = true;
    return ok_status();
  }
  Result<std::unique_ptr<runtime::Graph>> end_recording(runtime::Stream&) override {
    EXPECT_TRUE(recording);
    recording = false;
    return std::unique_ptr<runtime::Graph>(std::make_unique<LoggedGraph>(std::exchange(operations_, {}), log));
  }
  void operation(const std::string& name) { (recording ? operations_ : log).push_back(name); }

  Log log;
  bool recording = false;

 private:
  Log operations_;
};

class RecordedStepTest : public testing::Test {
 protected:
  std::function<Status()> call(const std::string& name) {
    return [this, name] {
      EXPECT_FALSE(backend_.recording) << name;
      backend_.log.push_back(name);
      return ok_status();
    };
  }
  Status body() {
    backend_.operation("a");
    backend_.operation("b");
    KTG_RETURN_IF_ERROR(step_.outside(call("sum")));
    KTG_RETURN_IF_ERROR(step_.outside(call("gather")));
    backend_.operation("c");
    step_.begin_whole();
    KTG_RETURN_IF_ERROR(step_.outside(call("vote")));
    backend_.operation("d");
    return ok_status();
  }

  LoggedBackend backend_;
  std::unique_ptr<runtime::Stream> stream_ = std::move(backend_.Backend::create_stream()).value();
  RecordedStep step_{backend_};
};

TEST_F(RecordedStepTest, RecordingRunsTheStepAndAReplayRepeatsIt) {
  const auto step = ElementsAre("graph a b", "sum", "gather", "graph c", "vote", "graph d");
  ASSERT_TRUE(step_.record(*stream_, [this] { return body(); }).ok());
  EXPECT_THAT(backend_.log, step);
  EXPECT_TRUE(step_.recorded());
  EXPECT_EQ(step_.num_graphs(), 3);
  for (int i = 0; i < 2; ++i) {
    backend_.log.clear();
    ASSERT_TRUE(step_.replay(*stream_).ok());
    EXPECT_THAT(backend_.log, step);
  }
}

TEST_F(RecordedStepTest, WithoutARecordingTheBodyJustRuns) {
  ASSERT_TRUE(body().ok());
  EXPECT_THAT(backend_.log, ElementsAre("a", "b", "sum", "gather", "c", "vote", "d"));
  EXPECT_FALSE(step_.recorded());
}

TEST_F(RecordedStepTest, AnErrorLeavesNothingRecordedAndTheStreamFree) {
  for (const bool in_call : {false, true}) {
    backend_.log.clear();
    const Status status = step_.record(*stream_, [&]() -> Status {
      backend_.operation("a");
      if (!in_call) return aborted("no");
      return step_.outside([] { return aborted("no"); });
    });
    EXPECT_EQ(status.code(), StatusCode::kAborted);
    EXPECT_FALSE(step_.recorded());
    EXPECT_FALSE(backend_.recording);
  }
  backend_.log.clear();
  ASSERT_TRUE(step_.record(*stream_, [this] { return body(); }).ok());
  EXPECT_EQ(step_.num_graphs(), 3);
}

TEST_F(RecordedStepTest, AStopEndsAReplayBeforeWhatBelongsTogetherAndNotInIt) {
  std::atomic<int64_t> word{0};
  stream_->set_stop_token(StopToken(&word, 0));
  ASSERT_TRUE(step_.record(*stream_, [this] { return body(); }).ok());
  backend_.log.clear();
  word = 1;
  EXPECT_EQ(step_.replay(*stream_).code(), StatusCode::kAborted);
  EXPECT_THAT(backend_.log, IsEmpty());

  // Asked for by the call with which that begins.
  word = 0;
  ASSERT_TRUE(step_
                  .record(*stream_,
                          [&]() -> Status {
                            backend_.operation("a");
                            KTG_RETURN_IF_ERROR(step_.outside(call("sum")));
                            step_.begin_whole();
                            KTG_RETURN_IF_ERROR(step_.outside([&] {
                              word = 1;
                              return ok_status();
                            }));
                            backend_.operation("b");
                            return ok_status();
                          })
                  .ok());
  word = 0;
  backend_.log.clear();
  EXPECT_TRUE(step_.replay(*stream_).ok());
  EXPECT_THAT(backend_.log, ElementsAre("graph a", "sum", "graph b"));
}

}  // namespace
}  // namespace kintsugi::parallel
