#include "launch/mpi_exchange.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <link.h>
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

// MPI_Finalize of Open MPI 4 unloads its plug-ins, libpmix among them, and ends the thread that runs their callbacks
// only after that. On a busy machine the thread then returns into code that is not mapped any more. What is loaded now
// therefore stays mapped until the process ends; nothing else changes.
void keep_libraries_mapped() {
  std::vector<std::string> names;
  const auto collect = [](dl_phdr_info* info, size_t, void* to) {
    static_cast<std::vector<std::string>*>(to)->emplace_back(info->dlpi_name);
    return 0;
  };
  ::dl_iterate_phdr(collect, &names);
  for (const std::string& name : names) {  // not within the iteration, which holds the lock that dlopen takes
    if (!name.empty()) ::dlopen(name.c_str(), RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
  }
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
  keep_libraries_mapped();
  MPI_Finalize();
  return result;
}

}  // namespace kintsugi::launch
