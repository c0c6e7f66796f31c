#include "comm/host/memory_limit.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <vector>

namespace kintsugi::comm {

namespace {

std::optional<std::string> read_text(const std::string& path) {
  std::ifstream file(path);
  if (!file) return std::nullopt;
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// "max" and unreadable give nothing.
std::optional<int64_t> read_number(const std::string& path) {
  std::ifstream file(path);
  int64_t value = 0;
  if (!(file >> value)) return std::nullopt;
  return value;
}

// The number after `key` in lines of "key value" or "key: value kB".
int64_t field(const std::string& text, const std::string& key) {
  std::istringstream lines(text);
  std::string line;
  while (std::getline(lines, line)) {
    std::istringstream words(line);
    std::string name;
    int64_t value = 0;
    if (words >> name >> value && (name == key || name == key + ":")) return value;
  }
  return 0;
}

struct GroupFiles {
  const char* limit;
  const char* usage;
};

void consider(MemoryHeadroom& least, const std::string& folder, const std::string& group, GroupFiles files,
              const char* cache_prefix) {
  const auto limit = read_number(folder + "/" + files.limit);
  const auto usage = read_number(folder + "/" + files.usage);
  if (!limit || !usage || *limit >= std::numeric_limits<int64_t>::max() / 2) return;
  const std::string stat = read_text(folder + "/memory.stat").value_or("");
  const std::string prefix = cache_prefix;
  const int64_t cache = field(stat, prefix + "inactive_file") + field(stat, prefix + "active_file");
  const int64_t free = std::max<int64_t>(0, *limit - *usage + cache);
  if (free >= least.free_bytes) return;
  least = {.free_bytes = free, .limit_bytes = *limit, .limit_name = "the memory limit of control group " + group};
}

// The group itself and its ancestors up to the mount point. Inside a container the path in /proc may be that of the
// host and the mount point the group itself: folders that do not exist are skipped.
void consider_ancestors(MemoryHeadroom& least, const std::string& mount, std::string group, GroupFiles files,
                        const char* cache_prefix) {
  while (true) {
    if (group == "/") group.clear();
    consider(least, mount + group, group.empty() ? "/" : group, files, cache_prefix);
    if (group.empty()) return;
    group.erase(group.find_last_of('/'));
  }
}

}  // namespace

Result<MemoryHeadroom> memory_headroom(const std::string& root) {
  const auto machine = read_text(root + "/proc/meminfo");
  if (!machine) return failed_precondition(root + "/proc/meminfo cannot be read");
  MemoryHeadroom least{.free_bytes = field(*machine, "MemAvailable") * 1024,
                       .limit_bytes = field(*machine, "MemTotal") * 1024,
                       .limit_name = "the machine's memory"};
  std::istringstream groups(read_text(root + "/proc/self/cgroup").value_or(""));
  std::string line;
  while (std::getline(groups, line)) {  // "0::/path", or "4:memory:/path" in version 1
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    std::string controllers = ",";
    controllers.append(line, first + 1, second - first - 1).append(",");
    const std::string group = line.substr(second + 1);
    if (group.empty() || group[0] != '/') continue;
    if (controllers == ",,") {
      consider_ancestors(least, root + "/sys/fs/cgroup", group, {"memory.max", "memory.current"}, "");
    } else if (controllers.find(",memory,") != std::string::npos) {
      consider_ancestors(least, root + "/sys/fs/cgroup/memory", group,
                         {"memory.limit_in_bytes", "memory.usage_in_bytes"}, "total_");
    }
  }
  return least;
}

}  // namespace kintsugi::comm
