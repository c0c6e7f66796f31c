// Several communicators of one rank in one generation: over groups of ranks, and on channels of their own.
#include <deque>

#include "tests/comm/suite_data.h"

namespace kintsugi::comm {
namespace {

constexpr int64_t kCount = 70'001;

// The ranks of my half, counted in the world.
int in_world(const Seat& seat, int half_rank) { return 2 * half_rank + seat.rank() % 2; }

float sum_in_half(const Seat& seat, int64_t i) {
  float sum = 0;
  for (int r = 0; r < seat.half->world_size(); ++r) sum += value(in_world(seat, r), i);
  return sum;
}

void groups_keep_to_themselves(Seat& seat) {
  Communicator& half = *seat.half;
  const int n = half.world_size();
  ASSERT_EQ(n, (seat.world_size() + 1 - seat.rank() % 2) / 2);
  ASSERT_EQ(in_world(seat, half.rank()), seat.rank());
  Floats registered(seat, kCount, true), own(seat, kCount, false), out(seat, kCount, false);
  for (Floats* x : {&registered, &own}) {
    x->write(values(seat.rank(), kCount));
    EXPECT_OK(run_to_end(half.all_reduce(*x, kCount, seat.stream), seat));
    expect_equal(
        x->read(0, kCount), [&](int64_t i) { return sum_in_half(seat, i); }, at(seat, kCount) + " all_reduce");

    const int64_t share = kCount / n;
    x->write(values(seat.rank(), kCount));
    out.poison(kCount);
    EXPECT_OK(run_to_end(half.reduce_scatter(out, *x, share, seat.stream), seat));
    expect_equal(
        out.read(0, share), [&](int64_t i) { return sum_in_half(seat, half.rank() * share + i); },
        at(seat, share) + " reduce_scatter");
    out.poison(kCount);
    EXPECT_OK(run_to_end(half.all_to_all(out, *x, share * 4, seat.stream), seat));
    for (int r = 0; r < n; ++r) {
      const auto want = [&](int64_t i) { return value(in_world(seat, r), half.rank() * share + i); };
      expect_equal(out.read(r * share, share), want, at(seat, share) + " all_to_all");
    }
    out.poison(kCount);
    EXPECT_OK(run_to_end(half.all_gather(out, *x, share * 4, seat.stream), seat));
    for (int r = 0; r < n; ++r) {
      expect_equal(
          out.read(r * share, share), [&](int64_t i) { return value(in_world(seat, r), i); },
          at(seat, share) + " all_gather");
    }
    EXPECT_OK(run_to_end(half.broadcast(*x, kCount * 4, n - 1, seat.stream), seat));
    expect_equal(
        x->read(0, kCount), [&](int64_t i) { return value(in_world(seat, n - 1), i); }, at(seat, kCount) + " broadcast");
    EXPECT_OK(half.barrier(soon()));
  }
}

// One collective of each communicator in flight at the same time, over disjoint memory.
class ThreeAtOnce {
 public:
  ThreeAtOnce(Seat& seat, bool in_heap)
      : seat_(seat),
        gathered_(seat, kCount, in_heap),
        in_(seat, kCount, in_heap),
        out_(seat, kCount, in_heap),
        summed_(seat, kCount, in_heap),
        share_(kCount / seat.world_size()) {}

  // Issues them one after the other; works()[0] is comm's, [1] second's, [2] half's.
  void start(int64_t shift) {
    shift_ = shift;
    gathered_.poison(kCount);
    gathered_.write(seat_.rank() * share_, values(seat_.rank(), share_, shift));
    in_.write(values(seat_.rank(), kCount, shift));
    out_.poison(kCount);
    summed_.write(values(seat_.rank(), kCount, shift));
    works_.clear();
    keep(seat_.comm.all_gather(gathered_, gathered_ + seat_.rank() * share_, share_ * 4, seat_.stream));
    keep(seat_.second->reduce_scatter(out_, in_, share_, seat_.stream));
    keep(seat_.half->all_reduce(summed_, kCount, seat_.stream));
  }
  std::vector<WorkPtr>& works() { return works_; }

