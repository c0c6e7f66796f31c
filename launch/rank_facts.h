// Which rank this process is, of how many, and who started it: from flags, or from the environment that a launcher
// left. Pure functions of what they are given.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "runtime/base/status.h"

namespace kintsugi::launch {

enum class Launcher { kNone, kFlags, kTorchrun, kOpenMpi, kSlurm, kPmix };

struct RankFacts {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  int local_size = 1;
  Launcher launcher = Launcher::kNone;
  std::string launcher_name;        // "mpirun (OMPI_COMM_WORLD_RANK)": what was used
  std::string ends_with_a_process;  // why the launcher ends the job when one of its processes dies; empty: it does not
  std::string job_key;  // the same on all ranks of a job, and on no other's at this time; empty: there is none
};

struct RankFlags {
  std::optional<int> rank, world_size, local_rank, local_size;
};

using Environment = std::function<const char*(const char*)>;

// In this order: flags; RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE (torchrun's); OMPI_COMM_WORLD_*; SLURM_* of a
// job step; PMIX_RANK; else one process. kInvalidArgument names the variables when two sources contradict each other,
// one is not a number or out of range, or one that is needed is missing.
Result<RankFacts> find_rank_facts(const RankFlags& flags, const Environment& environment);

}  // namespace kintsugi::launch
