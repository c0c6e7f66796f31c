// The host's memory: how much of it this process may still use (the machine's, or its control group's where that is
// less), and blocks of it. Thread safe.
#pragma once

#include <string_view>

#include "runtime/backend.h"

namespace kintsugi::runtime {

inline constexpr int64_t kPageBytes = 4096;

// Reads /proc/meminfo and the control group files (v2, then v1). kFailedPrecondition when /proc/meminfo cannot be read.
Result<DeviceMemory> host_memory();

// A zeroed block with every page present, page aligned; in huge pages, which spare large blocks most of their TLB
// misses, from 8 MiB on (the kernel may decline). `num_threads` bring the pages in: one takes 22 s for 30 GiB,
// measured. kResourceExhausted names `what`, the bytes and what is free: Linux promises more than it has and kills
// whoever touches it, so this looks before it touches.
Result<Buffer> take_host_memory(int64_t size_bytes, std::string_view what, int num_threads = 1);

// The value in bytes of a line "MemAvailable:   123 kB" or "inactive_file 123"; -1 when there is none. Pure.
int64_t find_memory_field(std::string_view text, std::string_view field);

}  // namespace kintsugi::runtime
