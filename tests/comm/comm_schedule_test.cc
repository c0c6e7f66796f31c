// Algorithms as data: all ranks' schedules are carried out on plain arrays in one thread, in random orders, so that a
// wait that is missing shows as a wrong sum, and one too many as a deadlock.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

#include "comm/peer/schedule.h"

namespace kintsugi::comm {
namespace {

enum class Kind { kDirect, kRing, kTree };

Schedule make(Kind kind, const Cut& cut, int rank, int n) {
  if (kind == Kind::kDirect) return schedule_direct(cut, rank, n);
  if (kind == Kind::kRing) return schedule_ring(cut, rank, n);
  return schedule_double_tree(cut, rank, n, /*chunk=*/40);
}

int64_t value(int rank, int64_t i) { return (rank + 1) * 1'000'003 + i * 7; }

// A world whose memory is arrays of integers.
class Simulation {
 public:
  Simulation(Kind kind, int n, const Cut& cut, std::vector<bool> staged, unsigned seed)
      : n_(n), cut_(cut), staged_(std::move(staged)), random_(seed) {
    for (int r = 0; r < n; ++r) {
      schedules_.push_back(make(kind, cut, r, n));
      user_.emplace_back(cut.size);
      for (int64_t i = 0; i < cut.size; ++i) user_[r][i] = value(r, i);
      for (auto& half : staging_) half.emplace_back(cut.round_size, -1);
      lanes_.emplace_back(4, 0);
    }
    next_.assign(n, 0);
    for (int r = 0; r < n; ++r) copy(r, 0, /*in=*/true);  // as posting does
  }

  // "" when every rank ends with the sums; otherwise what went wrong.
  std::string run() {
    int left = n_;
    while (left > 0) {
      std::vector<int> ready;
      left = 0;
      for (int r = 0; r < n_; ++r) {
        if (next_[r] == schedules_[r].steps.size()) continue;
        ++left;
        if (may_go(r)) ready.push_back(r);
      }
      if (left == 0) break;
      if (ready.empty()) return "deadlock with " + std::to_string(left) + " ranks under way";
      carry_out(ready[random_() % ready.size()]);
    }
    for (int r = 0; r < n_; ++r) {
      for (int64_t i = 0; i < cut_.size; ++i) {
        int64_t want = 0;
        for (int p = 0; p < n_; ++p) want += value(p, i);
        if (user_[r][i] != want) return "rank " + std::to_string(r) + " element " + std::to_string(i);
      }
    }
    return "";
  }

 private:
  bool may_go(int r) const {
    for (const Wait& wait : schedules_[r].steps[next_[r]].waits) {
      if (wait.peer == kNobody) continue;
      for (int p = 0; p < n_; ++p) {
        const bool meant = wait.peer == kEveryPeer ? p != r : p == wait.peer;
        if (meant && lanes_[p][wait.lane] < wait.tick) return false;
      }
    }
    return true;
  }
  int64_t& at(int rank, const Step& step, int64_t i) {
    return staged_[rank] ? staging_[step.round % 2][rank][step.begin + i]
                         : user_[rank][step.round * cut_.round_size + step.begin + i];
  }
  void copy(int rank, int64_t round, bool in) {
    if (!staged_[rank] || cut_.size == 0) return;
    for (int64_t i = 0; i < cut_.size_of_round(round); ++i) {
      int64_t& user = user_[rank][round * cut_.round_size + i];
      int64_t& half = staging_[round % 2][rank][i];
      (in ? half : user) = in ? user : half;
    }
  }
  void carry_out(int r) {
    const Step& step = schedules_[r].steps[next_[r]++];
    if (step.act == Act::kCopyIn || step.act == Act::kCopyOut) copy(r, step.round, step.act == Act::kCopyIn);
    for (int64_t i = 0; i < step.size; ++i) {
      if (step.act == Act::kReduce) {
        int64_t sum = 0;
        for (int p = 0; p < n_; ++p) sum += at(p, step, i);
        for (int p = 0; p < n_; ++p) at(p, step, i) = sum;
      } else if (step.act == Act::kAccumulate) {
        if (step.a != kNobody) at(r, step, i) += at(step.a, step, i);
        if (step.b != kNobody) at(r, step, i) += at(step.b, step, i);
      } else if (step.act == Act::kCopy) {
        at(r, step, i) = at(step.a, step, i);
      }
    }
    if (step.publish_lane >= 0) {
      EXPECT_GT(step.publish_tick, lanes_[r][step.publish_lane]) << "progress must grow";
      EXPECT_LE(step.publish_tick, schedules_[r].ticks);
      lanes_[r][step.publish_lane] = step.publish_tick;
    }
  }

