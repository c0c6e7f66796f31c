// What reading a program's command line came to. CLI11 stays in the *_options.cc files, which are one library: its
// header and inline functions take as long to compile as a whole folder.
#pragma once

#include <cstdio>
#include <string>

#include "launch/exit_code.h"

namespace kintsugi::launch {

// What to do instead of running, when that is what the command line says or when it is wrong.
struct CommandLineOutcome {
  bool run = true;
  int exit_code = 0;
  std::string text;  // help, version, or what is wrong
};

// Says it, by one process of a job alone; returns its exit code.
inline int stop_as_told(const CommandLineOutcome& outcome) {
  std::fputs(outcome.text.c_str(), outcome.exit_code == kExitOk ? stdout : stderr);
  return outcome.exit_code;
}

}  // namespace kintsugi::launch
