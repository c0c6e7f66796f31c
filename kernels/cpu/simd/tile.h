// The register-tiled matrix product that attention and the built-in GEMM are made of: C (R, W) = [C +] A (R, K) B (K,
// W) in fp32, where a tile of R rows and W = 16 kVecs columns stays in registers while k runs. Each element is one
// chain of multiply-adds over k in ascending order, which begins with C or is added to it: its bits do not depend on
// the tile it lies in.
#pragma once

#include "kernels/cpu/simd/vector.h"

namespace kintsugi::kernels::cpu::KTG_ISA {

// The tile that fills the register file: kTileRows * kTileVecs sums, kTileVecs of B and one broadcast of A.
#if defined(__AVX512F__)
inline constexpr int kTileRows = 12, kTileVecs = 2;
#else
inline constexpr int kTileRows = 6, kTileVecs = 1;
#endif

// Columns of a packed operand that a full tile takes at once.
inline constexpr int64_t kPanel = kTileVecs * kLanes;

// kAddToC: the chain starts from zero and its end is added to C, so that errors do not grow with all of K.
enum class Start { kZero, kFromC, kAddToC };

// a: element (r, k) at a[r * row + k * kAK], row = kARow, or `a_row` when kARow is 0.   b: row k at b + k * ldb.
// c: row r at c + r * ldc.
// With kStair, A has kRows - 1 more columns of which row r takes only the first r, and B as many more rows: the
// causal diagonal. What lies beyond a row's own last column is not read, so it may be NaN.
template <int kRows, int kVecs, int64_t kARow, int64_t kAK, bool kStair>
[[gnu::always_inline]] inline void tile(float* c, int64_t ldc, const float* a, int64_t a_row, const float* b,
                                        int64_t ldb, int64_t K, Start start) {
  const int64_t row_stride = kARow > 0 ? kARow : a_row;
  Vec sums[kRows][kVecs];
  if (start == Start::kFromC) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; ++j) sums[r][j] = Vec::load(c + r * ldc + j * kLanes);
    }
  } else {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; ++j) sums[r][j] = Vec::zero();
    }
  }
  for (int64_t k = 0; k < K; ++k) {
    Vec row[kVecs];
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) row[j] = Vec::load(b + j * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vec x = Vec::set(a[r * row_stride]);
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; ++j) sums[r][j] = mul_add(x, row[j], sums[r][j]);
    }
    a += kAK;
    b += ldb;
  }
  if constexpr (kStair) {
#pragma GCC unroll 16
    for (int s = 1; s < kRows; ++s) {
      Vec row[kVecs];
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; ++j) row[j] = Vec::load(b + j * kLanes);
#pragma GCC unroll 16
      for (int r = s; r < kRows; ++r) {
        const Vec x = Vec::set(a[r * row_stride]);
#pragma GCC unroll 4
        for (int j = 0; j < kVecs; ++j) sums[r][j] = mul_add(x, row[j], sums[r][j]);
      }
      a += kAK;
      b += ldb;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < kVecs; ++j) {
      float* const at = c + r * ldc + j * kLanes;
      if (start == Start::kAddToC) sums[r][j] = Vec::load(at) + sums[r][j];
      sums[r][j].store(at);
    }
  }
}

// The same for any number of columns that is a multiple of 16. Not inlined: it is large, and its callers are many.
template <int kRows, int64_t kARow, int64_t kAK, bool kStair>
[[gnu::noinline]] void tile_columns(float* c, int64_t ldc, const float* a, int64_t a_row, const float* b, int64_t ldb,
                                    int64_t cols, int64_t K, Start start) {
  int64_t j = 0;
  if constexpr (kTileVecs > 1) {
    for (; j + kPanel <= cols; j += kPanel) {
      tile<kRows, kTileVecs, kARow, kAK, kStair>(c + j, ldc, a, a_row, b + j, ldb, K, start);
    }
  }
  for (; j < cols; j += kLanes) tile<kRows, 1, kARow, kAK, kStair>(c + j, ldc, a, a_row, b + j, ldb, K, start);
}

// And for `rows` <= kRows, chosen at run time: what is left of a full tile is cut into halves.
template <int kRows, int64_t kARow, int64_t kAK, bool kStair = false>
inline void tile_rows(int64_t rows, float* c, int64_t ldc, const float* a, int64_t a_row, const float* b, int64_t ldb,
                      int64_t cols, int64_t K, Start start) {
  while (rows >= kRows) {
    tile_columns<kRows, kARow, kAK, kStair>(c, ldc, a, a_row, b, ldb, cols, K, start);
    rows -= kRows;
    c += kRows * ldc;
    a += kRows * (kARow > 0 ? kARow : a_row);
    if (kStair) K += kRows;  // the next row sees as many keys more
  }
  if constexpr (kRows > 1) {
    if (rows > 0) tile_rows<kRows / 2, kARow, kAK, kStair>(rows, c, ldc, a, a_row, b, ldb, cols, K, start);
  }
}

}  // namespace kintsugi::kernels::cpu::KTG_ISA
