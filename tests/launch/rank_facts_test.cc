#include "launch/rank_facts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "launch/scheduling.h"

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

TEST(ThreadsTest, CpusAndQuotaAreDividedByTheRanksThatShareThem) {
  EXPECT_EQ(threads_per_rank(16, 0, 4, nullptr), 4);
  EXPECT_EQ(threads_per_rank(2, 0, 8, nullptr), 1);
  EXPECT_EQ(threads_per_rank(2, 0, 1, nullptr), 2);
  EXPECT_EQ(threads_per_rank(16, 0.5, 1, nullptr), 1);
  EXPECT_EQ(threads_per_rank(16, 6.5, 2, nullptr), 3);
}

TEST(ThreadsTest, OmpNumThreadsWins) {
  EXPECT_EQ(threads_per_rank(2, 0, 8, "3"), 3);
  EXPECT_EQ(threads_per_rank(2, 0, 8, "4,2"), 4);
  EXPECT_EQ(threads_per_rank(2, 0, 1, "none"), 2);
}

}  // namespace
}  // namespace kintsugi::launch
