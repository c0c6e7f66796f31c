// Which instructions and how many threads the CPU kernels use: for banners, and for the backend to set.
#pragma once

namespace kintsugi::kernels::cpu {

// "AVX-512", "AVX2" or "baseline": what cpu::kernels() runs on this machine. Chosen once, at the first use.
const char* isa_name();

// Threads that kernels called from the calling thread use; the setting is the calling thread's own.
// 1 without OpenMP. Results do not depend on it.
int num_threads();
void set_num_threads(int count);

}  // namespace kintsugi::kernels::cpu