  void check() {
    const auto here = [&](const char* what) { return at(seat_, shift_) + " " + what; };
    for (int r = 0; r < seat_.world_size(); ++r) {
      const auto want = [&](int64_t i) { return value(r, i + shift_); };
      expect_equal(gathered_.read(r * share_, share_), want, here("all_gather"));
    }
    const auto scattered = [&](int64_t i) {
      return sum_of_values(seat_.world_size(), seat_.rank() * share_ + i + shift_);
    };
    expect_equal(out_.read(0, share_), scattered, here("reduce_scatter"));
    expect_equal(
        summed_.read(0, kCount), [&](int64_t i) { return sum_in_half(seat_, i + shift_); }, here("all_reduce"));
  }

 private:
  void keep(Result<WorkPtr> work) {
    ASSERT_TRUE(work.ok()) << work.status().to_string();
    works_.push_back(std::move(work).value());
  }
  Seat& seat_;
  Floats gathered_, in_, out_, summed_;
  int64_t share_;
  int64_t shift_ = 0;
  std::vector<WorkPtr> works_;
};

void interleaved_polls(Seat& seat) {
  for (const bool in_heap : {true, false}) {
    ThreeAtOnce three(seat, in_heap);
    for (int64_t round = 0; round < 8; ++round) {
      three.start(round);
      ASSERT_EQ(three.works().size(), 3u);
      // Ranks look at different works in different order.
      const Deadline limit = soon();
      bool done[3] = {};
      for (int i = seat.rank(); !(done[0] && done[1] && done[2]) && !limit.passed(); ++i) {
        const Result<bool> polled = three.works()[i % 3]->poll();
        ASSERT_TRUE(polled.ok()) << polled.status().to_string();
        done[i % 3] = *polled;
      }
      EXPECT_FALSE(limit.passed());
      for (const WorkPtr& work : three.works()) EXPECT_OK(work->wait(soon()));  // the stream's turn, on a device
      three.check();
    }
  }
}

// Nobody polls: a rank serves, while it waits on one communicator, those that wait on another. Memory outside the heap
// passes through the staging area in many rounds, so each call needs every rank again and again.
void waits_in_different_order(Seat& seat) {
  for (const bool in_heap : {true, false}) {
    ThreeAtOnce three(seat, in_heap);
    for (int64_t round = 0; round < 8; ++round) {
      three.start(round);
      ASSERT_EQ(three.works().size(), 3u);
      for (int i = 0; i < 3; ++i) EXPECT_OK(three.works()[(i + seat.rank() + round) % 3]->wait(soon()));
      three.check();
    }
  }
}

// A rank that issued nothing on a communicator yet, because it waits on another one, keeps nobody from going on there.
void one_communicator_ahead(Seat& seat) {
  constexpr int64_t kSmall = 1000;
  Floats a(seat, kSmall, true), b(seat, kSmall, true);
  for (int64_t round = 0; round < 20; ++round) {
    a.write(values(seat.rank(), kSmall, round));
    b.write(values(seat.rank(), kSmall, round + 1));
    auto first = seat.comm.all_reduce(a, kSmall, seat.stream);
    ASSERT_TRUE(first.ok()) << first.status().to_string();
    // Half of the ranks finish the first before they issue the second, on the CPU.
    if (seat.rank() % 2 == 0) EXPECT_OK((*first)->wait(soon()));
    EXPECT_OK(run_to_end(seat.second->all_reduce(b, kSmall, seat.stream), seat));
    if (seat.rank() % 2 != 0) EXPECT_OK((*first)->wait(soon()));
    const auto sum = [&](int64_t shift) {
      return [&seat, shift](int64_t i) { return sum_of_values(seat.world_size(), i + shift); };
    };
    expect_equal(a.read(0, kSmall), sum(round), at(seat, round));
    expect_equal(b.read(0, kSmall), sum(round + 1), at(seat, round));
  }
}

}  // namespace

std::span<const SuiteCase> group_suite() {
  static constexpr SuiteCase kCases[] = {
      {"GroupsKeepToThemselves", groups_keep_to_themselves},
      {"CollectivesOfThreeCommunicatorsArePolledInAnyOrder", interleaved_polls},
      {"RanksWaitOnThreeCommunicatorsInDifferentOrders", waits_in_different_order},
      {"ACommunicatorMayRunAheadOfAnother", one_communicator_ahead},
  };
  return kCases;
}

}  // namespace kintsugi::comm
