// The text of a table of chosen algorithms: what was written is read, and nothing else is.
#include "kernels/cuda/gemm_table.h"

#include <gtest/gtest.h>

#include <iostream>
#include <random>

#include "tests/kernels/sealed_table.h"

namespace kintsugi::kernels::cuda {
namespace {

uint32_t run_seed() {
  static const uint32_t kRunSeed = [] {
    const uint32_t seed = std::random_device{}();
    std::cout << "inputs from seed " << seed << std::endl;
    return seed;
  }();
  return kRunSeed;
}

GemmTable random_table(int entries, std::mt19937_64& rng) {
  GemmTable table;
  table.environment = {"NVIDIA H200", 13000, 130100};
  while (static_cast<int>(table.entries.size()) < entries) {
    TunedGemm entry;
    const auto op = static_cast<GemmOp>(rng() % 3);
    const GemmEpilogue epilogues[] = {GemmEpilogue::kBiasGelu, GemmEpilogue::kGeluGradient,
                                      GemmEpilogue::kBiasGradient};
    entry.problem = {op,
                     static_cast<int64_t>(rng() % 100000 + 1),
                     static_cast<int64_t>(rng() % 100000 + 1),
                     static_cast<int64_t>(rng() % 100000 + 1),
                     static_cast<DType>(rng() % 2),
                     rng() % 2 == 0,
                     rng() % 2 == 0 ? GemmEpilogue::kNone : epilogues[static_cast<int>(op)],
                     rng() % 2 == 0};
    entry.microseconds = static_cast<double>(rng() % 100000) / 10;
    for (uint64_t& word : entry.algorithm) word = rng();
    table.put(entry);
  }
  return table;
}

bool parses(const std::string& text, std::string* why) {
  GemmTable table;
  return parse_gemm_table(text, &table, why);
}

TEST(GemmTableTest, WhatWasWrittenIsReadBack) {
  std::mt19937_64 rng(run_seed());
  for (const int entries : {0, 1, 2, 40}) {
    const GemmTable table = random_table(entries, rng);
    GemmTable read;
    std::string why;
    ASSERT_TRUE(parse_gemm_table(to_text(table), &read, &why)) << why;
    EXPECT_EQ(read.environment, table.environment);
    ASSERT_EQ(read.entries.size(), table.entries.size());
    for (size_t i = 0; i < read.entries.size(); ++i) {
      EXPECT_EQ(read.entries[i].problem, table.entries[i].problem);
      EXPECT_EQ(read.entries[i].algorithm, table.entries[i].algorithm);
      EXPECT_DOUBLE_EQ(read.entries[i].microseconds, table.entries[i].microseconds);
    }
    EXPECT_EQ(to_text(read), to_text(table));
  }
}

TEST(GemmTableTest, EveryCutOfTheTextIsRefused) {
  std::mt19937_64 rng(run_seed());
  const std::string text = to_text(random_table(3, rng));
  for (size_t length = 0; length < text.size(); ++length) {
    std::string why;
    EXPECT_FALSE(parses(text.substr(0, length), &why)) << length;
    EXPECT_FALSE(why.empty());
  }
}

TEST(GemmTableTest, EveryChangedByteIsRefused) {
  std::mt19937_64 rng(run_seed());
  const std::string text = to_text(random_table(3, rng));
  for (size_t i = 0; i < text.size(); ++i) {
    for (const int flip : {1, 2, 32, 128}) {
      std::string changed = text, why;
      changed[i] = static_cast<char>(changed[i] ^ flip);
      EXPECT_FALSE(parses(changed, &why)) << "byte " << i << " flipped by " << flip;
    }
  }
}

TEST(GemmTableTest, ShuffledAndInventedTextsAreRefused) {
  std::mt19937_64 rng(run_seed());
  const std::string text = to_text(random_table(5, rng));
  for (int round = 0; round < 3000; ++round) {
    std::string changed = text, why;
    const int edits = 1 + static_cast<int>(rng() % 8);
    for (int e = 0; e < edits && !changed.empty(); ++e) {
      const size_t at = rng() % changed.size(), length = rng() % 40;
      if (rng() % 3 == 0) {
        changed.erase(at, length);
      } else if (rng() % 2 == 0) {
        changed.insert(at, text.substr(rng() % text.size(), length));
      } else {
        changed[at] = static_cast<char>(rng());
      }
    }
    if (changed == text) continue;
    EXPECT_FALSE(parses(changed, &why)) << changed;
  }
}

TEST(GemmTableTest, OddContentsUnderARightCheckSumAreRefusedOrMeanTheSameWhenWrittenAgain) {
  auto random = mutation::make_random();
  std::mt19937_64 rng(random());
  int accepted = 0, refused = 0;
  for (int round = mutation::rounds(3000); round > 0; --round) {
    GemmTable read, again;
    std::string why;
    if (!parse_gemm_table(odd_table(to_text(random_table(3, rng)), 4, random), &read, &why)) {
      ++refused;
      EXPECT_TRUE(why.starts_with("line ")) << why;
      continue;
    }
    ++accepted;
    for (const TunedGemm& entry : read.entries) EXPECT_NE(read.find(entry.problem), nullptr);
    EXPECT_FALSE(cache_file_name(read.environment).empty());
    ASSERT_TRUE(parse_gemm_table(to_text(read), &again, &why)) << why;
    EXPECT_EQ(to_text(again), to_text(read));
  }
  EXPECT_GT(accepted, 0);
  EXPECT_GT(refused, 0);
}

TEST(GemmTableTest, ARefusedTextLeavesTheTableAlone) {
  std::mt19937_64 rng(run_seed());
  GemmTable table = random_table(2, rng);
  const std::string before = to_text(table);
  std::string why;
  EXPECT_FALSE(parse_gemm_table("kintsugi gemm algorithms 2\n", &table, &why));
  EXPECT_EQ(why, "line 1: want 'kintsugi gemm algorithms 1'");
  EXPECT_EQ(to_text(table), before);
}

TEST(GemmTableTest, EntriesAreFoundReplacedAndMissed) {
  GemmTable table;
  const GemmProblem a{GemmOp::kForward, 4, 5, 6}, b{GemmOp::kBackwardWeight, 4, 5, 6};
  EXPECT_EQ(table.find(a), nullptr);
  table.put({b, 1.0, {}});
  table.put({a, 2.0, {}});
  table.put({a, 3.0, {}});
  ASSERT_NE(table.find(a), nullptr);
  EXPECT_EQ(table.find(a)->microseconds, 3.0);
  EXPECT_EQ(table.entries.size(), 2u);
  GemmProblem c = a;
  c.epilogue = GemmEpilogue::kBias;
  EXPECT_EQ(table.missing(std::vector<GemmProblem>{c, a, b, c}), std::vector<GemmProblem>{c});
}

TEST(GemmTableTest, ProblemsAndEnvironmentsHaveNames) {
  EXPECT_EQ(to_string(GemmProblem{GemmOp::kForward, 65536, 768, 2304}),
            "forward N 65536 I 768 O 2304 bf16 overwrite plain aligned");
  EXPECT_EQ(cache_file_name({"NVIDIA H200", 13000, 130100}), "gemm-nvidia-h200-13000-130100.txt");
  EXPECT_EQ(cache_file_name({"../x", 1, 2}), "gemm----x-1-2.txt");
}

}  // namespace
}  // namespace kintsugi::kernels::cuda
