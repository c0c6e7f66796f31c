// One suite for every backend that is a Communicator: backend x world size x algorithm, results.
// communicator_errors_test.cc is the other half: what happens when calls do not end well.
// Data are small integers, so that sums are exact and every element is compared with ==.
#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <random>
#include <tuple>

#include "comm/reduction_tree.h"
#include "tests/comm/rank_world.h"

namespace kintsugi::comm {
namespace {

struct Setup {
  BackendKind backend;
  int world_size;
  std::string algorithm;
};

class CommunicatorTest : public testing::TestWithParam<Setup> {
 protected:
  int world_size() const { return GetParam().world_size; }
  CommConfig config() const {
    CommConfig c;
    c.algorithm = GetParam().algorithm;
    return c;
  }
  NullStream stream_;
};

constexpr int64_t kCounts[] = {0, 1, 7, 4097, 140'003};

float value(int rank, int64_t i) { return static_cast<float>((i * 7 + rank * 13) % 101 - 50); }
float sum_of_values(int world_size, int64_t i) {
  float sum = 0;
  for (int r = 0; r < world_size; ++r) sum += value(r, i);
  return sum;
}

int64_t num_wrong(const float* got, int64_t count, const std::function<float(int64_t)>& want) {
  int64_t wrong = 0;
  for (int64_t i = 0; i < count; ++i) wrong += got[i] != want(i);
  return wrong;
}

Status run_to_end(Result<WorkPtr> work) {
  if (!work.ok()) return work.status();
  return (*work)->wait(soon());
}

#define EXPECT_OK(expr)                                                 \
  do {                                                                  \
    const Status expect_ok_status = (expr);                             \
    EXPECT_TRUE(expect_ok_status.ok()) << expect_ok_status.to_string(); \
  } while (false)

TEST_P(CommunicatorTest, AllReduceSumsEveryElementWhereItLies) {
  RankWorld world(GetParam().backend, world_size(), 1 << 20);
  std::vector<float*> x;
  for (int r = 0; r < world_size(); ++r) x.push_back(world.floats(r, 140'003));
  world.run(1, config(), [&](Communicator& comm) {
    for (int64_t count : kCounts) {
      float* mine = x[comm.rank()];
      for (int64_t i = 0; i < count; ++i) mine[i] = value(comm.rank(), i);
      EXPECT_OK(run_to_end(comm.all_reduce(mine, count, stream_)));
      EXPECT_EQ(num_wrong(mine, count, [&](int64_t i) { return sum_of_values(world_size(), i); }), 0) << count;
    }
  });
}

TEST_P(CommunicatorTest, AllReduceOfMemoryOutsideTheHeapIsStaged) {
  RankWorld world(GetParam().backend, world_size(), 1 << 20);
  std::vector<float*> in_heap;
  for (int r = 0; r < world_size(); ++r) in_heap.push_back(world.floats(r, 140'003));
  for (bool some_registered : {false, true}) {
    world.run(some_registered ? 2 : 1, config(), [&](Communicator& comm) {
      for (int64_t count : kCounts) {
        std::vector<float> own(static_cast<size_t>(count));
        float* mine = some_registered && comm.rank() % 2 == 0 ? in_heap[comm.rank()] : own.data();
        for (int64_t i = 0; i < count; ++i) mine[i] = value(comm.rank(), i);
        EXPECT_OK(run_to_end(comm.all_reduce(mine, count, stream_)));
        EXPECT_EQ(num_wrong(mine, count, [&](int64_t i) { return sum_of_values(world_size(), i); }), 0) << count;
      }
    });
  }
}

TEST_P(CommunicatorTest, RandomFloatsGiveTheSameBitsOnEveryRankAndInEveryRun) {
  constexpr int64_t kCount = 50'021;
  RankWorld world(GetParam().backend, world_size(), 1 << 20);
  std::vector<float*> x;
  for (int r = 0; r < world_size(); ++r) x.push_back(world.floats(r, kCount));
  std::vector<float> first;
  for (int64_t generation = 1; generation <= 3; ++generation) {
    world.run(generation, config(), [&](Communicator& comm) {
      std::mt19937 random(17 + comm.rank());
      std::normal_distribution<float> normal;
      for (int64_t i = 0; i < kCount; ++i) x[comm.rank()][i] = normal(random);
      EXPECT_OK(run_to_end(comm.all_reduce(x[comm.rank()], kCount, stream_)));
    });
    if (first.empty()) first.assign(x[0], x[0] + kCount);
    for (int r = 0; r < world_size(); ++r) {
      EXPECT_EQ(std::memcmp(first.data(), x[r], kCount * 4), 0) << "rank " << r << " generation " << generation;
    }
  }
}

TEST_P(CommunicatorTest, ReduceScatterGivesEachRankItsShare) {
  RankWorld world(GetParam().backend, world_size(), 6 << 20);
  const int n = world_size();
  std::vector<float*> x;
  for (int r = 0; r < n; ++r) x.push_back(world.floats(r, 40'001 * n));
  for (bool registered : {true, false}) {
    world.run(registered ? 1 : 2, config(), [&](Communicator& comm) {
      for (int64_t count : {0, 1, 7, 4097, 40'001}) {
        std::vector<float> own(static_cast<size_t>(registered ? 0 : count * n));
        std::vector<float> out(static_cast<size_t>(count), -1.f);
        float* in = registered ? x[comm.rank()] : own.data();
        for (int64_t i = 0; i < count * n; ++i) in[i] = value(comm.rank(), i);
        const bool in_place = count == 4097;
        float* result = in_place ? in + comm.rank() * count : out.data();
        EXPECT_OK(run_to_end(comm.reduce_scatter(result, in, count, stream_)));
        const auto want = [&](int64_t i) { return sum_of_values(n, comm.rank() * count + i); };
        EXPECT_EQ(num_wrong(result, count, want), 0) << count;
      }
    });
  }
}

TEST_P(CommunicatorTest, AllGatherBringsEverySharedInRankOrder) {
  RankWorld world(GetParam().backend, world_size(), 6 << 20);
  const int n = world_size();
  std::vector<float*> x;
  for (int r = 0; r < n; ++r) x.push_back(world.floats(r, 140'003));
  for (bool registered : {true, false}) {
    world.run(registered ? 1 : 2, config(), [&](Communicator& comm) {
      for (int64_t count : kCounts) {
        std::vector<float> out(static_cast<size_t>(count * n), -1.f);
        const bool in_place = count == 4097;
        float* in = in_place ? out.data() + comm.rank() * count : x[comm.rank()];
        std::vector<float> own(static_cast<size_t>(count));
        if (!registered && !in_place) in = own.data();
        for (int64_t i = 0; i < count; ++i) in[i] = value(comm.rank(), i);
        EXPECT_OK(run_to_end(comm.all_gather(out.data(), in, count * 4, stream_)));
        for (int r = 0; r < n; ++r) {
          EXPECT_EQ(num_wrong(out.data() + r * count, count, [&](int64_t i) { return value(r, i); }), 0) << count;
        }
      }
    });
  }
}

TEST_P(CommunicatorTest, BroadcastAndFetchReadTheSource) {
  RankWorld world(GetParam().backend, world_size(), 1 << 20);
  const int n = world_size();
  std::vector<float*> x;
  for (int r = 0; r < n; ++r) x.push_back(world.floats(r, 140'003));
  for (bool registered : {true, false}) {
    world.run(registered ? 1 : 2, config(), [&](Communicator& comm) {
      for (int64_t count : kCounts) {
        for (int root : {0, n - 1}) {
          std::vector<float> own(static_cast<size_t>(count));
          float* mine = registered ? x[comm.rank()] : own.data();
          for (int64_t i = 0; i < count; ++i) mine[i] = value(comm.rank(), i);
          EXPECT_OK(run_to_end(comm.broadcast(mine, count * 4, root, stream_)));
          EXPECT_EQ(num_wrong(mine, count, [&](int64_t i) { return value(root, i); }), 0) << count;
          for (int64_t i = 0; i < count; ++i) mine[i] = value(comm.rank(), i);
          const bool receives = comm.rank() % 2 == 0;
          EXPECT_OK(run_to_end(comm.fetch(mine, count * 4, root, receives, stream_)));
          const int whose = receives ? root : comm.rank();
          EXPECT_EQ(num_wrong(mine, count, [&](int64_t i) { return value(whose, i); }), 0) << count;
        }
      }
    });
  }
}

TEST_P(CommunicatorTest, NoRankLeavesABarrierBeforeAllHaveEntered) {
  RankWorld world(GetParam().backend, world_size(), 1 << 20);
  world.run(1, config(), [&](Communicator& comm) {
    for (int round = 1; round <= 30; ++round) {
      world.counter().fetch_add(1);
      EXPECT_OK(comm.barrier(soon()));
      EXPECT_GE(world.counter().load(), round * world_size());
      EXPECT_OK(comm.barrier(soon()));
    }
  });
}

TEST_P(CommunicatorTest, SeveralWorksInFlightCompleteInOrder) {
  constexpr int kWorks = 5;
  constexpr int64_t kCount = 20'000;
  RankWorld world(GetParam().backend, world_size(), 1 << 20);
  std::vector<float*> x;
  for (int r = 0; r < world_size(); ++r) x.push_back(world.floats(r, kWorks * kCount));
  world.run(1, config(), [&](Communicator& comm) {
    for (int round = 0; round < 10; ++round) {
      float* mine = x[comm.rank()];
      std::vector<WorkPtr> works;
      for (int w = 0; w < kWorks; ++w) {
        for (int64_t i = 0; i < kCount; ++i) mine[w * kCount + i] = value(comm.rank(), i + w);
        auto work = comm.all_reduce(mine + w * kCount, kCount, stream_);
        ASSERT_TRUE(work.ok()) << work.status().to_string();
        works.push_back(std::move(work).value());
      }
      EXPECT_OK(works.back()->wait(soon()));
      for (auto& work : works) {
        auto done = work->poll();
        EXPECT_TRUE(done.ok() && done.value());
      }
      for (int w = 0; w < kWorks; ++w) {
        const auto want = [&](int64_t i) { return sum_of_values(world_size(), i + w); };
        EXPECT_EQ(num_wrong(mine + w * kCount, kCount, want), 0) << w;
      }
    }
  });
}

TEST_P(CommunicatorTest, MoreWorksThanSlotsAndDroppedHandlesStillComplete) {
  constexpr int kWorks = 40;
  constexpr int64_t kCount = 1000;
  RankWorld world(GetParam().backend, world_size(), 1 << 20);
  std::vector<float*> x;
  for (int r = 0; r < world_size(); ++r) x.push_back(world.floats(r, kWorks * kCount));
  world.run(1, config(), [&](Communicator& comm) {
    std::vector<float> outside(kCount);
    float* mine = x[comm.rank()];
    for (int w = 0; w < kWorks; ++w) {
      for (int64_t i = 0; i < kCount; ++i) mine[w * kCount + i] = value(comm.rank(), i + w);
      ASSERT_TRUE(comm.all_reduce(mine + w * kCount, kCount, stream_).ok());
    }
    EXPECT_OK(comm.barrier(soon()));
    for (int w = 0; w < kWorks; ++w) {
      const auto want = [&](int64_t i) { return sum_of_values(world_size(), i + w); };
      EXPECT_EQ(num_wrong(mine + w * kCount, kCount, want), 0) << w;
    }
  });
}

// tree(lo, hi) of comm/reduction_tree.h, one element at a time.
float plain_tree(const std::vector<std::vector<float>>& leaves, LeafRange node, int64_t i) {
  if (node.end - node.begin == 1) return leaves[node.begin][i];
  const int64_t mid = tree_split(node);
  return plain_tree(leaves, {node.begin, mid}, i) + plain_tree(leaves, {mid, node.end}, i);
}

TEST_P(CommunicatorTest, FixedOrderSumsAreThoseOfThePlainTreeBitForBit) {
  constexpr int64_t kCount = 3001;
  const int n = world_size();
  for (int64_t v : {4, 8, 16}) {
    if (v < n) continue;
    std::vector<std::vector<float>> leaves(v);
    std::mt19937 random(static_cast<unsigned>(v));
    std::normal_distribution<float> normal;
    for (auto& leaf : leaves) {
      for (int64_t i = 0; i < kCount; ++i) leaf.push_back(normal(random));
    }
    RankWorld world(GetParam().backend, n, 1 << 20);
    world.run(1, config(), [&](Communicator& comm) {
      std::vector<float*> parts;
      for (LeafRange part : maximal_subtrees(v, owned_leaves(v, comm.rank(), n))) {
        parts.push_back(world.floats(comm.rank(), kCount));
        for (int64_t i = 0; i < kCount; ++i) parts.back()[i] = plain_tree(leaves, part, i);
      }
      EXPECT_OK(run_to_end(comm.all_reduce_fixed(parts[0], parts, v, kCount, stream_)));
      int64_t wrong = 0;
      for (int64_t i = 0; i < kCount; ++i) {
        wrong += std::bit_cast<uint32_t>(parts[0][i]) != std::bit_cast<uint32_t>(plain_tree(leaves, {0, v}, i));
      }
      EXPECT_EQ(wrong, 0) << "V " << v << " N " << n << " rank " << comm.rank();
    });
  }
}

std::vector<Setup> setups() {
  std::vector<Setup> all;
  for (int n : {1, 2, 3, 4, 5, 6, 7, 8}) all.push_back({BackendKind::kLocal, n, "direct"});
  for (int n : {1, 2, 3, 8}) all.push_back({BackendKind::kHost, n, "direct"});
  for (const char* algorithm : {"ring", "tree"}) {
    for (int n : {1, 2, 3, 5, 8}) all.push_back({BackendKind::kLocal, n, algorithm});
    for (int n : {3, 8}) all.push_back({BackendKind::kHost, n, algorithm});
  }
  for (const char* algorithm : {"direct", "ring", "tree"}) all.push_back({BackendKind::kHostProcesses, 5, algorithm});
  return all;
}

std::string name_of_setup(const testing::TestParamInfo<Setup>& setup) {
  return std::string(name_of(setup.param.backend)) + "_" + std::to_string(setup.param.world_size) + "_" +
         setup.param.algorithm;
}

INSTANTIATE_TEST_SUITE_P(Backends, CommunicatorTest, testing::ValuesIn(setups()), name_of_setup);

}  // namespace
}  // namespace kintsugi::comm
