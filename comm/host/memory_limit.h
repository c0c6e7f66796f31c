// What stands against taking memory on this machine: control group limits (versions 1 and 2, every ancestor) and what
// the machine has free. Asked before pages are reserved, since reserving beyond a limit wakes the OOM killer.
#pragma once

#include <cstdint>
#include <string>

#include "runtime/base/status.h"

namespace kintsugi::comm {

struct MemoryHeadroom {
  int64_t free_bytes = 0;   // what can be taken now; file cache that the kernel gives back counts as free
  int64_t limit_bytes = 0;  // the limit that leaves least
  std::string limit_name;   // "the machine's memory", "the memory limit of control group /x"
};

// `root`: where /proc and /sys are found, "" for the real ones.
Result<MemoryHeadroom> memory_headroom(const std::string& root);

}  // namespace kintsugi::comm
