// What the parts of decode_step.cu share. Internal to kernels/cuda.
#pragma once

#include "kernels/cuda/decode_norm.cuh"
#include "kernels/cuda/decode_step.h"
#include "kernels/cuda/paged_decode_item.cuh"
#include "kernels/cuda/words.cuh"

namespace kintsugi::kernels::cuda {

constexpr int kStepWarps = 8;  // that multiply: each 128 of a slot's columns
constexpr int kStepThreads = 32 * kStepWarps;
static_assert(kStepThreads == kNormThreads && kStepWarps == 2 * kDecodeWarps);

// The threads that multiply and attend.
struct MultiplyBarrier {
  __device__ void operator()() const { asm volatile("bar.sync 1, 256;" ::: "memory"); }
};
static_assert(kStepThreads == 256);

// What the blocks hand to each other (words.cuh), two bf16 a word but for `parts`. Every block writes some words of
// qkv, branch and act in each layer and reads all of a branch twice, so nobody is ever more than a layer ahead.
struct StepWords {
  Word *qkv, *o, *act;  // (N, ((H + 2 K) D) / 2), (N, H D / 2), (N, F / 2)
  Word* branch[2];      // (N, C / 2): of attention, of the feed-forward layer
  Word* parts;          // (N, H, splits, D + 2): a split's output, fp32, its maximum and its sum
};

struct StepArguments {
  DecodeStepLayer layers[kMaxStepLayers];
  __nv_bfloat16* logits;
  const __nv_bfloat16 *token_table, *head;
  const float* norm;
  const int32_t* ids;
  uint32_t* launches;  // so many have ended
  StepWords words;
  PagedArguments attention;  // without q, o and the layers' pointers
  int items_x, items_y;      // of attention
  int N, C, F, V, L, QKV, HD;
  float eps;
  int slots, window;
  int item_at, stream_at, x_at, slots_at;  // in shared memory, bytes
  long long* stamps;
  unsigned* report;
};

// What was waited for: in Watchdog's report, beside weight_stream.cuh's.
enum StepWait : unsigned { kWaitBranch = 16, kWaitRow, kWaitQkv, kWaitSums, kWaitParts };

// Where measurements want it (DecodeStepTuning).
__device__ inline void stamp(const StepArguments& a, int operation, int which, long long value) {
  if (a.stamps != nullptr && blockIdx.x == 0 && threadIdx.x == 0) a.stamps[operation * kStepStamps + which] = value;
}

}  // namespace kintsugi::kernels::cuda
