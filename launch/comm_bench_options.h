// The command line of `comm_bench`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/bench/bench.h"
#include "launch/command_line.h"

namespace kintsugi::launch {

struct CommBenchOptions {
  comm::BenchOptions options;  // op, algorithms, memory and backend follow from the words below
  std::string op = "all_reduce";
  std::string memory = "symmetric";
  std::string backend = "host";
  std::vector<std::string> algorithms;
  bool chunks_given = false;
  int num_ranks = 2;
  std::string json_file;
  std::string tuning_file;
  std::vector<int64_t> buffsizes = {0};  // on GPUs; each has processes of its own
  bool buffsizes_given = false;
};

CommandLineOutcome parse_comm_bench_command_line(int argc, const char* const* argv, CommBenchOptions* options);

}  // namespace kintsugi::launch
