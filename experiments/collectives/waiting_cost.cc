// What ranks that wait take from ranks that work: two ranks compute, six wait for them in a barrier, on the cores that
// there are; against the same computation while the six are not there.
//   waiting_cost [rounds]
#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <vector>

#include "launch/comm_bench_world.h"
#include "runtime/base/deadline.h"

namespace kintsugi::launch {
namespace {

constexpr int kRanks = 8;
constexpr int kWorkers = 2;

// About 20 ms of arithmetic that a compiler cannot shorten.
double work() {
  volatile double x = 1.0;
  for (int i = 0; i < 5'000'000; ++i) x = x * 0.999999 + 1e-6;
  return x;
}

Deadline limit() { return Deadline::after(std::chrono::seconds(60)); }

// Milliseconds of the slower worker in each round, on rank 0.
Status measure(BenchWorld& world, int rounds, bool others_wait, std::vector<double>& out) {
  KTG_ASSIGN_OR_RETURN(auto comm, world.next(comm::CommConfig{}));
  class NullStream final : public runtime::Stream {
   public:
    kernels::StreamHandle handle() const override { return nullptr; }
    Status synchronize(Deadline) override { return ok_status(); }
  } stream;
  const bool works = world.rank() < kWorkers;
  for (int i = 0; i < rounds; ++i) {
    KTG_RETURN_IF_ERROR(comm->barrier(limit()));
    double ms = 0;
    if (works || others_wait) {
      const int64_t began = monotonic_ns();
      if (works) work();
      if (works) ms = static_cast<double>(monotonic_ns() - began) / 1e6;
    } else {
      // Out of the way: asleep in the kernel until the workers are done, then some.
      const timespec pause{.tv_sec = 0, .tv_nsec = 100'000'000};
      ::nanosleep(&pause, nullptr);
    }
    double all[kRanks] = {};
    KTG_ASSIGN_OR_RETURN(comm::WorkPtr gathered, comm->all_gather(all, &ms, sizeof(ms), stream));
    KTG_RETURN_IF_ERROR(gathered->wait(limit()));
    out.push_back(*std::max_element(all, all + kWorkers));
  }
  return ok_status();
}

int run(BenchWorld& world, int rounds) {
  // Each worker has a core of its own, so that only the waiting ranks can slow it down.
  cpu_set_t core;
  CPU_ZERO(&core);
  CPU_SET(world.rank(), &core);
  if (world.rank() < kWorkers) ::sched_setaffinity(0, sizeof(core), &core);
  std::vector<double> alone, beside;
  Status status = measure(world, rounds, /*others_wait=*/false, alone);
  if (status.ok()) status = measure(world, rounds, /*others_wait=*/true, beside);
  if (!status.ok()) {
    std::fprintf(stderr, "rank %d: %s\n", world.rank(), status.to_string().c_str());
    return 1;
  }
  if (world.rank() != 0) return 0;
  std::sort(alone.begin(), alone.end());
  std::sort(beside.begin(), beside.end());
  const double a = alone[alone.size() / 2], b = beside[beside.size() / 2];
  std::printf("%d ranks compute: %.2f ms alone, %.2f ms while %d wait for them: %+.1f %% (median of %d)\n", kWorkers, a,
              b, kRanks - kWorkers, 100 * (b / a - 1), rounds);
  return 0;
}

}  // namespace
}  // namespace kintsugi::launch

int main(int argc, char** argv) {
  using namespace kintsugi::launch;
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 21;
  auto fds = create_bench_fds(kRanks, 0);
  if (!fds.ok()) return 1;
  return run_forked(kRanks, *fds, /*bound=*/true, [&](BenchWorld& world) { return run(world, rounds); });
}
