// The words on the command line of `train`, before anything is made of them (train_options.h).
#pragma once

#include <string>

#include "launch/command_line.h"
#include "launch/train_options.h"

namespace kintsugi::launch {

// What does not go into TrainOptions as it is.
struct TrainWords {
  std::string out;
  std::string resume;
  bool resume_given = false;
  std::string trace;
  bool debug_nan = false;
  bool help_config = false;
};

CommandLineOutcome read_train_command_line(int argc, const char* const* argv, TrainOptions* options, TrainWords* words);

}  // namespace kintsugi::launch