  int n_;
  Cut cut_;
  std::vector<bool> staged_;
  std::mt19937 random_;
  std::vector<Schedule> schedules_;
  std::vector<std::vector<int64_t>> user_;
  std::vector<std::vector<int64_t>> staging_[2];
  std::vector<std::vector<int32_t>> lanes_;
  std::vector<size_t> next_;
};

void check_all(Kind kind) {
  constexpr unsigned kSeed = 3;
  std::mt19937 random(kSeed);
  for (int n = 2; n <= 17; ++n) {
    for (int64_t size : {0, 1, 15, 16, 200, 1000}) {
      for (int64_t round_size : {1000, 333, 64}) {
        for (int staging = 0; staging < 3; ++staging) {  // none, all, some
          std::vector<bool> staged(n, staging == 1);
          for (int r = 0; r < n && staging == 2; ++r) staged[r] = random() % 2 == 0;
          const bool any = std::find(staged.begin(), staged.end(), true) != staged.end();
          const Cut cut{.size = size, .round_size = round_size, .any_staged = any};
          const std::string wrong = Simulation(kind, n, cut, staged, random()).run();
          ASSERT_EQ(wrong, "") << n << " ranks, size " << size << ", rounds of " << round_size << ", staging "
                               << staging << ", seed " << kSeed;
        }
      }
    }
  }
}

TEST(ScheduleTest, DirectIsRightInEveryOrderOfEvents) { check_all(Kind::kDirect); }
TEST(ScheduleTest, RingIsRightInEveryOrderOfEvents) { check_all(Kind::kRing); }
TEST(ScheduleTest, DoubleTreeIsRightInEveryOrderOfEvents) { check_all(Kind::kTree); }

TEST(ScheduleTest, EveryRankCountsTheSameTicks) {
  for (int n = 2; n <= 64; ++n) {
    const Cut cut{.size = 1000, .round_size = 300, .any_staged = false};
    for (Kind kind : {Kind::kDirect, Kind::kRing, Kind::kTree}) {
      for (int r = 1; r < n; ++r) EXPECT_EQ(make(kind, cut, r, n).ticks, make(kind, cut, 0, n).ticks);
    }
  }
}

TEST(ScheduleTest, SlicesCoverEverythingOnceAndBeginOnCacheLines) {
  for (int n = 1; n <= 64; ++n) {
    for (int64_t size : {0, 1, 16, 17, 1000, 4097}) {
      EXPECT_EQ(slice_begin(size, 0, n), 0);
      EXPECT_EQ(slice_begin(size, n, n), size);
      for (int r = 0; r < n; ++r) {
        EXPECT_LE(slice_begin(size, r, n), slice_begin(size, r + 1, n));
        EXPECT_TRUE(slice_begin(size, r, n) % 16 == 0 || slice_begin(size, r, n) == size);
      }
    }
  }
}

TEST(ScheduleTest, DoubleTreesAreTreesThatSwapLeavesAndInnerNodes) {
  for (int n = 2; n <= 64; ++n) {
    std::set<int> inner[2];
    for (int tree : {0, 1}) {
      int roots = 0;
      for (int r = 0; r < n; ++r) {
        const TreeNode node = double_tree_node(r, n, tree);
        roots += node.parent == kNobody;
        for (int16_t child : node.children) {
          if (child == kNobody) continue;
          inner[tree].insert(r);
          EXPECT_EQ(double_tree_node(child, n, tree).parent, r) << n << " ranks, tree " << tree;
        }
        int depth = 0;  // the root is reached, in logarithmic depth
        for (int at = r; double_tree_node(at, n, tree).parent != kNobody; ++depth) {
          ASSERT_LE(depth, 8);
          at = double_tree_node(at, n, tree).parent;
        }
      }
      EXPECT_EQ(roots, 1);
    }
    int both = 0;
    for (int r : inner[0]) both += inner[1].count(r) != 0;
    EXPECT_LE(both, 1) << n << " ranks";  // an odd world has one rank too many
  }
}

}  // namespace
}  // namespace kintsugi::comm
