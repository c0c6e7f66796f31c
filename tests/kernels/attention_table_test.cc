// The text of a table of chosen attention plans: what was written is read, and nothing else is.
#include "kernels/cuda/attention_table.h"

#include <gtest/gtest.h>

#include <iostream>
#include <random>

#include "tests/kernels/sealed_table.h"

namespace kintsugi::kernels::cuda {
namespace {

using Pass = AttentionProblem::Pass;

AttentionTable random_table(int entries) {
  const uint32_t seed = std::random_device{}();
  std::cout << "inputs from seed " << seed << std::endl;
  std::mt19937_64 rng(seed);
  AttentionTable table{"NVIDIA H200", 91400, {}};
  while (static_cast<int>(table.entries.size()) < entries) {
    AttentionProblem p;
    p.pass = static_cast<Pass>(rng() % 3);
    for (int64_t* size : {&p.B, &p.T, &p.H, &p.K, &p.D, &p.q_stride, &p.k_stride, &p.v_stride, &p.o_stride}) {
      *size = static_cast<int64_t>(rng() % 5000 + 1);
    }
    table.put({p, static_cast<double>(rng() % 100000) / 10, "eng" + std::to_string(rng() % 9) + "_k24=7"});
  }
  return table;
}

bool parses(const std::string& text) {
  AttentionTable table;
  std::string why;
  const bool parsed = parse_attention_table(text, &table, &why);
  EXPECT_EQ(parsed, why.empty());
  return parsed;
}

TEST(AttentionTableTest, WhatWasWrittenIsReadBack) {
  for (const int entries : {0, 1, 2, 40}) {
    const AttentionTable table = random_table(entries);
    AttentionTable read;
    std::string why;
    ASSERT_TRUE(parse_attention_table(to_text(table), &read, &why)) << why;
    EXPECT_EQ(read.gpu, table.gpu);
    EXPECT_EQ(read.cudnn, table.cudnn);
    EXPECT_EQ(to_text(read), to_text(table));
    for (const TunedAttention& entry : table.entries) {
      ASSERT_NE(read.find(entry.problem), nullptr);
      EXPECT_EQ(read.find(entry.problem)->plan, entry.plan);
    }
  }
}

TEST(AttentionTableTest, EveryCutAndEveryChangedByteIsRefused) {
  const std::string text = to_text(random_table(3));
  for (size_t length = 0; length < text.size(); ++length) EXPECT_FALSE(parses(text.substr(0, length))) << length;
  for (size_t i = 0; i < text.size(); ++i) {
    for (const int flip : {1, 2, 32, 128}) {
      std::string changed = text;
      changed[i] = static_cast<char>(changed[i] ^ flip);
      EXPECT_FALSE(parses(changed)) << "byte " << i << " flipped by " << flip;
    }
  }
}

TEST(AttentionTableTest, OddContentsUnderARightCheckSumAreRefusedOrMeanTheSameWhenWrittenAgain) {
  auto random = mutation::make_random();
  const std::string good = to_text(random_table(3));
  int accepted = 0, refused = 0;
  for (int round = mutation::rounds(3000); round > 0; --round) {
    AttentionTable read, again;
    std::string why;
    if (!parse_attention_table(odd_table(good, 3, random), &read, &why)) {
      ++refused;
      EXPECT_TRUE(why.starts_with("line ")) << why;
      continue;
    }
    ++accepted;
    for (const TunedAttention& entry : read.entries) EXPECT_NE(read.find(entry.problem), nullptr);
    ASSERT_TRUE(parse_attention_table(to_text(read), &again, &why)) << why;
    EXPECT_EQ(to_text(again), to_text(read));
  }
  EXPECT_GT(accepted, 0);
  EXPECT_GT(refused, 0);
}

TEST(AttentionTableTest, EntriesAreFoundAndReplaced) {
  AttentionTable table{"NVIDIA H200", 91400, {}};
  const AttentionProblem forward{Pass::kForward, 64, 1024, 12, 12, 64, 2304, 2304, 2304, 768};
  EXPECT_EQ(table.find(forward), nullptr);
  table.put({forward, 326.5, "eng2_k24=32"});
  table.put({forward, 305.7, "eng2_k24=7"});
  ASSERT_EQ(table.entries.size(), 1u);
  EXPECT_EQ(table.find(forward)->plan, "eng2_k24=7");
  EXPECT_NE(
      to_text(table).find("\nforward B 64 T 1024 H 12 K 12 D 64 strides 2304 2304 2304 768 us 305.7 eng2_k24=7\n"),
      std::string::npos)
      << to_text(table);
}

}  // namespace
}  // namespace kintsugi::kernels::cuda
