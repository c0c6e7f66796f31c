// What the parts of decode_step.cu share. Internal to kernels/cuda.
#pragma once

#include "kernels/cuda/decode_norm.cuh"
#include "kernels/cuda/decode_step.h"
#include "kernels/cuda/grid_barrier.cuh"
#include "kernels/cuda/paged_decode_item.cuh"

namespace kintsugi::kernels::cuda {

constexpr int kStepWarps = 8;  // that multiply: each 128 of a slot's columns
constexpr int kStepThreads = 32 * kStepWarps;
static_assert(kStepThreads == kNormThreads && kDecodeWarps <= kStepWarps);

// The threads that multiply; those that attend.
struct MultiplyBarrier {
  __device__ void operator()() const { asm volatile("bar.sync 1, 256;" ::: "memory"); }
};
struct AttendBarrier {
  __device__ void operator()() const { asm volatile("bar.sync 2, 128;" ::: "memory"); }
};
static_assert(kStepThreads == 256 && kDecodeThreads == 128);

struct StepArguments {
  DecodeStepLayer layers[kMaxStepLayers];
  __nv_bfloat16 *logits, *qkv, *o, *branch, *act;
  const __nv_bfloat16 *token_table, *head;
  const float* norm;
  const int32_t* ids;
  unsigned long long* arrived;
  PagedArguments attention;  // without the layers' pointers
  int items_x, items_y;      // of attention
  int N, C, F, V, L, QKV, HD;
  float eps;
  int slots, window;
  int stream_at, x_at, slots_at;  // in shared memory, bytes
  long long* stamps;
  unsigned* report;
};

// Where measurements want it (DecodeStepTuning).
__device__ inline void stamp(const StepArguments& a, int operation, int which, long long value) {
  if (a.stamps != nullptr && blockIdx.x == 0 && threadIdx.x == 0) a.stamps[operation * kStepStamps + which] = value;
}

// Until all blocks have arrived; for the threads that multiply.
__device__ inline void wait_for_blocks(const GridBarrier& grid) {
  if (threadIdx.x == 0) grid.wait();
  MultiplyBarrier{}();
}

}  // namespace kintsugi::kernels::cuda
