// Where log lines go. Libraries log through log() and never configure it; launch/ calls
// init_log() once. Thread safe. Keep out of .cu files (fmt is slow under nvcc).
#pragma once

#include <fmt/core.h>

#include <string>

#include "runtime/base/status.h"

namespace kintsugi {

struct LogConfig {
  std::string level = "info";  // trace, debug, info, warn, error
  std::string file;            // one file a rank; empty: none
  bool console = false;        // also to stderr: one rank only
  std::string prefix;          // e.g. "rank 3"
};

enum class LogLevel { kDebug, kInfo, kWarn, kError };

// Writes formatted lines to what init_log() opened. spdlog stays behind it: its headers, and the formatting that each
// file would instantiate through them, cost more time to compile than most files that log.
class Log {
 public:
  template <typename... Args>
  void debug(fmt::format_string<Args...> text, Args&&... args) const {
    write(LogLevel::kDebug, text, fmt::make_format_args(args...));
  }
  template <typename... Args>
  void info(fmt::format_string<Args...> text, Args&&... args) const {
    write(LogLevel::kInfo, text, fmt::make_format_args(args...));
  }
  template <typename... Args>
  void warn(fmt::format_string<Args...> text, Args&&... args) const {
    write(LogLevel::kWarn, text, fmt::make_format_args(args...));
  }
  template <typename... Args>
  void error(fmt::format_string<Args...> text, Args&&... args) const {
    write(LogLevel::kError, text, fmt::make_format_args(args...));
  }

 private:
  // Formats only what the level lets through.
  static void write(LogLevel level, fmt::string_view text, fmt::format_args args);
};

// Replaces the process's logger. kInvalidArgument for an unknown level; file errors as they come.
Status init_log(const LogConfig& config);

// What is written from here on. kInvalidArgument for an unknown level.
Status set_log_level(const std::string& level);

// The process's log; before init_log() it writes warnings and errors to stderr.
inline Log log() { return {}; }

}  // namespace kintsugi
