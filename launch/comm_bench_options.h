// The command line of `comm_bench`.
#pragma once

#include <cstdint>
#include <optional>
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
  std::optional<int64_t> min_bytes, max_bytes, factor;
  std::vector<std::string> algorithms, protocols;
  bool chunks_given = false;
  int num_ranks = 2;
  std::string json_file;
  std::string tuning_file;
  std::vector<int64_t> buffsizes;  // on GPUs; each has processes of its own
  bool is_first = true;            // of those
};

CommandLineOutcome parse_comm_bench_command_line(int argc, const char* const* argv, CommBenchOptions* options);

}  // namespace kintsugi::launch
