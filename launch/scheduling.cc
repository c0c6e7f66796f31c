#include "launch/scheduling.h"

#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

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

}  // namespace

void make_thread_urgent() {
  if (!set_attributes(kUrgentNice, kUrgentSliceNs)) set_attributes(0, kUrgentSliceNs);
}

void make_thread_yielding() { ::setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)), kYieldingNice); }

}  // namespace kintsugi::launch
