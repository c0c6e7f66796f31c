// For *_options.cc alone, which parse with CLI11.
#pragma once

#include <CLI/CLI.hpp>
#include <sstream>
#include <string>

#include "launch/command_line.h"
#include "launch/exit_code.h"

namespace kintsugi::launch {

// The program's name, which its messages begin with.
inline void name_program(CLI::App& app, const std::string& name) {
  app.name(name);
  app.failure_message([name](const CLI::App*, const CLI::Error& error) {
    return name + ": " + error.what() + "\nRun with --help for more information.\n";
  });
}

// What CLI11 would print, and the exit code for it: asking for help is no error.
inline CommandLineOutcome stopped_by(const CLI::App& app, const CLI::ParseError& error) {
  std::ostringstream out, err;
  const int code = app.exit(error, out, err);
  return {.run = false, .exit_code = code == 0 ? kExitOk : kExitUsage, .text = out.str() + err.str()};
}

}  // namespace kintsugi::launch
