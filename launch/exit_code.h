// How every program of launch/ ends. Slurm's RequeueExit = 75 and wrappers rely on these numbers.
#pragma once

namespace kintsugi::launch {

enum ExitCode : int {
  kExitOk = 0,
  kExitFailure = 1,     // the work could not be done: files, memory, peers
  kExitUsage = 2,       // the command line is wrong
  kExitSaved = 75,      // asked to stop; saved, start me again (EX_TEMPFAIL)
  kExitBadConfig = 78,  // the configuration or what it names is wrong: starting again cannot help (EX_CONFIG)
};

}  // namespace kintsugi::launch
