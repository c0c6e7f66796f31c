// A whole decode step as one launch, for the few tokens where what is between the products costs as much as they do.
// Internal to kernels/cuda.
#pragma once

#include "kernels/decode_layer.h"

namespace kintsugi::kernels::cuda {

inline constexpr int64_t kMaxStepRows = 4;
inline constexpr int64_t kMaxStepLayers = 96;

// For measurements; results do not depend on it.
struct DecodeStepTuning {
  int window = 0;     // slots of weights on their way at a time; 0: as measured best
  int max_slots = 0;  // 0: as many as fit
  // Of kStepStamps numbers an operation (5 a layer, and the head's), clocks of the first block's multiprocessor: the
  // operation's inputs have come; are normalised or turned; product done; of that, clocks spent waiting for weights
  // (attention: parts sent). Null: none.
  long long* stamps = nullptr;
  unsigned* report = nullptr;  // host memory: what was waited for in vain (words.cuh)
};
inline constexpr int kStepStamps = 4;

// DecodeLayerKernels::step_applies, step_workspace_bytes and step.
bool decode_step_applies(const DecodeStep& sizes);
int64_t decode_step_workspace_bytes(const DecodeStep& sizes);
KernelError decode_step(void* logits, const DecodeStep& step, void* workspace, const DecodeStepTuning& tuning,
                        StreamHandle stream);

}  // namespace kintsugi::kernels::cuda
