#include "launch/rank_facts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <string>

#include "launch/scheduling.h"
#include "tests/mutation.h"

namespace kintsugi::launch {
namespace {

using ::testing::HasSubstr;
using Variables = std::map<std::string, std::string>;

Environment environment_of(const Variables& variables) {
  return [&variables](const char* name) -> const char* {
    const auto it = variables.find(name);
    return it == variables.end() ? nullptr : it->second.c_str();
  };
}
Result<RankFacts> facts_of(const Variables& variables, const RankFlags& flags = {}) {
  return find_rank_facts(flags, environment_of(variables));
}

const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "3"},       {"OMPI_COMM_WORLD_SIZE", "8"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "3"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "8"},
                            {"PMIX_NAMESPACE", "12345"},         {"PMIX_RANK", "3"}};

TEST(RankFactsTest, NothingSetIsOneProcess) {
  const Result<RankFacts> f = facts_of({});
  ASSERT_TRUE(f.ok());
  EXPECT_EQ(f->rank, 0);
  EXPECT_EQ(f->world_size, 1);
  EXPECT_EQ(f->launcher, Launcher::kNone);
}

TEST(RankFactsTest, MpirunsVariablesAreRead) {
  const Result<RankFacts> f = facts_of(kOpenMpi);
  ASSERT_TRUE(f.ok());
  EXPECT_EQ(f->rank, 3);
  EXPECT_EQ(f->world_size, 8);
  EXPECT_EQ(f->local_rank, 3);
  EXPECT_EQ(f->launcher, Launcher::kOpenMpi);
  EXPECT_EQ(f->job_key, "12345");
}

TEST(RankFactsTest, TorchrunsVariablesAreRead) {
  const Result<RankFacts> f = facts_of({{"RANK", "1"},
                                        {"WORLD_SIZE", "4"},
                                        {"LOCAL_RANK", "1"},
                                        {"LOCAL_WORLD_SIZE", "4"},
                                        {"MASTER_ADDR", "localhost"},
                                        {"MASTER_PORT", "29500"}});
  ASSERT_TRUE(f.ok());
  EXPECT_EQ(f->rank, 1);
  EXPECT_EQ(f->launcher, Launcher::kTorchrun);
}

TEST(RankFactsTest, RankAndSizeAloneAreEnoughOnOneHost) {
  const Result<RankFacts> f = facts_of({{"RANK", "1"}, {"WORLD_SIZE", "4"}});
  ASSERT_TRUE(f.ok());
  EXPECT_EQ(f->local_rank, 1);
  EXPECT_EQ(f->local_size, 4);
}

TEST(RankFactsTest, ASlurmStepIsReadAndABatchScriptsShellIsNot) {
  const Variables batch = {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}, {"SLURM_LOCALID", "0"}, {"SLURM_JOB_ID", "7"}};
  EXPECT_EQ(facts_of(batch)->launcher, Launcher::kNone);
  Variables step = batch;
  step["SLURM_STEP_ID"] = "0";
  step["SLURM_PROCID"] = "5";
  step["SLURM_LOCALID"] = "5";
  step["SLURM_STEP_TASKS_PER_NODE"] = "8";
  const Result<RankFacts> f = facts_of(step);
  ASSERT_TRUE(f.ok());
  EXPECT_EQ(f->rank, 5);
  EXPECT_EQ(f->world_size, 8);
  EXPECT_EQ(f->job_key, "slurm-7-0");
}

TEST(RankFactsTest, SeveralNodesOfSlurmAreRefused) {
  const Result<RankFacts> f = facts_of(
      {{"SLURM_PROCID", "5"}, {"SLURM_NTASKS", "8"}, {"SLURM_STEP_ID", "0"}, {"SLURM_STEP_TASKS_PER_NODE", "4(x2)"}});
  ASSERT_FALSE(f.ok());
  EXPECT_THAT(f.status().message(), HasSubstr("one host"));
}

