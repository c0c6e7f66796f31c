// The built-in matrix product, for machines where oneDNN is absent or has no kernel whose rows keep their bits.
// Blocking after Goto & van de Geijn, Anatomy of High-Performance Matrix Multiplication (TOMS 34(3), 2008):
//   a panel   kPanel columns (tile.h) of B, all K rows, packed in fp32; panels are grouped into blocks of kBlockCols
//   a block   kBlockRows rows of A, kDepth of K at a time, packed in fp32
// Each element of C is the bias or C itself and then, added one after the other, one chain of multiply-adds for every
// kDepth of k, so its bits depend on nothing but its row of A and its column of B. Rounding errors grow with the square
// root of a chain's length, and one chain over the 8,192 tokens of a weight's gradient had twice the error.
#include "kernels/cpu/scratch.h"
#include "kernels/cpu/simd/parallel.h"
#include "kernels/cpu/simd/tables.h"
#include "kernels/cpu/simd/tile.h"

namespace kintsugi::kernels::cpu::KTG_ISA {
namespace {

constexpr int64_t kDepth = 256;
constexpr int64_t kBlockRows = 8 * kTileRows;
constexpr int64_t kBlockCols = 512;

float element(const float* p, int64_t i) { return p[i]; }
float element(const Bf16* p, int64_t i) { return __builtin_bit_cast(float, static_cast<uint32_t>(p[i].bits) << 16); }

// Columns [n0, n0 + cols) of B into panel[k][kPanel]; columns beyond `cols` become zero.
template <class T>
void pack_panel(float* panel, const T* b, bool transposed, int64_t n0, int64_t cols, int64_t N, int64_t K) {
  if (!transposed) {
    for (int64_t k = 0; k < K; ++k) {
      float* line = panel + k * kPanel;
      for (int64_t j = 0; j < kPanel; j += kLanes) Vec::zero().store(line + j);
      const T* row = b + k * N + n0;
      for_vectors(cols, [&](int64_t j, auto lanes) { load(row + j, lanes).store(line + j); });
    }
    return;
  }
  constexpr int64_t kStep = 16;  // k at a time: both the rows read and the panel lines written stay in cache
  for (int64_t k0 = 0; k0 < K; k0 += kStep) {
    const int64_t k1 = min_of(k0 + kStep, K);
    for (int64_t j = 0; j < cols; ++j) {
      const T* column = b + (n0 + j) * K;
      for (int64_t k = k0; k < k1; ++k) panel[k * kPanel + j] = element(column, k);
    }
    for (int64_t j = cols; j < kPanel; ++j) {
      for (int64_t k = k0; k < k1; ++k) panel[k * kPanel + j] = 0.0f;
    }
  }
}

// Rows [m0, m0 + rows) of A, depth [k0, k0 + depth): tile after tile of kTileRows * kDepth floats, each [row][kDepth],
// or [k][kTileRows] when A lies transposed.
template <class T>
void pack_rows(float* block, const T* a, bool transposed, int64_t m0, int64_t rows, int64_t k0, int64_t depth,
               int64_t M, int64_t K) {
  for (int64_t r = 0; r < rows; r += kTileRows) {
    float* out = block + r * kDepth;
    const int64_t count = min_of(kTileRows, rows - r);
    if (transposed) {
      for (int64_t k = 0; k < depth; ++k) {
        load(a + (k0 + k) * M + m0 + r, PartVector{count}).store(out + k * kTileRows, count);
      }
    } else {
      for (int64_t i = 0; i < count; ++i) {
        const T* row = a + (m0 + r + i) * K + k0;
        for_vectors(depth, [&](int64_t k, auto lanes) { store(out + i * kDepth + k, load(row + k, lanes), lanes); });
      }
    }
  }
}

// Multiplies one packed block of rows by one packed panel (depth [k0, k0 + depth)) into c.
void multiply(float* c, int64_t ldc, const float* block, const float* panel, bool transposed, int64_t rows,
              int64_t depth) {
  for (int64_t r = 0; r < rows; r += kTileRows) {
    const int64_t count = min_of(kTileRows, rows - r);
    if (transposed) {
      tile_rows<kTileRows, 1, kTileRows>(count, c + r * ldc, ldc, block + r * kDepth, 0, panel, kPanel, kPanel, depth,
                                         Start::kAddToC);
    } else {
      tile_rows<kTileRows, kDepth, 1>(count, c + r * ldc, ldc, block + r * kDepth, 0, panel, kPanel, kPanel, depth,
                                      Start::kAddToC);
    }
  }
}

// What the chains are added to: bias, C, both or zero.
template <class To>
void begin_rows(float* sums, int64_t ld, const To* c, const float* bias, int64_t rows, int64_t cols, int64_t N,
                bool accumulate) {
  for (int64_t r = 0; r < rows; ++r) {
    for_vectors(cols, [&](int64_t j, auto lanes) {
      Vec x = bias != nullptr ? load(bias + j, lanes) : Vec::zero();
      if (accumulate) x = x + load(c + r * N + j, lanes);
      x.store(sums + r * ld + j);
    });
  }
}

template <class To>
void end_rows(To* c, const float* sums, int64_t ld, int64_t rows, int64_t cols, int64_t N) {
  for (int64_t r = 0; r < rows; ++r) {
    for_vectors(cols, [&](int64_t j, auto lanes) { store(c + r * N + j, load(sums + r * ld + j, lanes), lanes); });
  }
}

// Rows [m0, m0 + rows) times the panels of columns [n0, n0 + cols), whose packed form begins at `panels`.
template <class T, class To>
KernelError block_times_panels(const Matmul& mm, const float* panels, int64_t m0, int64_t rows, int64_t n0,
                               int64_t cols) {
  const int64_t ld = round_up(cols, kPanel);
  float* block = static_cast<float*>(thread_scratch(
      ScratchSlot::kWorker, (kBlockRows * kDepth + kBlockRows * ld) * static_cast<int64_t>(sizeof(float))));
  if (block == nullptr) return ENOMEM;
  float* sums = block + kBlockRows * kDepth;
  To* c = static_cast<To*>(mm.c) + m0 * mm.N + n0;
  begin_rows(sums, ld, c, mm.bias != nullptr ? mm.bias + n0 : nullptr, rows, cols, mm.N, mm.accumulate);
  for (int64_t k0 = 0; k0 < mm.K; k0 += kDepth) {
    const int64_t depth = min_of(kDepth, mm.K - k0);
    pack_rows(block, static_cast<const T*>(mm.a), mm.a_transposed, m0, rows, k0, depth, mm.M, mm.K);
    for (int64_t j = 0; j < cols; j += kPanel) {
      multiply(sums + j, ld, block, panels + j * mm.K + k0 * kPanel, mm.a_transposed, rows, depth);
    }
  }
  end_rows(c, sums, ld, rows, cols, mm.N);
  return kKernelOk;
}

template <class T, class To>
KernelError run(const Matmul& mm) {
  float* panels = static_cast<float*>(thread_scratch(
      ScratchSlot::kCaller, mm.K * round_up(min_of(mm.N, kBlockCols), kPanel) * static_cast<int64_t>(sizeof(float))));
  if (panels == nullptr) return ENOMEM;
  KernelError error = kKernelOk;
  for (int64_t n0 = 0; n0 < mm.N; n0 += kBlockCols) {
    const int64_t cols = min_of(kBlockCols, mm.N - n0);
    parallel_ranges(ceil_div(cols, kPanel), cols * mm.K, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) {
        pack_panel(panels + p * kPanel * mm.K, static_cast<const T*>(mm.b), mm.b_transposed, n0 + p * kPanel,
                   min_of(kPanel, cols - p * kPanel), mm.N, mm.K);
      }
    });
    // Few rows: threads share the panels instead.
    const int64_t row_blocks = ceil_div(mm.M, kBlockRows);
    const int64_t group = row_blocks >= 8 ? cols : kPanel * 2, groups = ceil_div(cols, group);
    parallel_ranges(row_blocks * groups, mm.M * cols * mm.K / 16, [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        const int64_t m0 = item / groups * kBlockRows, j0 = item % groups * group;
        const KernelError e = block_times_panels<T, To>(mm, panels + j0 * mm.K, m0, min_of(kBlockRows, mm.M - m0),
                                                        n0 + j0, min_of(group, cols - j0));
        if (e != kKernelOk) __atomic_store_n(&error, e, __ATOMIC_RELAXED);
      }
    });
    if (error != kKernelOk) return error;
  }
  return kKernelOk;
}

