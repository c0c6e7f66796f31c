#include "runtime/host_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "runtime/base/file_system.h"

namespace kintsugi::runtime {
namespace {

constexpr int64_t kUnlimited = INT64_MAX;
constexpr int64_t kHugePageBytes = 2 << 20;

// A file that holds one number, or "max".
int64_t read_number(const std::string& path) {
  const Result<std::string> text = FileSystem::posix().read_file(path);
  if (!text.ok()) return kUnlimited;
  int64_t value = kUnlimited;
  const char* begin = text.value().data();
  std::from_chars(begin, begin + text.value().size(), value);
  return value;
}

// What the group may still take: page cache that nobody uses gives way, so it does not count as used.
int64_t group_headroom(const std::string& limit, const std::string& usage, const std::string& stat,
                       std::string_view cache_field, int64_t* total) {
  const int64_t limit_bytes = read_number(limit);
  const int64_t used_bytes = read_number(usage);
  if (limit_bytes == kUnlimited || used_bytes == kUnlimited) return kUnlimited;
  int64_t cache_bytes = 0;
  if (const Result<std::string> text = FileSystem::posix().read_file(stat); text.ok()) {
    cache_bytes = std::max<int64_t>(0, find_memory_field(text.value(), cache_field));
  }
  *total = std::min(*total, limit_bytes);
  return std::max<int64_t>(0, limit_bytes - used_bytes + cache_bytes);
}

// Writes every page of the block, each thread a run of them.
void zero_pages(void* data, int64_t num_pages, int64_t page_bytes, int num_threads) {
  const auto run = [&](int64_t t) {
    const int64_t begin = num_pages * t / num_threads, end = num_pages * (t + 1) / num_threads;
    std::memset(static_cast<uint8_t*>(data) + begin * page_bytes, 0, static_cast<size_t>((end - begin) * page_bytes));
  };
  std::vector<std::thread> threads;
  for (int t = 1; t < num_threads; ++t) threads.emplace_back(run, t);
  run(0);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int64_t find_memory_field(std::string_view text, std::string_view field) {
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const std::string_view line = text.substr(at, end - at);
    at = end + 1;
    if (!line.starts_with(field)) continue;
    const size_t digits = line.find_first_of("0123456789", field.size());
    if (digits == std::string_view::npos) continue;
    // "inactive_file 1" must not answer for "inactive_file_x 1".
    if (line.find_first_not_of(": \t", field.size()) != digits) continue;
    int64_t value = -1;
    std::from_chars(line.data() + digits, line.data() + line.size(), value);
    return line.ends_with("kB") ? value * 1024 : value;
  }
  return -1;
}

Result<DeviceMemory> host_memory() {
  KTG_ASSIGN_OR_RETURN(const std::string meminfo, FileSystem::posix().read_file("/proc/meminfo"));
  DeviceMemory memory{find_memory_field(meminfo, "MemTotal"), find_memory_field(meminfo, "MemAvailable")};
  if (memory.total_bytes < 0 || memory.available_bytes < 0) {
    return failed_precondition("/proc/meminfo: no MemTotal or no MemAvailable");
  }
  const std::string v2 = "/sys/fs/cgroup/", v1 = "/sys/fs/cgroup/memory/";
  const int64_t headroom = std::min(group_headroom(v2 + "memory.max", v2 + "memory.current", v2 + "memory.stat",
                                                   "inactive_file", &memory.total_bytes),
                                    group_headroom(v1 + "memory.limit_in_bytes", v1 + "memory.usage_in_bytes",
                                                   v1 + "memory.stat", "total_inactive_file", &memory.total_bytes));
  memory.available_bytes = std::min(memory.available_bytes, headroom);
  return memory;
}

Result<Buffer> take_host_memory(int64_t size_bytes, std::string_view what, int num_threads) {
  const bool huge = size_bytes >= 4 * kHugePageBytes;
  const int64_t page_bytes = huge ? kHugePageBytes : kPageBytes;
  const int64_t num_pages = size_bytes / page_bytes + 1;
  const auto rounded = static_cast<size_t>(num_pages * page_bytes);
  const Result<DeviceMemory> host = host_memory();
  void* data = nullptr;
  if (!host.ok() || num_pages * page_bytes <= host->available_bytes) {
    data = std::aligned_alloc(static_cast<size_t>(page_bytes), rounded);
  }
  if (data == nullptr) {
    return resource_exhausted(std::string(what) + ": want " + std::to_string(size_bytes) + " bytes of host memory, " +
                              (host.ok() ? std::to_string(host->available_bytes) : "an unknown number") + " are free");
  }
  if (huge) madvise(data, rounded, MADV_HUGEPAGE);
  zero_pages(data, num_pages, page_bytes, num_threads);
  return Buffer(data, size_bytes, [](void* p) { std::free(p); });
}

}  // namespace kintsugi::runtime
