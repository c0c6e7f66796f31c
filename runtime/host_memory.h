// How much memory this process may still use on the host: the machine's, or its control group's where that is less.
#pragma once

#include <string_view>

#include "runtime/backend.h"

namespace kintsugi::runtime {

// Reads /proc/meminfo and the control group files (v2, then v1). kFailedPrecondition when /proc/meminfo cannot be read.
Result<DeviceMemory> host_memory();

// The value in bytes of a line "MemAvailable:   123 kB" or "inactive_file 123"; -1 when there is none. Pure.
int64_t find_memory_field(std::string_view text, std::string_view field);

}  // namespace kintsugi::runtime
