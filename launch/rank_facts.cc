#include "launch/rank_facts.h"

#include <fmt/format.h>

#include <charconv>
#include <cstring>

namespace kintsugi::launch {
namespace {

struct Names {
  const char* rank;
  const char* world_size;
  const char* local_rank;
  const char* local_size;
};

constexpr Names kTorchrunNames{"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
constexpr Names kOpenMpiNames{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                              "OMPI_COMM_WORLD_LOCAL_SIZE"};
// SLURM_NTASKS_PER_NODE is a request, not a fact; SLURM_STEP_TASKS_PER_NODE is "8" or "4(x2)": see below.
constexpr Names kSlurmNames{"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"};

class Reader {
 public:
  explicit Reader(const Environment& environment) : environment_(environment) {}

  bool has(const char* name) const { return environment_(name) != nullptr; }
  std::string text(const char* name) const { return has(name) ? environment_(name) : ""; }

  Result<int> number(const char* name) const {
    const std::string value = text(name);
    int n = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), n);
    if (error != std::errc() || end != value.data() + value.size()) {
      return invalid_argument(fmt::format("{} = \"{}\": must be an integer", name, value));
    }
    return n;
  }

 private:
  const Environment& environment_;
};

Status check(const RankFacts& f) {
  if (f.world_size < 1 || f.rank < 0 || f.rank >= f.world_size) {
    return invalid_argument(
        fmt::format("{}: rank {} of {} ranks is impossible", f.launcher_name, f.rank, f.world_size));
  }
  if (f.local_size < 1 || f.local_size > f.world_size || f.local_rank < 0 || f.local_rank >= f.local_size) {
    return invalid_argument(fmt::format("{}: local rank {} of {} on this host, {} in all, is impossible",
                                        f.launcher_name, f.local_rank, f.local_size, f.world_size));
  }
  return ok_status();
}

Result<RankFacts> from_variables(const Reader& env, const Names& names, Launcher launcher, const std::string& name) {
  RankFacts f;
  f.launcher = launcher;
  f.launcher_name = fmt::format("{} ({})", name, names.rank);
  KTG_ASSIGN_OR_RETURN(f.rank, env.number(names.rank));
  if (!env.has(names.world_size)) {
    return invalid_argument(fmt::format("{} is set and {} is not: both are needed", names.rank, names.world_size));
  }
  KTG_ASSIGN_OR_RETURN(f.world_size, env.number(names.world_size));
  // A job on one host needs no more than rank and size.
  f.local_rank = f.rank;
  f.local_size = f.world_size;
  if (env.has(names.local_rank)) {
    KTG_ASSIGN_OR_RETURN(f.local_rank, env.number(names.local_rank));
  }
  if (launcher == Launcher::kSlurm) {
    const std::string per_node = env.text(names.local_size);  // one node: a plain number
    if (!per_node.empty() && per_node.find_first_not_of("0123456789") == std::string::npos) {
      KTG_ASSIGN_OR_RETURN(f.local_size, env.number(names.local_size));
    } else if (!per_node.empty()) {
      return invalid_argument(fmt::format("{} = \"{}\": this version runs on one host", names.local_size, per_node));
    }
  } else if (env.has(names.local_size)) {
    KTG_ASSIGN_OR_RETURN(f.local_size, env.number(names.local_size));
  }
  KTG_RETURN_IF_ERROR(check(f));
  return f;
}

Status same(const RankFacts& a, const RankFacts& b) {
  if (a.rank == b.rank && a.world_size == b.world_size) return ok_status();
  return invalid_argument(fmt::format("{} says rank {} of {}, {} says rank {} of {}: unset one of them",
                                      a.launcher_name, a.rank, a.world_size, b.launcher_name, b.rank, b.world_size));
}

Result<RankFacts> from_flags(const RankFlags& flags) {
  if (!flags.rank || !flags.world_size) return invalid_argument("--rank and --world-size are needed together");
  RankFacts f{.rank = *flags.rank,
              .world_size = *flags.world_size,
              .local_rank = flags.local_rank.value_or(*flags.rank),
              .local_size = flags.local_size.value_or(*flags.world_size),
              .launcher = Launcher::kFlags,
              .launcher_name = "--rank",
              .ends_with_a_process = {},
              .job_key = {}};
  KTG_RETURN_IF_ERROR(check(f));
  return f;
}

// torchrun and those who imitate it by hand.
std::string torchrun_key(const Reader& env) {
  return fmt::format("{}:{}:{}", env.text("MASTER_ADDR"), env.text("MASTER_PORT"), env.text("TORCHELASTIC_RUN_ID"));
}

}  // namespace

Result<RankFacts> find_rank_facts(const RankFlags& flags, const Environment& environment) {
  const Reader env(environment);
  if (flags.rank || flags.world_size || flags.local_rank || flags.local_size) {
    KTG_ASSIGN_OR_RETURN(RankFacts f, from_flags(flags));
    f.job_key = torchrun_key(env);
    return f;
  }
  std::optional<RankFacts> torchrun, open_mpi;
  if (env.has("RANK")) {
    KTG_ASSIGN_OR_RETURN(torchrun, from_variables(env, kTorchrunNames, Launcher::kTorchrun, "torchrun style"));
    torchrun->job_key = torchrun_key(env);
    if (env.has("TORCHELASTIC_RUN_ID")) torchrun->ends_with_a_process = "torchrun ends the others";
  }
  if (env.has("OMPI_COMM_WORLD_RANK")) {
    KTG_ASSIGN_OR_RETURN(open_mpi, from_variables(env, kOpenMpiNames, Launcher::kOpenMpi, "mpirun"));
    open_mpi->job_key = env.text("PMIX_NAMESPACE");
    const std::string recovers = env.text("OMPI_MCA_orte_enable_recovery");
    if (recovers != "1" && recovers != "true") {
      open_mpi->ends_with_a_process = "mpirun ends the others (--enable-recovery lets one of them adopt the rank)";
    }
  }
  if (torchrun && open_mpi) KTG_RETURN_IF_ERROR(same(*torchrun, *open_mpi));
  if (open_mpi) return *open_mpi;  // where both agree, mpirun brings the ranks together without a port
  if (torchrun) return *torchrun;
  // Only inside a step: a batch script's own shell has SLURM_PROCID = 0 and the size of the whole allocation, too.
  if (env.has("SLURM_PROCID") && env.has("SLURM_STEP_ID")) {
    KTG_ASSIGN_OR_RETURN(RankFacts f, from_variables(env, kSlurmNames, Launcher::kSlurm, "Slurm"));
    f.job_key = fmt::format("slurm-{}-{}", env.text("SLURM_JOB_ID"), env.text("SLURM_STEP_ID"));
    if (env.text("SLURM_KILL_BAD_EXIT") == "1") f.ends_with_a_process = "SLURM_KILL_BAD_EXIT ends the others";
    return f;
  }
  if (env.has("PMIX_RANK")) {
    RankFacts f;
    f.launcher = Launcher::kPmix;
    f.launcher_name = "PMIx (PMIX_RANK)";
    f.job_key = env.text("PMIX_NAMESPACE");
    f.ends_with_a_process = "its launcher ends the others";
    KTG_ASSIGN_OR_RETURN(f.rank, env.number("PMIX_RANK"));
    if (f.rank < 0) return invalid_argument(fmt::format("{}: rank {} is impossible", f.launcher_name, f.rank));
    f.world_size = 0;  // PMIx tells by MPI only
    return f;
  }
  RankFacts alone;
  alone.launcher_name = "no launcher";
  return alone;
}

}  // namespace kintsugi::launch
