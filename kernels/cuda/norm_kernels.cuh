// What both directions of the norms share: how a row is laid over a group of threads.
//   N rows   C width
// A group of 8, 16 or 32 lanes takes a row of up to kPacks packs a lane; wider rows take a whole block. The row stays
// in registers: one read of each operand.
#pragma once

#include "kernels/cuda/device.cuh"
#include "kernels/norm.h"

namespace kintsugi::kernels::cuda {

// Rows and their places.
struct Rows {
  int64_t N;
  int32_t C;
  int32_t group;         // threads of a row: 8, 16, 32, or the block's
  int64_t inner;         // rows of one outer stride
  int64_t outer_stride;  // elements

  // First element of row n.
  __device__ int64_t offset(int64_t n) const {
    if (inner == 1) return n * outer_stride;
    // 32-bit division where it does: the other costs as much as the row.
    const int64_t outer = n <= UINT32_MAX ? static_cast<uint32_t>(n) / static_cast<uint32_t>(inner) : n / inner;
    return outer * outer_stride + (n - outer * inner) * C;
  }
};

inline Rows rows_of(int64_t N, int64_t C, RowLayout layout, int64_t group) {
  const bool dense = layout.inner == 1 && layout.outer_stride == 0;
  return {N, static_cast<int32_t>(C), static_cast<int32_t>(group), layout.inner, dense ? C : layout.outer_stride};
}

// The smallest of 8, 16 and 32 lanes that hold `packs`.
constexpr int64_t lanes_for(int64_t packs) { return packs <= 8 ? 8 : packs <= 16 ? 16 : 32; }

template <int kValue>
using Constant = std::integral_constant<int, kValue>;

}  // namespace kintsugi::kernels::cuda
