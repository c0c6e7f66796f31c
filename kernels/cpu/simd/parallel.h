// Work shared among OpenMP's threads; the caller alone without OpenMP, inside a parallel region, or for small work.
#pragma once

#include "kernels/cpu/simd/vector.h"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace kintsugi::kernels::cpu::KTG_ISA {

// Below this many elements a thread's start costs more than it saves.
inline constexpr int64_t kSerialElements = 16384;

// Calls f(begin, end) on disjoint ranges that cover [0, count), each on one thread. Where the cuts lie depends on the
// number of threads, so what f computes for an item must not depend on its range. `elements`: the whole work's size.
template <class F>
inline void parallel_ranges(int64_t count, int64_t elements, F f) {
#ifdef _OPENMP
  const int64_t threads = min_of(count, omp_get_max_threads());
  if (threads > 1 && elements >= kSerialElements && !omp_in_parallel()) {
#pragma omp parallel num_threads(static_cast <int>(threads))
    {
      const int64_t team = omp_get_num_threads(), id = omp_get_thread_num();
      const int64_t begin = count * id / team, end = count * (id + 1) / team;
      if (begin < end) f(begin, end);
    }
    return;
  }
#endif
  static_cast<void>(elements);
  if (count > 0) f(int64_t{0}, count);
}

// The same over elements of flat arrays: ranges begin at multiples of 16.
template <class F>
inline void parallel_elements(int64_t count, F f) {
  parallel_ranges(ceil_div(count, kLanes), count,
                  [&](int64_t begin, int64_t end) { f(begin * kLanes, min_of(end * kLanes, count)); });
}

}  // namespace kintsugi::kernels::cpu::KTG_ISA
