// A GPU rank is killed in the middle of collectives: survivors are told out of band, abort all at once, and the next
// generation, with a replacement, sums correctly and copies the survivors' memory.
#include <gtest/gtest.h>

#include <random>

#include "tests/comm/gpu_ranks.h"

namespace kintsugi::comm {
namespace {

constexpr int64_t kCount = 300'007;
constexpr int64_t kState = 1'000'003;

// Which moments of GpuPage::at.
enum Moment { kStopped, kDrained, kReleased, kConnected, kSummed, kFetched };

// What the worker has beside its training thread: it sees the stop word and ends all that NCCL runs.
class Watcher {
 public:
  explicit Watcher(GpuPage& page)
      : thread_([this, &page] {
          int64_t seen = 0;
          while (!end_) {
            const int64_t stop = page.stop_word.load();
            if (stop > seen) NcclRegistry::process().abort_all(stop - 1, aborted("the test stopped the generation"));
            seen = stop;
            ::usleep(200);
          }
        }) {}
  ~Watcher() {
    end_ = true;
    thread_.join();
  }

 private:
  std::atomic<bool> end_{false};
  std::thread thread_;
};

float state_value(int64_t i) { return static_cast<float>(i % 1013); }

// Sums until the generation is over.
void train(GpuRank& rank, Seat& seat, Floats& x) {
  while (true) {
    const auto work = rank.comm().all_reduce(x, kCount, rank.stream());
    Status status = work.status();
    if (work.ok()) status = (*work)->wait(soon());
    if (status.ok()) status = rank.stream().synchronize(soon());
    if (!status.ok()) {
      EXPECT_EQ(status.code(), StatusCode::kAborted) << status.to_string();
      return;
    }
    seat.counter.fetch_add(1);
  }
}

// `joins`: the rank's state is not there yet.
void live(GpuRank& rank, int64_t first_generation, int64_t last_generation, bool joins, int source) {
  Watcher watcher(rank.page());
  GpuPage& page = rank.page();
  std::unique_ptr<Floats> x, state;
  for (int64_t generation = first_generation; generation <= last_generation; ++generation) {
    const auto announced = std::make_shared<std::atomic<bool>>(false);
    const Status entered = rank.enter(generation, {}, [announced] { *announced = true; });
    ASSERT_TRUE(entered.ok()) << entered.to_string();
    Seat seat = rank.seat();
    if (!state) {
      state = std::make_unique<Floats>(seat, kState, true);
      x = std::make_unique<Floats>(seat, kCount, true);
      std::vector<float> values(kState, -1.f);
      for (int64_t i = 0; !joins && i < kState; ++i) values[i] = state_value(i);
      state->write(values);
    }
    if (generation > 1) {
      auto fetched = rank.comm().fetch(state->data(), kState * 4, source, joins, rank.stream());
      ASSERT_TRUE(fetched.ok()) << fetched.status().to_string();
      EXPECT_OK((*fetched)->wait(soon()));
      page.at[kFetched][rank.rank()] = monotonic_ns();
      const std::vector<float> got = state->read(0, kState);
      int64_t wrong = 0;
      for (int64_t i = 0; i < kState; ++i) wrong += got[i] != state_value(i);
      EXPECT_EQ(wrong, 0) << "state of rank " << rank.rank();
      joins = false;
    }
    EXPECT_OK(rank.comm().barrier(soon()));
    page.at[kConnected][rank.rank()] = monotonic_ns();
    x->write(std::vector<float>(kCount, static_cast<float>(rank.rank() + 1)));
    EXPECT_OK(run_to_end(rank.comm().all_reduce(*x, kCount, rank.stream()), seat));
    page.at[kSummed][rank.rank()] = monotonic_ns();
    const int n = rank.comm().world_size();
    EXPECT_EQ(x->read(0, kCount), std::vector<float>(kCount, static_cast<float>(n * (n + 1) / 2)));
    x->write(std::vector<float>(kCount, 0.f));
    if (generation == last_generation) return;
    page.counter.fetch_add(1'000'000);  // this rank is in the generation
    train(rank, seat, *x);
    page.at[kStopped][rank.rank()] = monotonic_ns();
    rank.stream().set_stop_token({});
    EXPECT_OK(rank.stream().synchronize(soon()));
    EXPECT_OK(rank.comm().drain(soon()));
    page.at[kDrained][rank.rank()] = monotonic_ns();
    rank.gate(generation);
    EXPECT_TRUE(*announced) << "the abort was not announced";
    page.at[kReleased][rank.rank()] = monotonic_ns();
  }
}

class NcclDeathTest : public testing::TestWithParam<int> {};

TEST_P(NcclDeathTest, SurvivorsAbortAtOnceAndTheNextGenerationSumsWithAReplacement) {
  const int n = GetParam();
  constexpr int64_t kDeaths = 2;
  const unsigned seed = std::random_device()();
  std::mt19937 random(seed);
  std::printf("  seed %u\n", seed);
  GpuWorld world(n, kState * 4 + kCount * 4 + (1 << 20));
  GpuPage& page = world.page();
  // The same rank every time, so that every process knows from its start whose state is copied.
  const int victim = static_cast<int>(random() % static_cast<unsigned>(n)), source = (victim + 1) % n;
  const auto body = [&](int64_t first) {
    return [=](GpuRank& rank) { live(rank, first, kDeaths + 1, /*joins=*/first > 1, source); };
  };
  world.start_all(body(1));
  for (int64_t generation = 1; generation <= kDeaths; ++generation) {
    const Deadline limit = soon();
    while (page.counter.load() < 1'000'000 * n + 3 && !limit.passed()) ::usleep(500);
    ASSERT_FALSE(limit.passed()) << "generation " << generation << " does not train";
    ::usleep(random() % 50'000);
    page.counter = 0;
    const int64_t t0 = monotonic_ns();
    world.kill_without_waiting(victim);
    page.stop_word = generation + 1;
    const int64_t told = monotonic_ns();
    world.reap(victim);
    const int64_t reaped = monotonic_ns();
    page.arrivals.fetch_add(1);  // for the dead
    world.start(victim, body(generation + 1));
    const auto wait_for = [&](Moment moment, int except) {
      const Deadline end = soon();
      int64_t last = 0;
      for (int r = 0; r < n; ++r) {
        if (r == except) continue;
        while (page.at[moment][r].load() < t0 && !end.passed()) ::usleep(200);
        last = std::max(last, page.at[moment][r].load());
      }
      return static_cast<double>(last - t0) / 1e6;
    };
    const double stopped = wait_for(kStopped, victim), drained = wait_for(kDrained, victim),
                 released = wait_for(kReleased, victim), fetched = wait_for(kFetched, -1),
                 connected = wait_for(kConnected, -1), summed = wait_for(kSummed, -1);
    std::printf(
        "  %d ranks, rank %d killed: told %.2f ms, reaped %.0f, stopped %.0f, drained %.0f, let go %.0f, "
        "state %.0f, connected %.0f, summed %.0f (the replacement starts cold)\n",
        n, victim, static_cast<double>(told - t0) / 1e6, static_cast<double>(reaped - t0) / 1e6, stopped, drained,
        released, fetched, connected, summed);
    std::fflush(stdout);
  }
  world.join(std::chrono::seconds(30));
}

INSTANTIATE_TEST_SUITE_P(Ranks, NcclDeathTest, testing::Values(2, 3, 4),
                         [](const auto& n) { return std::to_string(n.param) + "_ranks"; });

}  // namespace
}  // namespace kintsugi::comm