constexpr int64_t kSumColumns = 256, kSumRows = 64;

// Columns [begin, begin + count), count <= kSumColumns. Blocks of kSumRows rows are summed first and their sums then:
// the rounding error grows with the square root of the number of rows.
template <class T>
void add_columns(float* sums, const T* x, int64_t rows, int64_t cols, int64_t begin, int64_t count, bool accumulate) {
  float block_sums[kSumColumns], total[kSumColumns];
  for (int64_t c = 0; c < count; ++c) total[c] = accumulate ? sums[begin + c] : 0.0f;
  for (int64_t r0 = 0; r0 < rows; r0 += kSumRows) {
    for (int64_t c = 0; c < count; ++c) block_sums[c] = 0.0f;
    for (int64_t r = r0; r < min_of(r0 + kSumRows, rows); ++r) {
      const T* row = x + r * cols + begin;
      for_vectors(count, [&](int64_t c, auto lanes) {
        store(block_sums + c, load(block_sums + c, lanes) + load(row + c, lanes), lanes);
      });
    }
    for (int64_t c = 0; c < count; ++c) total[c] += block_sums[c];
  }
  for (int64_t c = 0; c < count; ++c) sums[begin + c] = total[c];
}

}  // namespace

KernelError blocked_matmul(const Matmul& mm) {
  return for_storage(
      mm.ab_type, [&]<class T>(T*) { return for_storage(mm.c_type, [&]<class To>(To*) { return run<T, To>(mm); }); });
}

KernelError column_sums(float* sums, const void* x, int64_t rows, int64_t cols, bool accumulate, DType dtype) {
  return for_storage(dtype, [&]<class T>(T*) {
    parallel_ranges(ceil_div(cols, kSumColumns), rows * cols, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t c = i * kSumColumns;
        add_columns(sums, static_cast<const T*>(x), rows, cols, c, min_of(kSumColumns, cols - c), accumulate);
      }
    });
    return kKernelOk;
  });
}

}  // namespace kintsugi::kernels::cpu::KTG_ISA
