#include "comm/peer/sum.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "comm/reduction_tree.h"

namespace kintsugi::comm {
namespace {

// Sums of random floats, computed through the postfix one element at a time.
float plain(const SumTree& tree, const std::vector<std::vector<float>>& sources, int64_t i) {
  std::vector<float> stack;
  for (int16_t op : tree.postfix()) {
    if (op != SumTree::kAdd) {
      stack.push_back(sources[op][i]);
      continue;
    }
    const float right = stack.back();
    stack.pop_back();
    stack.back() += right;
  }
  return stack[0];
}

class Arrays {
 public:
  Arrays(int num_sources, int num_dsts, int64_t n, int64_t offset, unsigned seed) : n_(n) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (int s = 0; s < num_sources; ++s) {
      sources_.emplace_back();
      for (int64_t i = 0; i < n; ++i) sources_.back().push_back(normal(random));
      srcs_.push_back(sources_.back().data());
    }
    for (int d = 0; d < num_dsts; ++d) {
      memory_.emplace_back(n + 64, -7.f);
      auto* base = memory_.back().data();
      while (reinterpret_cast<uintptr_t>(base) % 64 != 0) ++base;
      dsts_.push_back(base + offset);
    }
  }
  void expect_sums(const SumTree& tree) const {
    for (const float* dst : dsts_) {
      for (int64_t i = 0; i < n_; ++i) {
        const float want = plain(tree, sources_, i);
        ASSERT_EQ(std::memcmp(dst + i, &want, 4), 0) << "element " << i << " of " << n_;
      }
    }
  }
  std::vector<std::vector<float>> sources_, memory_;
  std::vector<const float*> srcs_;
  std::vector<float*> dsts_;
  int64_t n_;
};

TEST(SumTest, EveryNumberOfSourcesSumsInTheOrderOfItsTreeBitForBit) {
  for (int sources = 1; sources <= 20; ++sources) {
    const SumTree tree = SumTree::over(sources);
    for (int64_t n : {0, 1, 15, 16, 100, 1500}) {
      for (bool stream : {false, true}) {
        for (int64_t offset : {0, 3}) {
          for (InstructionSet set : usable_instruction_sets()) {
            Arrays a(sources, 3, n, offset, 7);
            tree_sum_with(set, a.dsts_.data(), 3, a.srcs_.data(), tree, n, stream);
            a.expect_sums(tree);
          }
        }
      }
    }
  }
}

TEST(SumTest, TreesOfPartsSumInTheirOrder) {
  for (int n = 1; n <= 8; ++n) {
    for (int64_t v : {8, 16, 64}) {
      const SumTree tree = SumTree::of_parts(v, n);
      Arrays a(tree.num_sources(), 2, 1100, 0, 8);
      tree_sum(a.dsts_.data(), 2, a.srcs_.data(), tree, 1100, true);
      a.expect_sums(tree);
    }
  }
}

TEST(SumTest, PowersOfTwoStayInRegisters) {
  for (int n : {1, 2, 4, 8}) {
    EXPECT_TRUE(SumTree::over(n).is_even());
    EXPECT_TRUE(SumTree::of_parts(64, n).is_even());
  }
  for (int n : {3, 5, 6, 7}) EXPECT_FALSE(SumTree::of_parts(8, n).is_even());
}

TEST(SumTest, ADestinationMayBeASource) {
  for (int sources : {2, 3, 8}) {
    const SumTree tree = SumTree::over(sources);
    Arrays a(sources, 1, 777, 0, 9);
    const Arrays before = a;
    float* dst = a.sources_[1].data();
    const std::vector<const float*> srcs = [&] {
      std::vector<const float*> p;
      for (auto& s : a.sources_) p.push_back(s.data());
      return p;
    }();
    tree_sum(&dst, 1, srcs.data(), tree, 777, false);
    for (int64_t i = 0; i < 777; ++i) EXPECT_EQ(dst[i], plain(tree, before.sources_, i));
  }
}

TEST(SumTest, CopiesAreExactAtEverySize) {
  for (int64_t size : {0, 1, 3, 64, 1000, 4099}) {
    for (bool stream : {false, true}) {
      alignas(64) uint8_t from[5000];
      alignas(64) uint8_t to[5000] = {};
      for (int i = 0; i < 5000; ++i) from[i] = static_cast<uint8_t>(i * 31);
      copy_bytes(to, from, size, stream);
      EXPECT_EQ(std::memcmp(to, from, static_cast<size_t>(size)), 0);
      EXPECT_EQ(to[size], 0);
    }
  }
}

}  // namespace
}  // namespace kintsugi::comm
