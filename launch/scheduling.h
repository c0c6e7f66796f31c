// Where and how urgently threads run: which CPUs, how many threads a rank may use, and who goes first.
#pragma once

#include <string>

#include "launch/rank_facts.h"

namespace kintsugi::launch {

// How much of the host a rank may use.
struct CpuShare {
  int num_cpus = 1;     // of the affinity mask
  double quota = 0;     // CPUs' worth of time that the cgroup grants; 0: no limit
  int num_threads = 1;  // for this rank's kernels
  std::string note;     // what was done, and why, for people
};
// The arithmetic: min(mask, quota) over the ranks that share them, at least 1; OMP_NUM_THREADS wins.
int threads_per_rank(int num_cpus, double quota, int sharing_ranks, const char* omp_num_threads);
// CPUs' worth of time that this process's control groups grant, versions 1 and 2, every ancestor; 0: no limit. `root`:
// where /proc and /sys are found, "" for the real ones.
double cgroup_cpu_quota(const std::string& root);
// Open MPI binds the ranks of small jobs to one core each unless told otherwise; the agent undoes that (its worker,
// spares and writer share the cores better than any fixed cut), but leaves a binding that the user asked for alone.
// Changes the calling process's affinity mask: call it before threads are made.
CpuShare take_cpu_share(const RankFacts& facts, const Environment& environment);

// A thread that waits for its team spins for milliseconds by libgomp's own choice. On a machine with other work that is
// the time that the rest of the team waits for: steps of 3 ms took 5 s beside two busy processes on two cores, and take
// 70 ms with some 25 us of spinning. libgomp reads the environment when a program starts, so this is for programs
// executed from now on; true: it changed something. What the user has set stays.
bool limit_spinning(const Environment& environment);

// For threads that sleep nearly always and must run the moment they are woken, however busy the cores are: those that
// pass on news of a death. Asks for what the system grants: a short time slice (no privilege needed, Linux 6.12), and a
// better nice value. The thread's children start with ordinary values.
void make_thread_urgent();

// For a spare's start-up, which runs beside training: the calling thread's nice value, once.
void make_thread_yielding();

}  // namespace kintsugi::launch
