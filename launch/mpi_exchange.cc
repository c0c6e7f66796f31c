#include "launch/mpi_exchange.h"

#include <fmt/format.h>
#include <mpi.h>

#include <cstdlib>
#include <vector>

namespace kintsugi::launch {
namespace {

constexpr int kTextBytes = 512;

Result<std::string> exchange(RankFacts& facts, const std::string& text) {
  int rank = 0, size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (facts.world_size > 0 && (rank != facts.rank || size != facts.world_size)) {
    return invalid_argument(fmt::format("MPI says rank {} of {}, {} says rank {} of {}", rank, size,
                                        facts.launcher_name, facts.rank, facts.world_size));
  }
  if (facts.world_size == 0) {
    facts.rank = facts.local_rank = rank;
    facts.world_size = facts.local_size = size;
  }
  if (text.size() >= kTextBytes) return internal_error("rank 0's text is too long");
  std::vector<char> mine(kTextBytes, '\0');
  text.copy(mine.data(), text.size());
  std::vector<char> all(static_cast<size_t>(kTextBytes) * static_cast<size_t>(size));
  if (MPI_Allgather(mine.data(), kTextBytes, MPI_CHAR, all.data(), kTextBytes, MPI_CHAR, MPI_COMM_WORLD) !=
      MPI_SUCCESS) {
    return unavailable("MPI_Allgather failed");
  }
  return std::string(all.data());  // rank 0's comes first
}

}  // namespace

Result<std::string> share_by_mpi(RankFacts& facts, const std::string& text) {
  // Unless the user has chosen: over the loopback device. Open MPI's shared memory transport takes twice as long to set
  // up and, killed meanwhile, leaves files in /dev/shm; a few hundred bytes need none of it.
  ::setenv("OMPI_MCA_btl", "self,tcp", /*overwrite=*/0);
  ::setenv("OMPI_MCA_btl_tcp_if_include", "lo", /*overwrite=*/0);
  ::setenv("OMPI_MCA_pml", "ob1", /*overwrite=*/0);
  int provided = 0;
  if (MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided) != MPI_SUCCESS)
    return unavailable("MPI_Init failed");
  Result<std::string> result = exchange(facts, text);
  MPI_Finalize();
  return result;
}

}  // namespace kintsugi::launch
