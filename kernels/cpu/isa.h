// Which instructions and how many threads the CPU kernels use: for banners, for the backend to set, and for tests that
// run every variant the machine can.
#pragma once

#include <span>

#include "kernels/cpu/matmul.h"
#include "kernels/kernel_table.h"

namespace kintsugi::kernels::cpu {

// "AVX-512", "AVX2" or "baseline": what cpu::kernels() runs on this machine. Chosen once, at the first use.
const char* isa_name();

// Threads that kernels called from the calling thread use; the setting is the calling thread's own.
// 1 without OpenMP. Results do not depend on it.
int num_threads();
void set_num_threads(int count);

// The kernels compiled for one instruction set.
struct IsaVariant {
  const char* name;
  bool usable;                  // by this machine
  const KernelTable* families;  // gemm is null: cpu::gemm() is common to all, and calls these two:
  KernelError (*blocked_matmul)(const Matmul& matmul);
  KernelError (*column_sums)(float* sums, const void* x, int64_t rows, int64_t cols, bool accumulate, DType dtype);
};

// All variants of this build, best first; the last, "baseline", is usable everywhere.
std::span<const IsaVariant> isa_variants();
// The best usable one.
const IsaVariant& best_isa();

}  // namespace kintsugi::kernels::cpu
