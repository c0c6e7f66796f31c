#include "kernels/cpu/isa.h"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace kintsugi::kernels::cpu {

const char* isa_name() { return "baseline"; }

#ifdef _OPENMP
int num_threads() { return omp_get_max_threads(); }
void set_num_threads(int count) { omp_set_num_threads(count); }
#else
int num_threads() { return 1; }
void set_num_threads(int) {}
#endif

}  // namespace kintsugi::kernels::cpu
