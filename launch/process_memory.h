// What this process has taken of the machine's memory.
#pragma once

#include <cstdint>
#include <string_view>

namespace kintsugi::launch {

struct ProcessMemory {
  int64_t peak_bytes = 0;       // most that was resident at a time, whoever else maps it, too
  int64_t anonymous_bytes = 0;  // now, the process's own: no file, nothing shared
  int64_t other_bytes = 0;      // now, mapped of files and of shared memory, peers' included
  // Most of its own at a time. Files and shared memory are mapped more and more and never less, so what lies there now
  // is what lay there at the peak, or a little more.
  int64_t peak_anonymous_bytes() const {
    return peak_bytes - other_bytes > anonymous_bytes ? peak_bytes - other_bytes : anonymous_bytes;
  }
};

// From the text of /proc/self/status; a line that is missing counts as 0.
ProcessMemory parse_process_memory(std::string_view status);
ProcessMemory process_memory();

}  // namespace kintsugi::launch
