// How every program of launch/ ends. Slurm's RequeueExit = 75 and wrappers rely on these numbers.
#pragma once

#include "runtime/base/status.h"

namespace kintsugi::launch {

enum ExitCode : int {
  kExitOk = 0,
  kExitFailure = 1,     // the work could not be done: files, memory, peers
  kExitUsage = 2,       // the command line is wrong
  kExitSaved = 75,      // asked to stop; saved, start me again (EX_TEMPFAIL)
  kExitBadConfig = 78,  // the configuration or what it names is wrong: starting again cannot help (EX_CONFIG)
};

// What the user can mend by changing what was asked for is bad configuration; the rest is failure.
inline ExitCode exit_code_of(const Status& status) {
  switch (status.code()) {
    case StatusCode::kInvalidArgument:
    case StatusCode::kFailedPrecondition:
    case StatusCode::kNotFound:
      return kExitBadConfig;
    default:
      return kExitFailure;
  }
}

}  // namespace kintsugi::launch
