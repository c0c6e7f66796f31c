// The command line of `train`.
#pragma once

#include <string>
#include <vector>

#include "launch/command_line.h"
#include "launch/plan_report.h"
#include "launch/rank_facts.h"
#include "launch/run_folder.h"

namespace kintsugi::launch {

struct TrainOptions {
  std::string config_path;        // as given
  std::vector<std::string> sets;  // key=value
  std::string out_dir;            // absolute
  ResumeRequest resume;
  RankFlags ranks;
  bool plan = false;  // print what the run would need, and end
  PlanRequest plan_request;
};

CommandLineOutcome parse_command_line(int argc, const char* const* argv, TrainOptions* options);

}  // namespace kintsugi::launch
