// The same measurement as comm_bench's, with MPI_Allreduce in place on private memory, which is what MPI works on.
// Usage: mpirun -np N mpi_all_reduce OUT.json SIZE_BYTES...
#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

double now_us() {
  using std::chrono::duration;
  return duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int iterations_for(long size) { return static_cast<int>(std::clamp((256L << 20) / size, 20L, 1000L)); }

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0, ranks = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  std::FILE* out = rank == 0 ? std::fopen(argv[1], "w") : nullptr;
  if (rank == 0) std::fprintf(out, "{\"ranks\": %d, \"rows\": [", ranks);
  long wrong = 0;
  for (int a = 2; a < argc; ++a) {
    const long size = std::atol(argv[a]);
    const int count = static_cast<int>(size / 4);
    std::vector<float> x(count);
    for (int i = 0; i < count; ++i) x[i] = static_cast<float>((i + 3 * rank) % 29 - 14);
    MPI_Allreduce(MPI_IN_PLACE, x.data(), count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    for (int i = 0; i < count; ++i) {
      float want = 0;
      for (int r = 0; r < ranks; ++r) want += static_cast<float>((i + 3 * r) % 29 - 14);
      wrong += x[i] != want;
    }
    std::fill(x.begin(), x.end(), 0.f);
    const int iterations = iterations_for(size);
    const int warm_up = std::max(5, iterations / 10);
    std::vector<double> times(iterations), worst(iterations);
    for (int i = -warm_up; i < iterations; ++i) {
      MPI_Barrier(MPI_COMM_WORLD);
      const double began = now_us();
      MPI_Allreduce(MPI_IN_PLACE, x.data(), count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
      if (i >= 0) times[i] = now_us() - began;
    }
    MPI_Reduce(times.data(), worst.data(), iterations, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    if (rank == 0) {
      std::sort(worst.begin(), worst.end());
      std::fprintf(out, "%s{\"size_bytes\": %ld, \"time_us\": %.2f, \"best_us\": %.2f}", a == 2 ? "" : ", ", size,
                   worst[iterations / 2], worst[0]);
    }
  }
  if (rank == 0) {
    std::fprintf(out, "]}\n");
    std::fclose(out);
  }
  MPI_Finalize();
  if (wrong != 0) std::fprintf(stderr, "rank %d: %ld wrong elements\n", rank, wrong);
  return wrong == 0 ? 0 : 1;
}
