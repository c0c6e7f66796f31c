// Where log lines go. Libraries log through log() and never configure it; launch/ calls
// init_log() once. Thread safe. Keep out of .cu files (fmt is slow under nvcc).
#pragma once

#include <spdlog/logger.h>

#include <string>

#include "runtime/base/status.h"

namespace kintsugi {

struct LogConfig {
  std::string level = "info";  // trace, debug, info, warn, error
  std::string file;            // one file a rank; empty: none
  bool console = false;        // also to stderr: one rank only
  std::string prefix;          // e.g. "rank 3"
};

// Replaces the process's logger. kInvalidArgument for an unknown level; file errors as they come.
Status init_log(const LogConfig& config);

// The process's logger; before init_log() it writes warnings and errors to stderr.
spdlog::logger& log();

}  // namespace kintsugi
