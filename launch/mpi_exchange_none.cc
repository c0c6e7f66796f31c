// A build without MPI: everything but mpirun's way of meeting works.
#include "launch/mpi_exchange.h"

namespace kintsugi::launch {

Result<std::string> share_by_mpi(RankFacts& facts, const std::string&) {
  return failed_precondition(
      facts.launcher_name +
      " started this job, and this build has no MPI: install libopenmpi-dev and configure again, or "
      "start the ranks by torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT)");
}

}  // namespace kintsugi::launch
