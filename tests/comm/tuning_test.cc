#include "comm/tuning.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <limits>

#include "comm/bench/bench.h"
#include "tests/comm/rank_world.h"
#include "tests/mutation.h"

namespace kintsugi::comm {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

TEST(TuningTest, ATableIsReadAsItWasWritten) {
  const TuningTable table{.world_size = 8,
                          .rows = {{.max_bytes = 4096, .algorithm = Algorithm::kDirect, .chunk_bytes = 0},
                                   {.max_bytes = 1 << 20, .algorithm = Algorithm::kTree, .chunk_bytes = 65536},
                                   {.max_bytes = kMax, .algorithm = Algorithm::kRing, .chunk_bytes = 1 << 20}}};
  const TuningTable read = TuningTable::parse(table.to_text(), "t").value();
  EXPECT_EQ(read.world_size, 8);
  EXPECT_EQ(read.rows, table.rows);
  EXPECT_EQ(read.choose(0).algorithm, Algorithm::kDirect);
  EXPECT_EQ(read.choose(4096).algorithm, Algorithm::kDirect);
  EXPECT_EQ(read.choose(4097).algorithm, Algorithm::kTree);
  EXPECT_EQ(read.choose(int64_t{1} << 40).chunk_bytes, 1 << 20);
}

TEST(TuningTest, EveryMistakeIsNamedWithItsLine) {
  const auto message = [](const char* text) {
    const auto table = TuningTable::parse(text, "tune.txt");
    EXPECT_EQ(table.status().code(), StatusCode::kInvalidArgument) << text;
    return table.status().message();
  };
  const std::string head = "kintsugi-tuning 1\nworld_size 8\n";
  const auto row = [&](const char* text) { return message((head + text).c_str()); };
  EXPECT_THAT(message(""), HasSubstr("kintsugi-tuning 1"));
  EXPECT_THAT(message("something else\n"), AllOf(HasSubstr("tune.txt:1"), HasSubstr("kintsugi-tuning 1")));
  EXPECT_THAT(message("kintsugi-tuning 1\nranks 8\n"), AllOf(HasSubstr("tune.txt:2"), HasSubstr("world_size")));
  EXPECT_THAT(row("4096 direct\n"), AllOf(HasSubstr("tune.txt:3"), HasSubstr("chunk bytes")));
  EXPECT_THAT(row("x direct 0\n"), HasSubstr("\"x\""));
  EXPECT_THAT(row("-1 direct 0\n"), HasSubstr("positive"));
  EXPECT_THAT(row("4096 nonsense 0\n"), AllOf(HasSubstr("nonsense"), HasSubstr("ring")));
  EXPECT_THAT(row("4096 auto 0\n"), HasSubstr("auto"));
  EXPECT_THAT(row("4096 direct 100\n"), AllOf(HasSubstr("100"), HasSubstr("multiple of 64")));
  EXPECT_THAT(row("4096 direct 0\n4096 ring 0\n"), AllOf(HasSubstr("tune.txt:4"), HasSubstr("after 4096")));
  EXPECT_THAT(row("4096 direct 0\n"), HasSubstr("last row"));
  EXPECT_THAT(row(""), HasSubstr("last row"));
  EXPECT_EQ(TuningTable::load_file("/nonexistent/t").status().code(), StatusCode::kNotFound);
}

TEST(TuningTest, AnyTextIsATableThatServesEverySizeOrAnErrorWithItsLine) {
  auto random = mutation::make_random();
  const std::string good =
      "kintsugi-tuning 1\nworld_size 8\n# up to\n4096 direct 0\n65536 tree 256\n1048576 ring 65536\nmax direct 0\n";
  int accepted = 0;
  for (int round = mutation::rounds(5000); round > 0; --round) {
    std::string text = good;
    if (random() % 2 == 0) {
      text = mutation::mutate_bytes(text, random);
    } else {
      const size_t word = text.find_first_of("0123456789", random() % text.size());
      if (word != std::string::npos) {
        const size_t end = std::min(text.find_first_not_of("0123456789", word), text.size());
        text.replace(word, end - word, mutation::odd_number(random));
      }
    }
    const auto table = TuningTable::parse(text, "tune.txt");
    if (!table.ok()) {
      EXPECT_THAT(table.status().message(), HasSubstr("tune.txt:"));
      continue;
    }
    ++accepted;
    for (const int64_t size : {int64_t{0}, int64_t{4097}, kMax})
      EXPECT_NE(table->choose(size).algorithm, Algorithm::kAuto);
    EXPECT_EQ(TuningTable::parse(table->to_text(), "again")->rows, table->rows);
  }
  EXPECT_GT(accepted, 0);
}

TEST(TuningTest, TheFastestOfEachSizeIsChosenAndDirectIsKeptWhenTied) {
  const auto row = [](int64_t size, const char* algorithm, int64_t chunk, double us) {
    return BenchRow{.size_bytes = size, .algorithm = algorithm, .chunk_bytes = chunk, .time_us = us};
  };
  const TuningTable table = make_tuning({row(1024, "ring", 0, 10), row(1024, "direct", 0, 10.3),  //
                                         row(4096, "direct", 0, 20), row(4096, "tree", 256, 15),  //
                                         row(16384, "tree", 256, 15), row(16384, "ring", 0, 30)},
                                        4);
  EXPECT_EQ(table.world_size, 4);
  const std::vector<TuningRow> want = {{.max_bytes = 2048, .algorithm = Algorithm::kDirect, .chunk_bytes = 0},
                                       {.max_bytes = kMax, .algorithm = Algorithm::kTree, .chunk_bytes = 256}};
  EXPECT_EQ(table.rows, want);
}

class TuningFileTest : public testing::Test {
 protected:
  void write(const std::string& text) { std::ofstream(path_) << text; }
  void TearDown() override { ::unlink(path_.c_str()); }
  std::string path_ = testing::TempDir() + "tuning_" + std::to_string(::getpid()) + ".txt";
};

TEST_F(TuningFileTest, ACommunicatorUsesTheTableOfItsWorldSize) {
  RankWorld world(BackendKind::kLocal, 3, 1 << 20);
  CommConfig config;
  config.tuning_file = path_;
  const auto sums_agree = [&](int64_t generation) {
    world.run(generation, config, [&](Communicator& comm) {
      NullStream stream;
      for (int64_t count : {100, 5000, 50'000}) {
        std::vector<float> x(static_cast<size_t>(count), 2.f);
        auto work = comm.all_reduce(x.data(), count, stream);
        ASSERT_TRUE(work.ok() && (*work)->wait(soon()).ok());
        EXPECT_EQ(std::count(x.begin(), x.end(), 6.f), count);
      }
    });
  };
  write("kintsugi-tuning 1\nworld_size 3\n1000 tree 256\n30000 ring 1024\nmax direct 4096\n");
  sums_agree(1);
  write("kintsugi-tuning 1\nworld_size 5\nmax ring 0\n");  // of another world: the built-in rules
  sums_agree(2);
}

TEST_F(TuningFileTest, ABrokenTableIsAnErrorWhenTheCommunicatorIsMade) {
  write("kintsugi-tuning 1\nworld_size 2\nmax direct 3\n");
  CommConfig config;
  config.tuning_file = path_;
  const auto world = LocalWorld::create(2, 1, {});
  const auto made = world->join(0, config, {});
  EXPECT_EQ(made.status().code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(made.status().message(), HasSubstr(path_ + ":3"));
}

TEST(CommConfigTest, WrongValuesAreNamed) {
  CommConfig c;
  EXPECT_TRUE(c.validate().ok());
  c.algorithm = "fast";
  EXPECT_THAT(c.validate().message(), AllOf(HasSubstr("comm.algorithm"), HasSubstr("fast"), HasSubstr("ring")));
  c = {};
  c.chunk_bytes = 100;
  EXPECT_THAT(c.validate().message(), AllOf(HasSubstr("comm.chunk_bytes = 100"), HasSubstr("multiple of 64")));
  c = {};
  c.bucket_bytes = 6;
  EXPECT_THAT(c.validate().message(), HasSubstr("comm.bucket_bytes = 6"));
  c = {};
  c.first_bucket_bytes = -4;
  EXPECT_THAT(c.validate().message(), HasSubstr("comm.first_bucket_bytes"));
  c = {};
  c.timeout_ms = 0;
  EXPECT_THAT(c.validate().message(), HasSubstr("comm.timeout_ms"));
}

TEST(CommConfigTest, WhatIsLeftOpenDependsOnWhetherRanksShareAGpu) {
  const CommConfig own = CommConfig{}.resolved(false), shared = CommConfig{}.resolved(true);
  EXPECT_EQ(own.bucket_bytes, 4 << 20);
  EXPECT_EQ(own.first_bucket_bytes, 1 << 20);
  EXPECT_EQ(own.max_queued, 8);
  EXPECT_EQ(shared.bucket_bytes, int64_t{1} << 30);
  EXPECT_EQ(shared.first_bucket_bytes, shared.bucket_bytes);
  EXPECT_EQ(shared.max_queued, 1);
  CommConfig mine;
  mine.bucket_bytes = 1 << 16;
  mine.max_queued = 3;
  for (const bool share : {false, true}) {
    EXPECT_EQ(mine.resolved(share).bucket_bytes, 1 << 16);
    EXPECT_EQ(mine.resolved(share).first_bucket_bytes, 1 << 16) << "not larger than the others";
    EXPECT_EQ(mine.resolved(share).max_queued, 3);
    EXPECT_EQ(own.resolved(share).bucket_bytes, own.bucket_bytes) << "once";
  }
}

TEST(CommConfigTest, KeysAreRegisteredUnderComm) {
  CommConfig c;
  ConfigTable table;
  describe(table, c);
  EXPECT_TRUE(table.load_text("[comm]\nalgorithm = \"ring\"\nchunk_bytes = 4096\noverlap = false\n", "t").ok());
  EXPECT_EQ(c.algorithm, "ring");
  EXPECT_EQ(c.chunk_bytes, 4096);
  EXPECT_FALSE(c.overlap);
  EXPECT_FALSE(table.set("comm.algorithm=fast").ok());
}

}  // namespace
}  // namespace kintsugi::comm
