// Token (and learned position) embedding.
//   N tokens   C width   V vocabulary   ids (N) int32 in [0, V)   positions (N) int32
#pragma once

#include "kernels/types.h"

namespace kintsugi::kernels {

struct EmbeddingKernels {
  // y[n,:] = table[ids[n],:] (+ position_table[positions[n],:] unless null). Tables are of T.
  KernelError (*forward)(void* y, const int32_t* ids, const void* table, const int32_t* positions,
                         const void* position_table, int64_t N, int64_t C, DType dtype, StreamHandle stream);
  // dtable[ids[n],:] += dy[n,:] in fp32, no atomics, in an order that depends on the ids alone: ascending n on the CPU
  // and for up to 32 tokens of one id on the device, which adds up more of them in fixed parts. `accumulate` false
  // zeroes the (rows, C) table first. For positions call it with ids = positions and rows = number of positions.
  // workspace: at least backward_workspace_bytes(N, rows); null where that is 0.
  KernelError (*backward)(float* dtable, const void* dy, const int32_t* ids, int64_t N, int64_t C, int64_t rows,
                          bool accumulate, void* workspace, DType dtype, StreamHandle stream);
  int64_t (*backward_workspace_bytes)(int64_t N, int64_t rows);
};

namespace reference { const EmbeddingKernels& embedding(); }
namespace cpu { const EmbeddingKernels& embedding(); }
namespace cuda { const EmbeddingKernels& embedding(); }

}  // namespace kintsugi::kernels
