// The command line of `prepare`.
#pragma once

#include "launch/command_line.h"
#include "launch/prepare_commands.h"

namespace kintsugi::launch {

struct PrepareCommandLine {
  bool wants_info = false;
  PrepareOptions prepare;
  PrepareInfoOptions info;
};

CommandLineOutcome parse_prepare_command_line(int argc, const char* const* argv, PrepareCommandLine* line);

}  // namespace kintsugi::launch
