#include "launch/process_memory.h"

#include <charconv>

#include "runtime/base/file_system.h"

namespace kintsugi::launch {
namespace {

// Of a line such as "VmHWM:    12345 kB".
int64_t bytes_of(std::string_view status, std::string_view name) {
  size_t at = status.find(name);
  if (at == std::string_view::npos) return 0;
  at = status.find_first_not_of(": \t", at + name.size());
  int64_t kib = 0;
  if (at != std::string_view::npos) std::from_chars(status.data() + at, status.data() + status.size(), kib);
  return kib * 1024;
}

}  // namespace

ProcessMemory parse_process_memory(std::string_view status) {
  return {.peak_bytes = bytes_of(status, "VmHWM"),
          .anonymous_bytes = bytes_of(status, "RssAnon"),
          .other_bytes = bytes_of(status, "RssFile") + bytes_of(status, "RssShmem")};
}

ProcessMemory process_memory() {
  const Result<std::string> status = FileSystem::posix().read_file("/proc/self/status");
  return status.ok() ? parse_process_memory(*status) : ProcessMemory{};
}

}  // namespace kintsugi::launch
