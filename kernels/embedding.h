// Token (and learned position) embedding.
//   N tokens   C width   V vocabulary   ids (N) int32 in [0, V)   positions (N) int32
#pragma once

#include "kernels/types.h"

namespace kintsugi::kernels {

// How a backward pass writes the gradient of its table.
struct TableUpdate {
  // used null: add to the table; otherwise write all of it, zeros where no token is.
  bool accumulate = false;
  // Given, (rows): rows that no token names are left as they are. Without `accumulate` the others are overwritten and
  // used[row] becomes whether a token names the row. With it, rows are added to where used[row] is not 0, overwritten
  // where it is, and it stays or becomes non-zero.
  int32_t* used = nullptr;
};

struct EmbeddingKernels {
  // y[n,:] = table[ids[n],:] (+ position_table[positions[n],:] unless null). Tables are of T.
  KernelError (*forward)(void* y, const int32_t* ids, const void* table, const int32_t* positions,
                         const void* position_table, int64_t N, int64_t C, DType dtype, StreamHandle stream);
  // What `backward` with the same ids, N, rows and update needs to know of the ids: which tokens each row has. Not of
  // what dy is; once for each `backward`. index: at least index_bytes(N, rows), 16-byte aligned; null where that is 0.
  KernelError (*index)(void* index, const int32_t* ids, int64_t N, int64_t rows, const TableUpdate& update,
                       StreamHandle stream);
  int64_t (*index_bytes)(int64_t N, int64_t rows);
  // dtable[ids[n],:] += dy[n,:] in fp32, no atomics, in an order that depends on the ids alone: ascending n on the CPU
  // and for up to 32 tokens of one id on the device, which adds up more of them in fixed parts. For positions call it
  // with ids = positions and rows = number of positions.
  // Moves N (2 or 4) C bytes of dy and 4 C of each row written, twice that of each added to.
  KernelError (*backward)(float* dtable, const void* dy, const int32_t* ids, const void* index, int64_t N, int64_t C,
                          int64_t rows, const TableUpdate& update, DType dtype, StreamHandle stream);
};

namespace reference { const EmbeddingKernels& embedding(); }
namespace cpu { const EmbeddingKernels& embedding(); }
namespace cuda { const EmbeddingKernels& embedding(); }

}  // namespace kintsugi::kernels
