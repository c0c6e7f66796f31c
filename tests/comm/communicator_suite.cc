#include "tests/comm/communicator_suite.h"

#include <bit>
#include <cstring>
#include <random>

#include "comm/reduction_tree.h"
#include "tests/comm/suite_data.h"

namespace kintsugi::comm {

Floats::Floats(Seat& seat, int64_t count, bool in_heap) : seat_(seat) {
  if (in_heap) {
    auto p = seat.heap.allocate(count * 4, "test");
    KTG_CHECK(p.ok()) << p.status().to_string();
    data_ = static_cast<float*>(p.value());
  } else {
    auto buffer = seat.backend.allocate(std::max<int64_t>(count, 1) * 4, "test");
    KTG_CHECK(buffer.ok()) << buffer.status().to_string();
    own_ = std::move(*buffer);
    data_ = own_.as<float>();
  }
}

void Floats::write(int64_t begin, const std::vector<float>& values) {
  if (values.empty()) return;
  EXPECT_OK(seat_.backend.copy(data_ + begin, values.data(), static_cast<int64_t>(values.size()) * 4, seat_.stream));
  EXPECT_OK(seat_.stream.synchronize(soon()));
}

std::vector<float> Floats::read(int64_t begin, int64_t count) const {
  std::vector<float> values(count, std::numeric_limits<float>::quiet_NaN());
  if (count == 0) return values;
  EXPECT_OK(seat_.backend.copy(values.data(), data_ + begin, count * 4, seat_.stream));
  EXPECT_OK(seat_.stream.synchronize(soon()));
  return values;
}

Status run_to_end(Result<WorkPtr> work, Seat& seat) {
  if (!work.ok()) return work.status();
  KTG_RETURN_IF_ERROR((*work)->wait(soon()));
  return seat.stream.synchronize(soon());
}

namespace {

void all_reduce_in_heap(Seat& seat) {
  Floats x(seat, kMost, true);
  for (int64_t count : kCounts) {
    x.write(values(seat.rank(), count));
    EXPECT_OK(run_to_end(seat.comm.all_reduce(x, count, seat.stream), seat));
    expect_equal(
        x.read(0, count), [&](int64_t i) { return sum_of_values(seat.world_size(), i); }, at(seat, count));
  }
}

void all_reduce_outside(Seat& seat) {
  Floats in_heap(seat, kMost, true), own(seat, kMost, false);
  for (bool some_registered : {false, true}) {
    Floats& x = some_registered && seat.rank() % 2 == 0 ? in_heap : own;
    for (int64_t count : kCounts) {
      x.write(values(seat.rank(), count));
      EXPECT_OK(run_to_end(seat.comm.all_reduce(x, count, seat.stream), seat));
      expect_equal(
          x.read(0, count), [&](int64_t i) { return sum_of_values(seat.world_size(), i); }, at(seat, count));
    }
  }
}

void random_floats(Seat& seat) {
  Floats x(seat, kRandomCount, true), rank0(seat, kRandomCount, true);
  std::vector<float> first;
  for (int run = 0; run < 3; ++run) {
    const std::vector<float> sums = sum_of_random_floats(seat, x);
    if (first.empty()) first = sums;
    EXPECT_EQ(std::memcmp(first.data(), sums.data(), kRandomCount * 4), 0) << "run " << run;
  }
  rank0.write(first);
  EXPECT_OK(run_to_end(seat.comm.broadcast(rank0, kRandomCount * 4, 0, seat.stream), seat));
  EXPECT_EQ(std::memcmp(first.data(), rank0.read(0, kRandomCount).data(), kRandomCount * 4), 0)
      << "rank " << seat.rank() << " and rank 0 have different sums";
}

void reduce_scatter(Seat& seat) {
  const int n = seat.world_size();
  constexpr int64_t kShare = 40'001;
  Floats registered(seat, kShare * n, true), own(seat, kShare * n, false), out(seat, kShare, false);
  for (Floats* in : {&registered, &own}) {
    for (int64_t count : {int64_t{0}, int64_t{1}, int64_t{7}, int64_t{4097}, kShare}) {
      in->write(values(seat.rank(), count * n));
      out.poison(count);
      const bool in_place = count == 4097;
      float* result = in_place ? in->data() + seat.rank() * count : out.data();
      EXPECT_OK(run_to_end(seat.comm.reduce_scatter(result, *in, count, seat.stream), seat));
      const auto want = [&](int64_t i) { return sum_of_values(n, seat.rank() * count + i); };
      expect_equal(in_place ? in->read(seat.rank() * count, count) : out.read(0, count), want, at(seat, count));
    }
  }
}

void all_gather(Seat& seat) {
  const int n = seat.world_size();
  Floats registered(seat, kMost, true), own(seat, kMost, false), out(seat, kMost * n, false);
  for (Floats* private_or_not : {&registered, &own}) {
    for (int64_t count : kCounts) {
      out.poison(count * n);
      const bool in_place = count == 4097;
      float* in = in_place ? out.data() + seat.rank() * count : private_or_not->data();
      if (in_place) {
        out.write(seat.rank() * count, values(seat.rank(), count));
      } else {
        private_or_not->write(values(seat.rank(), count));
      }
      EXPECT_OK(run_to_end(seat.comm.all_gather(out, in, count * 4, seat.stream), seat));
      for (int r = 0; r < n; ++r) {
        expect_equal(
            out.read(r * count, count), [&](int64_t i) { return value(r, i); }, at(seat, count));
      }
    }
  }
}

void all_to_all(Seat& seat) {
  const int n = seat.world_size();
  constexpr int64_t kShare = 40'001;
  Floats registered(seat, kShare * n, true), own(seat, kShare * n, false), out(seat, kShare * n, false);
  for (Floats* in : {&registered, &own}) {
    for (int64_t count : {int64_t{0}, int64_t{1}, int64_t{7}, int64_t{4097}, kShare}) {
      in->write(values(seat.rank(), count * n));
      out.poison(count * n);
      EXPECT_OK(run_to_end(seat.comm.all_to_all(out, *in, count * 4, seat.stream), seat));
      for (int r = 0; r < n; ++r) {
        const auto want = [&](int64_t i) { return value(r, seat.rank() * count + i); };
        expect_equal(out.read(r * count, count), want, at(seat, count) + " from " + std::to_string(r));
      }
    }
  }
}

void broadcast_and_fetch(Seat& seat) {
  const int n = seat.world_size();
  Floats registered(seat, kMost, true), own(seat, kMost, false);
  for (Floats* x : {&registered, &own}) {
    for (int64_t count : kCounts) {
      for (int root : {0, n - 1}) {
        x->write(values(seat.rank(), count));
        EXPECT_OK(run_to_end(seat.comm.broadcast(*x, count * 4, root, seat.stream), seat));
        expect_equal(
            x->read(0, count), [&](int64_t i) { return value(root, i); }, "broadcast " + at(seat, count));
        x->write(values(seat.rank(), count));
        const bool receives = seat.rank() % 2 == 0;
        EXPECT_OK(run_to_end(seat.comm.fetch(*x, count * 4, root, receives, seat.stream), seat));
        const int whose = receives ? root : seat.rank();
        expect_equal(
            x->read(0, count), [&](int64_t i) { return value(whose, i); }, "fetch " + at(seat, count));
      }
    }
  }
}

void several_fetches(Seat& seat) {
  constexpr int64_t kCount = 30'011;
  constexpr int kFetches = 3;
  const int n = seat.world_size(), source = n - 1;
  const bool receives = seat.rank() == 0 && n > 1;
  Floats x(seat, kFetches * kCount, true);
  x.write(values(seat.rank(), kFetches * kCount));
  std::vector<WorkPtr> works;
  for (int f = 0; f < kFetches; ++f) {
    auto work = seat.comm.fetch(x + f * kCount, kCount * 4, source, receives, seat.stream);
    ASSERT_TRUE(work.ok()) << work.status().to_string();
    works.push_back(std::move(work).value());
  }
  for (const WorkPtr& work : works) EXPECT_OK(work->wait(soon()));
  // The source may write again.
  std::vector<float> got = x.read(0, kFetches * kCount);
  x.poison(kFetches * kCount);
  expect_equal(
      got, [&](int64_t i) { return value(receives ? source : seat.rank(), i); }, at(seat, kCount));
}

void barriers(Seat& seat) {
  const int64_t before = seat.counter.load();
  EXPECT_OK(seat.comm.barrier(soon()));  // every rank has read it
  for (int round = 1; round <= 30; ++round) {
    seat.counter.fetch_add(1);
    EXPECT_OK(seat.comm.barrier(soon()));
    EXPECT_GE(seat.counter.load() - before, round * seat.world_size());
    EXPECT_OK(seat.comm.barrier(soon()));
  }
}

void works_in_flight(Seat& seat) {
  constexpr int kWorks = 5;
  constexpr int64_t kCount = 20'000;
  Floats x(seat, kWorks * kCount, true);
  for (int round = 0; round < 6; ++round) {
    for (int w = 0; w < kWorks; ++w) x.write(w * kCount, values(seat.rank(), kCount, w));
    std::vector<WorkPtr> works;
    for (int w = 0; w < kWorks; ++w) {
      auto work = seat.comm.all_reduce(x + w * kCount, kCount, seat.stream);
      ASSERT_TRUE(work.ok()) << work.status().to_string();
      works.push_back(std::move(work).value());
    }
    EXPECT_OK(works.back()->wait(soon()));
    EXPECT_OK(seat.stream.synchronize(soon()));
    for (auto& work : works) {
      auto done = work->poll();
      EXPECT_TRUE(done.ok() && done.value());
    }
    for (int w = 0; w < kWorks; ++w) {
      const auto want = [&](int64_t i) { return sum_of_values(seat.world_size(), i + w); };
      expect_equal(x.read(w * kCount, kCount), want, at(seat, w));
    }
  }
}

void dropped_handles(Seat& seat) {
  constexpr int kWorks = 40;
  constexpr int64_t kCount = 1000;
  Floats x(seat, kWorks * kCount, true);
  for (int w = 0; w < kWorks; ++w) x.write(w * kCount, values(seat.rank(), kCount, w));
  for (int w = 0; w < kWorks; ++w) ASSERT_TRUE(seat.comm.all_reduce(x + w * kCount, kCount, seat.stream).ok());
  EXPECT_OK(seat.comm.barrier(soon()));
  for (int w = 0; w < kWorks; ++w) {
    const auto want = [&](int64_t i) { return sum_of_values(seat.world_size(), i + w); };
    expect_equal(x.read(w * kCount, kCount), want, at(seat, w));
  }
}

// Nothing orders the collective but the stream: what is queued before it, it sees; what is queued behind wait() sees
// its result.
void stream_order(Seat& seat) {
  constexpr int64_t kCount = 200'003;
  Floats a(seat, kCount, true), b(seat, kCount, false);
  b.write(values(seat.rank(), kCount));
  a.poison(kCount);
  for (int round = 0; round < 3; ++round) {
    EXPECT_OK(seat.backend.copy(a, b, kCount * 4, seat.stream));
    auto work = seat.comm.all_reduce(a, kCount, seat.stream);
    ASSERT_TRUE(work.ok()) << work.status().to_string();
    EXPECT_OK((*work)->wait(soon()));
    Floats out(seat, kCount, false);
    EXPECT_OK(seat.backend.copy(out, a, kCount * 4, seat.stream));
    EXPECT_OK(seat.backend.zero(a, kCount * 4, seat.stream));
    expect_equal(
        out.read(0, kCount), [&](int64_t i) { return sum_of_values(seat.world_size(), i); },
        at(seat, kCount) + " round " + std::to_string(round));
  }
}

// tree(lo, hi) of comm/reduction_tree.h, one element at a time.
float plain_tree(const std::vector<std::vector<float>>& leaves, LeafRange node, int64_t i) {
  if (node.end - node.begin == 1) return leaves[node.begin][i];
  const int64_t mid = tree_split(node);
  return plain_tree(leaves, {node.begin, mid}, i) + plain_tree(leaves, {mid, node.end}, i);
}

void fixed_order(Seat& seat) {
  const int n = seat.world_size();
  for (const int64_t count : {int64_t{3001}, int64_t{5}}) {
    for (int64_t v : {4, 8, 11, 16}) {
      if (v < n) continue;
      std::vector<std::vector<float>> leaves(v);
      std::mt19937 random(static_cast<unsigned>(v));
      std::normal_distribution<float> normal;
      for (auto& leaf : leaves) {
        for (int64_t i = 0; i < count; ++i) leaf.push_back(normal(random));
      }
      std::vector<Floats> arrays;
      std::vector<float*> parts;
      for (LeafRange part : maximal_subtrees(v, owned_leaves(v, seat.rank(), n))) {
        std::vector<float> sums;
        for (int64_t i = 0; i < count; ++i) sums.push_back(plain_tree(leaves, part, i));
        arrays.emplace_back(seat, count, true).write(sums);
        parts.push_back(arrays.back());
      }
      EXPECT_OK(run_to_end(seat.comm.all_reduce_fixed(parts[0], parts, v, count, seat.stream), seat));
      const std::vector<float> got = arrays[0].read(0, count);
      int64_t wrong = 0;
      for (int64_t i = 0; i < count; ++i) {
        wrong += std::bit_cast<uint32_t>(got[i]) != std::bit_cast<uint32_t>(plain_tree(leaves, {0, v}, i));
      }
      EXPECT_EQ(wrong, 0) << "V " << v << " N " << n << " " << at(seat, count);
    }
  }
}

}  // namespace

std::vector<float> sum_of_random_floats(Seat& seat, Floats& x) {
  std::mt19937 random(17 + seat.rank());
  std::normal_distribution<float> normal;
  std::vector<float> mine(kRandomCount);
  for (float& f : mine) f = normal(random);
  x.write(mine);
  EXPECT_OK(run_to_end(seat.comm.all_reduce(x, kRandomCount, seat.stream), seat));
  return x.read(0, kRandomCount);
}

std::span<const SuiteCase> communicator_suite() {
  static constexpr SuiteCase kCases[] = {
      {"AllReduceSumsEveryElementWhereItLies", all_reduce_in_heap},
      {"AllReduceOfMemoryOutsideTheHeapIsRight", all_reduce_outside},
      {"RandomFloatsGiveTheSameBitsOnEveryRankAndInEveryRun", random_floats},
      {"ReduceScatterGivesEachRankItsShare", reduce_scatter},
      {"AllGatherBringsEveryShareInRankOrder", all_gather},
      {"AllToAllBringsEveryRanksShareForThisRank", all_to_all},
      {"BroadcastAndFetchReadTheSource", broadcast_and_fetch},
      {"SeveralFetchesInFlightBringTheSourcesBytes", several_fetches},
      {"NoRankLeavesABarrierBeforeAllHaveEntered", barriers},
      {"SeveralWorksInFlightCompleteInOrder", works_in_flight},
      {"MoreWorksThanSlotsAndDroppedHandlesStillComplete", dropped_handles},
      {"CollectivesFollowTheOrderOfTheStream", stream_order},
      {"FixedOrderSumsAreThoseOfThePlainTreeBitForBit", fixed_order},
  };
  return kCases;
}

}  // namespace kintsugi::comm
