#include "launch/scheduling.h"

#include <fmt/format.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <sstream>
#include <string_view>

#include "runtime/base/file_system.h"

namespace kintsugi::launch {
namespace {

constexpr int kUrgentNice = -15;
constexpr int kYieldingNice = 5;
constexpr uint64_t kUrgentSliceNs = 100'000;  // the kernel's smallest

// As in linux/sched/types.h, which clashes with glibc's sched.h.
struct SchedulingAttributes {
  uint32_t size;
  uint32_t sched_policy;
  uint64_t sched_flags;
  int32_t sched_nice;
  uint32_t sched_priority;
  uint64_t sched_runtime;
  uint64_t sched_deadline;
  uint64_t sched_period;
};
constexpr uint64_t kResetOnFork = 0x01;

bool set_attributes(int nice, uint64_t slice_ns) {
  SchedulingAttributes a{};
  a.size = sizeof a;
  a.sched_policy = SCHED_OTHER;
  a.sched_flags = kResetOnFork;
  a.sched_nice = nice;
  a.sched_runtime = slice_ns;  // of SCHED_OTHER: a hint, ignored by kernels that do not know it
  return ::syscall(SYS_sched_setattr, 0, &a, 0) == 0;
}

std::string cpu_list(const cpu_set_t& set) {
  std::string out;
  for (int c = 0; c < CPU_SETSIZE; ++c) {
    if (!CPU_ISSET(c, &set)) continue;
    int last = c;
    while (last + 1 < CPU_SETSIZE && CPU_ISSET(last + 1, &set)) ++last;
    if (!out.empty()) out += ',';
    out += last == c ? fmt::format("{}", c) : fmt::format("{}-{}", c, last);
    c = last;
  }
  return out;
}

// "max 100000" or "50000 100000": time a period.
double parse_cpu_max(const std::string& text) {
  std::istringstream in(text);
  std::string quota;
  double period = 0;
  if (!(in >> quota >> period) || quota == "max" || period <= 0) return 0;
  double value = 0;
  const auto [end, error] = std::from_chars(quota.data(), quota.data() + quota.size(), value);
  return error == std::errc() && end == quota.data() + quota.size() ? value / period : 0;
}

// The group's own limit; 0: none. Version 2 has one file, version 1 two.
double group_quota(const std::string& folder, bool version_2) {
  FileSystem& fs = FileSystem::posix();
  if (version_2) {
    const Result<std::string> limit = fs.read_file(folder + "/cpu.max");
    return limit.ok() ? parse_cpu_max(*limit) : 0;
  }
  const Result<std::string> quota = fs.read_file(folder + "/cpu.cfs_quota_us");
  const Result<std::string> period = fs.read_file(folder + "/cpu.cfs_period_us");
  if (!quota.ok() || !period.ok() || quota->starts_with('-')) return 0;
  return parse_cpu_max(*quota + " " + *period);
}

// The tightest limit of the group and its ancestors. Inside a container the mount point is the group, and its path
// leads nowhere.
double tightest_quota(const std::string& mount, std::string path, bool version_2) {
  double tightest = 0;
  while (true) {
    const double quota = group_quota(mount + path, version_2);
    if (quota > 0 && (tightest == 0 || quota < tightest)) tightest = quota;
    if (path.empty() || path == "/") return tightest;
    path.resize(path.rfind('/'));
  }
}

}  // namespace

int threads_per_rank(int num_cpus, double quota, int sharing_ranks, const char* omp_num_threads) {
  if (omp_num_threads != nullptr) {
    int n = 0;
    const std::string_view text(omp_num_threads);  // "4" or, for nested regions, "4,2"
    std::from_chars(text.data(), text.data() + text.size(), n);
    if (n >= 1) return n;
  }
  const double usable = quota > 0 ? std::min<double>(num_cpus, quota) : num_cpus;
  return std::max(1, static_cast<int>(std::floor(usable / std::max(1, sharing_ranks))));
}

CpuShare take_cpu_share(const RankFacts& facts, const Environment& environment) {
  CpuShare share;
  cpu_set_t own, parent;
  CPU_ZERO(&own);
  CPU_ZERO(&parent);
  if (::sched_getaffinity(0, sizeof own, &own) != 0) CPU_SET(0, &own);
  if (::sched_getaffinity(::getppid(), sizeof parent, &parent) != 0) parent = own;
  const bool bound = environment("OMPI_MCA_orte_bound_at_launch") != nullptr && CPU_COUNT(&own) < CPU_COUNT(&parent);
  const bool asked_for = environment("OMPI_MCA_hwloc_base_binding_policy") != nullptr ||
                         environment("OMPI_MCA_rmaps_base_mapping_policy") != nullptr;
  int sharing = facts.local_size;
  if (bound && !asked_for && ::sched_setaffinity(0, sizeof parent, &parent) == 0) {
    share.note = fmt::format(
        "mpirun bound this rank to CPU {} by default; it uses CPUs {} now (--bind-to none says so from the start)",
        cpu_list(own), cpu_list(parent));
    own = parent;
  } else if (bound) {
    // Its own part of the host: the other ranks have theirs.
    sharing = std::max(1, facts.local_size * CPU_COUNT(&own) / std::max(1, CPU_COUNT(&parent)));
    share.note = fmt::format("bound to CPU {} as asked of mpirun", cpu_list(own));
  }
  share.num_cpus = std::max(1, CPU_COUNT(&own));
  share.quota = cgroup_cpu_quota("");
  const char* omp = environment("OMP_NUM_THREADS");
  share.num_threads = threads_per_rank(share.num_cpus, share.quota, sharing, omp);
  if (!share.note.empty()) share.note += "\n";
  share.note += fmt::format("{} thread{} a rank: {} CPU{}{}, {} rank{} on this host{}", share.num_threads,
                            share.num_threads == 1 ? "" : "s", share.num_cpus, share.num_cpus == 1 ? "" : "s",
                            share.quota > 0 ? fmt::format(", a quota of {:.2f}", share.quota) : "", facts.local_size,
                            facts.local_size == 1 ? "" : "s", omp != nullptr ? "; OMP_NUM_THREADS says so" : "");
  return share;
}

double cgroup_cpu_quota(const std::string& root) {
  const Result<std::string> groups = FileSystem::posix().read_file(root + "/proc/self/cgroup");
  if (!groups.ok()) return 0;
  std::istringstream lines(*groups);
  double tightest = 0;
  for (std::string line; std::getline(lines, line);) {  // "0::/path", or "4:cpu,cpuacct:/path"
    const size_t controllers = line.find(':') + 1, path = line.find(':', controllers) + 1;
    if (controllers == 0 || path == 0) continue;
    const bool version_2 = path == controllers + 1;
    const std::string names = "," + line.substr(controllers, path - controllers - 1) + ",";
    if (!version_2 && names.find(",cpu,") == std::string::npos) continue;
    const double quota =
        tightest_quota(root + (version_2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/cpu"), line.substr(path), version_2);
    if (quota > 0 && (tightest == 0 || quota < tightest)) tightest = quota;
  }
  return tightest;
}

bool limit_spinning(const Environment& environment) {
  if (environment("OMP_WAIT_POLICY") != nullptr || environment("GOMP_SPINCOUNT") != nullptr) return false;
  return ::setenv("GOMP_SPINCOUNT", "10000", /*overwrite=*/1) == 0;
}

void make_thread_urgent() {
  if (!set_attributes(kUrgentNice, kUrgentSliceNs)) set_attributes(0, kUrgentSliceNs);
}

void make_thread_yielding() { ::setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)), kYieldingNice); }

}  // namespace kintsugi::launch
