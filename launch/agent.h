// The agent: the process that a launcher starts and watches, one a rank. It holds what must outlive its worker (the
// shared segment, the control page, the connection to the other agents, the exit code) and starts, watches and replaces
// the worker.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "launch/rank_facts.h"
#include "launch/train_program.h"
#include "runtime/base/status.h"

namespace kintsugi::launch {

// What only rank 0's agent brings: it opens the run's folder and speaks for all.
struct JobOpening {
  JobPlan plan;
  std::shared_ptr<void> keeps_alive;                                              // the folder's lock
  std::function<void(std::string_view topic, std::string_view payload)> publish;  // lines that workers publish
  // At the end, the processes of all agents gone: removes what saves left behind that nobody will finish.
  std::function<void()> clean_up;
};

struct AgentStart {
  RankFacts facts;
  Environment environment;
  int num_threads = 1;
  int64_t began_ns = 0;  // when main() was entered, CLOCK_MONOTONIC
  Result<AgentConfig> config;                                    // a failure is told by one rank, for all
  std::function<Result<JobOpening>(const RankFacts&)> open_job;  // called on rank 0, once its worker is starting
};

// Runs until the job ends; returns its exit code.
int run_agent(AgentStart start, const TrainProgram& program);

}  // namespace kintsugi::launch
