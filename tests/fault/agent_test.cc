// Agents killed: where the launcher lets the others live, one of them adopts the rank and training goes on with the
// same bits; where it does not, and when agent 0 dies, the job ends, says so, leaves nothing behind, and can be
// resumed.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <string>
#include <vector>

#include "train_job.h"

namespace kintsugi::fault_test {
namespace {

using std::chrono::seconds;

const std::vector<std::string> kLong = {"--set", "training.steps=120"};
const Variables kEnableRecovery = {{"OMPI_MCA_orte_enable_recovery", "1"}};

// An agent that was killed ended by signal 9, all others by code 0.
void expect_codes(const Exit& exit, const std::vector<int>& killed) {
  EXPECT_TRUE(exit.in_time);
  for (size_t i = 0; i < exit.codes.size(); ++i) {
    const bool was_killed = std::find(killed.begin(), killed.end(), static_cast<int>(i)) != killed.end();
    EXPECT_EQ(exit.codes[i], was_killed ? 128 + SIGKILL : 0) << "agent " << i;
  }
}

void kill_agent_and_await_recovery(TrainJob& job, int rank) {
  const size_t before = job.events("recovered").size();
  ::kill(job.agent(rank), SIGKILL);
  ASSERT_TRUE(job.wait_until([&] { return job.events("recovered").size() > before; })) << job.output();
}

TEST(AgentTest, AKilledAgentsRankIsAdoptedWithTheSameBits) {
  Workspace w;
  const std::string expected = undisturbed_digest(w, 3, kLong);
  TrainJob job(w, "disturbed", {.arguments = kLong});
  ASSERT_TRUE(job.wait_for_step(15)) << job.output();
  const pid_t agent = job.agent(1);
  kill_agent_and_await_recovery(job, 1);
  // The adopted rank's worker is as mortal as any, and its new agent has a spare for it.
  ASSERT_TRUE(job.wait_until([&] { return job.agent(1) != agent && job.spare(1) != 0; })) << job.output();
  const size_t before = job.events("recovered").size();
  ::kill(job.worker(1), SIGKILL);
  ASSERT_TRUE(job.wait_until([&] { return job.events("recovered").size() > before; })) << job.output();
  expect_codes(job.wait(), {1});
  EXPECT_EQ(job.digest(), expected);
  const std::vector<Json> deaths = job.events("death");
  ASSERT_EQ(deaths.size(), 2u) << job.output();
  EXPECT_EQ(deaths[0]["cause"], "agent died");
  EXPECT_EQ(deaths[0]["pid"], agent);
  for (const Json& r : job.events("recovered")) {
    EXPECT_EQ(r["steps_lost"], 0);
    EXPECT_EQ(r["source"], "peer");
  }
  EXPECT_TRUE(job.says("adopts the rank")) << job.output();
}

TEST(AgentTest, AnAdopterMayDieTooAndTheLastAgentHoldsAllRanks) {
  Workspace w;
  const std::string expected = undisturbed_digest(w, 3, kLong);
  TrainJob job(w, "disturbed", {.arguments = kLong});
  ASSERT_TRUE(job.wait_for_step(10)) << job.output();
  kill_agent_and_await_recovery(job, 2);
  kill_agent_and_await_recovery(job, 1);
  expect_codes(job.wait(), {1, 2});
  EXPECT_EQ(job.digest(), expected);
  EXPECT_EQ(job.agent(1), job.agent(0));
}

TEST(AgentTest, TwoAgentsAtOnceAreAdopted) {
  Workspace w;
  const std::string expected = undisturbed_digest(w, 3, kLong);
  TrainJob job(w, "disturbed", {.arguments = kLong});
  ASSERT_TRUE(job.wait_for_step(10)) << job.output();
  for (const int rank : {1, 2}) ::kill(job.agent(rank), SIGKILL);
  expect_codes(job.wait(), {1, 2});
  EXPECT_EQ(job.digest(), expected);
  EXPECT_EQ(job.events("death").size(), 2u);
}

// Steps are short and every one is saved, so an agent that dies takes unfinished saves with it.
TEST(AgentTest, SavesOnTheirWayThroughADeadAgentAreMadeAgainOrGivenUp) {
  Workspace w;
  const std::vector<std::string> saving = {"--set", "training.steps=60", "--set", "checkpoint.every=1"};
  const std::string expected = undisturbed_digest(w, 3, saving);
  TrainJob job(w, "disturbed", {.arguments = saving});
  ASSERT_TRUE(job.wait_for_step(20)) << job.output();
  kill_agent_and_await_recovery(job, 1);
  expect_codes(job.wait(), {1});
  EXPECT_EQ(job.digest(), expected);
  EXPECT_EQ(job.events("checkpoint").back()["step"], 60);
}

TEST(AgentTest, UnderMpirunsEnableRecoveryTheJobGoesOnAndMpirunReportsSuccess) {
  Workspace w;
  const std::string expected = undisturbed_digest(w, 3, kLong);
  TrainJob job(w, "disturbed", {.start = Start::kMpirun, .arguments = kLong, .variables = kEnableRecovery});
  ASSERT_TRUE(job.wait_for_step(15)) << job.output();
  kill_agent_and_await_recovery(job, 2);
  EXPECT_TRUE(job.wait().all(0)) << job.output();
  EXPECT_EQ(job.digest(), expected);
  EXPECT_EQ(job.summary()["outcome"], "complete");
}

TEST(AgentTest, WithoutEnableRecoveryMpirunEndsTheJobAndResumeGoesOn) {
  Workspace w;
  const std::string expected = undisturbed_digest(w, 3, kLong);
  TrainJob job(w, "disturbed", {.start = Start::kMpirun, .arguments = kLong});
  ASSERT_TRUE(job.wait_until([&] { return !job.events("checkpoint").empty(); })) << job.output();
  ::kill(job.agent(1), SIGKILL);
  EXPECT_FALSE(job.wait().all(0));
  EXPECT_TRUE(job.says("--enable-recovery")) << job.output();
  EXPECT_TRUE(all_end(job.all_processes()));
  TrainJob resumed(w, "disturbed", {.start = Start::kMpirun, .arguments = {"--resume", "--set", "training.steps=120"}});
  ASSERT_TRUE(resumed.wait().all(0)) << resumed.output();
  EXPECT_EQ(resumed.digest(), expected);
}

TEST(AgentTest, TheDeathOfAgentZeroEndsTheJobWithOneMessageAndResumeGoesOn) {
  Workspace w;
  const std::string expected = undisturbed_digest(w, 3, kLong);
  TrainJob job(w, "disturbed", {.start = Start::kMpirun, .arguments = kLong, .variables = kEnableRecovery});
  ASSERT_TRUE(job.wait_until([&] { return !job.events("checkpoint").empty(); })) << job.output();
  ::kill(job.agent(0), SIGKILL);
  EXPECT_TRUE(job.wait(seconds(30)).in_time);
  const std::string said = job.output();
  const size_t at = said.find("the agent of rank 0 is gone");
  EXPECT_NE(at, std::string::npos) << said;
  EXPECT_EQ(said.find("the agent of rank 0 is gone", at + 1), std::string::npos) << said;
  TrainJob resumed(w, "disturbed", {.start = Start::kMpirun, .arguments = {"--resume", "--set", "training.steps=120"}});
  ASSERT_TRUE(resumed.wait().all(0)) << resumed.output();
  EXPECT_EQ(resumed.digest(), expected);
}

}  // namespace
}  // namespace kintsugi::fault_test
