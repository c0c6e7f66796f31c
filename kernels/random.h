// Random numbers drawn where they are needed. A number is a function of seed, purpose and index alone, and has the bits
// that every other implementation gives it (runtime/model/init_parameters.cc is the host's, and the reference).
#pragma once

#include "kernels/types.h"

namespace kintsugi::kernels {

struct RandomKernels {
  // out[i] = std * (standard normal number begin + i of the seed and purpose), i in [0, count): Philox 4x32-10 words
  // turned by Box and Muller's transform, in fp32 operations that IEEE 754 defines to the bit. Writes 4 count bytes.
  KernelError (*fill_normal)(float* out, uint64_t seed, uint32_t purpose, int64_t begin, int64_t count, float std,
                             StreamHandle stream);
};

namespace cuda {
const RandomKernels& random();
}

}  // namespace kintsugi::kernels