TEST(RankFactsTest, MpirunInsideASlurmAllocationIsMpirun) {
  Variables v = kOpenMpi;
  v["SLURM_PROCID"] = "0";
  v["SLURM_NTASKS"] = "2";
  v["SLURM_STEP_ID"] = "0";
  EXPECT_EQ(facts_of(v)->launcher, Launcher::kOpenMpi);
}

TEST(RankFactsTest, ContradictionsAreRefusedByName) {
  Variables v = kOpenMpi;
  v["RANK"] = "2";
  v["WORLD_SIZE"] = "8";
  const Result<RankFacts> f = facts_of(v);
  ASSERT_FALSE(f.ok());
  EXPECT_EQ(f.status().code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(f.status().message(), HasSubstr("RANK"));
  EXPECT_THAT(f.status().message(), HasSubstr("OMPI_COMM_WORLD_RANK"));
  v["RANK"] = "3";
  EXPECT_TRUE(facts_of(v).ok());
}

TEST(RankFactsTest, NonsenseIsRefusedByName) {
  EXPECT_THAT(facts_of({{"RANK", "x"}, {"WORLD_SIZE", "4"}}).status().message(), HasSubstr("RANK = \"x\""));
  EXPECT_THAT(facts_of({{"RANK", "4"}, {"WORLD_SIZE", "4"}}).status().message(), HasSubstr("rank 4 of 4"));
  EXPECT_THAT(facts_of({{"RANK", "1"}}).status().message(), HasSubstr("WORLD_SIZE is not"));
}

TEST(RankFactsTest, FlagsComeBeforeTheEnvironment) {
  const Result<RankFacts> f = facts_of(kOpenMpi, {.rank = 0, .world_size = 2, .local_rank = {}, .local_size = {}});
  ASSERT_TRUE(f.ok());
  EXPECT_EQ(f->world_size, 2);
  EXPECT_EQ(f->launcher, Launcher::kFlags);
  EXPECT_FALSE(facts_of({}, {.rank = 0, .world_size = {}, .local_rank = {}, .local_size = {}}).ok());
}

// A variable that a launcher, a script or a person may have set to anything.
std::string odd_value(const std::string& value, mutation::Random& random) {
  static const char* const kTexts[] = {"", " ", "+3", "3 ", "0x3", "4(x2)", "2,1(x3)", "host[1-3]", "x"};
  switch (random() % 4) {
    case 0:
      return mutation::odd_number(random);
    case 1:
      return kTexts[random() % std::size(kTexts)];
    case 2:
      return mutation::mutate_bytes(value, random);
    default:
      return std::to_string(random() % 9);
  }
}

TEST(RankFactsFuzzTest, AnyEnvironmentGivesARankThatCanBeOrAMessage) {
  auto random = mutation::make_random();
  const Variables launchers[] = {
      {{"RANK", "3"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "3"}, {"LOCAL_WORLD_SIZE", "8"}, {"MASTER_PORT", "29500"}},
      kOpenMpi,
      {{"SLURM_PROCID", "3"},
       {"SLURM_NTASKS", "8"},
       {"SLURM_LOCALID", "3"},
       {"SLURM_STEP_TASKS_PER_NODE", "8"},
       {"SLURM_STEP_ID", "0"},
       {"SLURM_JOB_ID", "7"}},
      {{"PMIX_RANK", "3"}}};
  int accepted = 0, refused = 0;
  for (int round = mutation::rounds(5000); round > 0; --round) {
    Variables variables;
    for (uint32_t n = 1 + random() % 2; n > 0; --n) variables.merge(Variables(launchers[random() % 4]));
    for (uint32_t edits = random() % 3; edits > 0; --edits) {
      const auto variable = std::next(variables.begin(), random() % static_cast<uint32_t>(variables.size()));
      if (random() % 4 == 0 && variables.size() > 1) {
        variables.erase(variable);
      } else {
        variable->second = odd_value(variable->second, random);
      }
    }
    const Result<RankFacts> f = facts_of(variables);
    if (!f.ok()) {
      ++refused;
      EXPECT_EQ(f.status().code(), StatusCode::kInvalidArgument);
      EXPECT_FALSE(f.status().message().empty());
      continue;
    }
    ++accepted;
    EXPECT_GE(f->rank, 0);
    EXPECT_FALSE(f->launcher_name.empty());
    if (f->launcher == Launcher::kPmix) continue;  // MPI tells the size
    EXPECT_LT(f->rank, f->world_size);
    EXPECT_GE(f->local_rank, 0);
    EXPECT_LT(f->local_rank, f->local_size);
    EXPECT_LE(f->local_size, f->world_size);
  }
  EXPECT_GT(accepted, 0);
  EXPECT_GT(refused, 0);
}

TEST(ThreadsTest, CpusAndQuotaAreDividedByTheRanksThatShareThem) {
  EXPECT_EQ(threads_per_rank(16, 0, 4, nullptr), 4);
  EXPECT_EQ(threads_per_rank(2, 0, 8, nullptr), 1);
  EXPECT_EQ(threads_per_rank(2, 0, 1, nullptr), 2);
  EXPECT_EQ(threads_per_rank(16, 0.5, 1, nullptr), 1);
  EXPECT_EQ(threads_per_rank(16, 6.5, 2, nullptr), 3);
}

TEST(ThreadsTest, TheQuotaIsTheTightestOfBothVersionsAndAllAncestors) {
  const std::filesystem::path root =
      std::filesystem::path(testing::TempDir()) / ("ktg_quota_" + std::to_string(::getpid()));
  const auto write = [&](const std::string& path, const std::string& text) {
    std::filesystem::create_directories((root / path).parent_path());
    std::ofstream(root / path) << text;
  };
  EXPECT_EQ(cgroup_cpu_quota(root), 0) << "a machine without control groups";
  write("proc/self/cgroup", "7:cpuset:/x\n4:cpu,cpuacct:/job/step\n0::/\n");
  EXPECT_EQ(cgroup_cpu_quota(root), 0);
  write("sys/fs/cgroup/cpu/job/step/cpu.cfs_quota_us", "-1\n");
  write("sys/fs/cgroup/cpu/job/step/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(cgroup_cpu_quota(root), 0) << "-1: no limit";
  write("sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "150000\n");
  write("sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(cgroup_cpu_quota(root), 1.5) << "the ancestor's";
  write("sys/fs/cgroup/cpu/job/step/cpu.cfs_quota_us", "50000\n");
  EXPECT_EQ(cgroup_cpu_quota(root), 0.5);
  write("proc/self/cgroup", "4:cpu,cpuacct:/nowhere/here\n");
  write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "200000\n");
  write("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(cgroup_cpu_quota(root), 2) << "inside a container";
  write("proc/self/cgroup", "0::/a/b\n");
  write("sys/fs/cgroup/a/cpu.max", "25000 100000\n");
  write("sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
  EXPECT_EQ(cgroup_cpu_quota(root), 0.25);
  std::filesystem::remove_all(root);
}

TEST(ThreadsTest, SpinningIsLimitedOnceUnlessTheUserSaysHow) {
  EXPECT_FALSE(limit_spinning(environment_of({{"OMP_WAIT_POLICY", "passive"}})));
  EXPECT_FALSE(limit_spinning(environment_of({{"GOMP_SPINCOUNT", "7"}})));
  ::unsetenv("GOMP_SPINCOUNT");
  EXPECT_TRUE(limit_spinning(environment_of({})));
  EXPECT_STREQ(::getenv("GOMP_SPINCOUNT"), "10000");
  EXPECT_FALSE(limit_spinning([](const char* name) -> const char* { return ::getenv(name); }));
}

TEST(ThreadsTest, OmpNumThreadsWins) {
  EXPECT_EQ(threads_per_rank(2, 0, 8, "3"), 3);
  EXPECT_EQ(threads_per_rank(2, 0, 8, "4,2"), 4);
  EXPECT_EQ(threads_per_rank(2, 0, 1, "none"), 2);
}

}  // namespace
}  // namespace kintsugi::launch
