#include "kernels/cpu/isa.h"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace kintsugi::kernels::cpu {

// What simd/tables.h declares, for each KTG_ISA of this build.
#define KTG_DECLARE_VARIANT(isa)                                                                             \
  namespace isa {                                                                                            \
  const KernelTable& families();                                                                             \
  KernelError blocked_matmul(const Matmul& matmul);                                                          \
  KernelError column_sums(float* sums, const void* x, int64_t rows, int64_t cols, bool accumulate, DType t); \
  }
KTG_DECLARE_VARIANT(baseline)
#ifdef KTG_X86_64
KTG_DECLARE_VARIANT(avx2)
KTG_DECLARE_VARIANT(avx512)
#endif
#undef KTG_DECLARE_VARIANT

namespace {

#ifdef KTG_X86_64
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

}  // namespace

std::span<const IsaVariant> isa_variants() {
  static const IsaVariant kVariants[] = {
#ifdef KTG_X86_64
      {"AVX-512", has_avx512(), &avx512::families(), avx512::blocked_matmul, avx512::column_sums},
      {"AVX2", has_avx2(), &avx2::families(), avx2::blocked_matmul, avx2::column_sums},
#endif
      {"baseline", true, &baseline::families(), baseline::blocked_matmul, baseline::column_sums},
  };
  return kVariants;
}

const IsaVariant& best_isa() {
  static const IsaVariant* const best = [] {
    for (const IsaVariant& variant : isa_variants()) {
      if (variant.usable) return &variant;
    }
    return &isa_variants().back();
  }();
  return *best;
}

const char* isa_name() { return best_isa().name; }

#ifdef _OPENMP
int num_threads() { return omp_get_max_threads(); }
void set_num_threads(int count) { omp_set_num_threads(count); }
#else
int num_threads() { return 1; }
void set_num_threads(int) {}
#endif

}  // namespace kintsugi::kernels::cpu
