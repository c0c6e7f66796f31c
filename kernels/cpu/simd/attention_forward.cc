// The forward half of kernels/attention.h. Vocabulary: a tile is kRows consecutive query rows of one head; keys are
// taken in blocks of kKeys from position 0. Per block: scores S = (scale Q) K^T, a running maximum m and sum l for each
// row, P = exp(S - m), O = O exp(m_old - m) + P V.
//
// Why a row's bits depend on its position and its keys alone: each score is one chain over d; the maximum has no
// rounding; the sum adds vectors of 16 keys counted from the block's start, where keys beyond the row add exactly 0;
// O is one chain over keys, which for the last keys of a tile stops at each row's own (the stair of tile.h).
#include "kernels/cpu/scratch.h"
#include "kernels/cpu/simd/attention.h"
#include "kernels/cpu/simd/attention_pack.h"
#include "kernels/cpu/simd/math.h"
#include "kernels/cpu/simd/parallel.h"
#include "kernels/cpu/simd/tile.h"

namespace kintsugi::kernels::cpu::KTG_ISA {
namespace {

constexpr int kRows = kTileVecs > 1 ? 8 : 4;
constexpr int64_t kKeys = 256;
static_assert(kKeys % kRows == 0, "a tile's rows must begin in one block of keys");

constexpr float kMinusInfinity = -__builtin_inff();

// One tile's state. `scores` holds S, then P.
struct Tile {
  float* q;  // [D][kRows]: scaled queries, transposed
  float* o;  // [kRows][ld]
  float scores[kRows * kKeys];
  float max[kRows], sum[kRows];
};

// S to P for a row that sees the first `count` keys of this block; returns what earlier sums must be multiplied by.
float softmax_row(float* scores, int64_t count, float* running_max, float* running_sum) {
  Vec max_lanes = Vec::set(kMinusInfinity);
  for_vectors(count, [&](int64_t j, auto lanes) {
    max_lanes = max(keep(Vec::load(scores + j), lanes, kMinusInfinity), max_lanes);
  });
  const float block_max = max_lanes.max();
  const float new_max = block_max > *running_max ? block_max : *running_max;
  const Vec shift = Vec::set(new_max);
  Vec sum = Vec::zero();
  for_vectors(count, [&](int64_t j, auto lanes) {
    const Vec p = keep(exp(Vec::load(scores + j) - shift), lanes, 0.0f);
    p.store(scores + j);
    sum = sum + p;
  });
  float correction[kLanes];
  exp(Vec::set(*running_max - new_max)).store(correction);
  *running_sum = *running_sum * correction[0] + sum.sum();
  *running_max = new_max;
  return correction[0];
}

// Query rows [t0, t0 + rows) against all keys that they see.
void run_tile(Tile& tile, const float* keys, const float* values, int64_t t0, int64_t rows, int64_t D) {
  const int64_t ld = round_up(D, kLanes);
  for (int r = 0; r < kRows; ++r) {
    tile.max[r] = kMinusInfinity;
    tile.sum[r] = 0.0f;
  }
  const int64_t end = t0 + rows;  // one past the last key that any row sees
  for (int64_t j0 = 0; j0 < end; j0 += kKeys) {
    const int64_t width = min_of(kKeys, end - j0);
    multiply_panels<kRows>(rows, tile.scores, kKeys, tile.q, ld, keys, j0, width, D);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t count = min_of(kKeys, t0 + r + 1 - j0);
      const float correction = softmax_row(tile.scores + r * kKeys, count, &tile.max[r], &tile.sum[r]);
      if (j0 == 0) continue;
      for (int64_t d = 0; d < ld; d += kLanes) {
        (Vec::load(tile.o + r * ld + d) * Vec::set(correction)).store(tile.o + r * ld + d);
      }
    }
    const Start start = j0 == 0 ? Start::kZero : Start::kFromC;
    const float* block_values = values + j0 * ld;
    if (end <= j0 + kKeys) {  // the diagonal: row r sees r keys more than row 0
      tile_rows<kRows, kKeys, 1, true>(rows, tile.o, ld, tile.scores, 0, block_values, ld, ld, t0 + 1 - j0, start);
    } else {
      tile_rows<kRows, kKeys, 1>(rows, tile.o, ld, tile.scores, 0, block_values, ld, ld, kKeys, start);
    }
  }
}

// One sequence's packed keys (K panels) and values (K, T, ld).
struct Packed {
  const float* keys;
  const float* values;
  int64_t ld;
};

// The first head's, and the distance to the next one's; null: not wanted.
struct Lse {
  float* data;
  int64_t stride;
};

template <class T>
KernelError run_tiles(T* o, Lse lse, const T* q, const Packed& packed, const AttentionShape& s, int64_t h,
                      int64_t begin, int64_t end) {
  const int64_t g = h / (s.H / s.K);
  const int64_t floats = 2 * kRows * packed.ld;
  float* memory =
      static_cast<float*>(thread_scratch(ScratchSlot::kWorker, floats * static_cast<int64_t>(sizeof(float))));
  if (memory == nullptr) return ENOMEM;
  Tile tile;
  tile.q = memory;
  tile.o = memory + kRows * packed.ld;
  for (int64_t t0 = begin; t0 < end; t0 += kRows) {
    const int64_t rows = min_of(kRows, end - t0);
    if (h + 1 < s.H) prefetch_rows(q + t0 * s.q_stride + (h + 1) * s.D, rows, s.D, s.q_stride);
    pack_rows(tile.q, q + t0 * s.q_stride + h * s.D, rows, s.D, s.q_stride, s.scale);
    run_tile(tile, packed.keys + g * panel_floats(s.T, s.D), packed.values + g * s.T * packed.ld, t0, rows, s.D);
    for (int64_t r = 0; r < rows; ++r) {
      const Vec inverse = Vec::set(1.0f / tile.sum[r]);
      T* out = o + (t0 + r) * s.o_stride + h * s.D;
      for_vectors(
          s.D, [&](int64_t d, auto lanes) { store(out + d, Vec::load(tile.o + r * packed.ld + d) * inverse, lanes); });
      if (lse.data != nullptr) lse.data[h * lse.stride + t0 + r] = tile.max[r] + __builtin_logf(tile.sum[r]);
    }
  }
  return kKernelOk;
}

template <class T>
KernelError forward_sequence(T* o, Lse lse, const T* q, const T* k, const T* v, const AttentionShape& s,
                             float* memory) {
  const int64_t ld = round_up(s.D, kLanes), keys_floats = panel_floats(s.T, s.D);
  float* keys = memory;
  float* values = keys + s.K * keys_floats;
  // Heads inside tokens: memory is read in the order in which it lies.
  parallel_ranges(ceil_div(s.T, kLanes), s.K * s.T * s.D, [&](int64_t begin, int64_t end) {
    for (int64_t t0 = begin * kLanes; t0 < min_of(end * kLanes, s.T); t0 += kLanes) {
      for (int64_t g = 0; g < s.K; ++g) {
        pack_panel_block(keys + g * keys_floats, k + g * s.D, t0, s.T, s.D, s.k_stride);
        pack_rows(values + (g * s.T + t0) * ld, v + t0 * s.v_stride + g * s.D, min_of(kLanes, s.T - t0), s.D,
                  s.v_stride, 1.0f);
      }
    }
  });
  // Chunks of rows, early ones (few keys) and late ones (many) in turn, so that equal ranges are equal work.
  constexpr int64_t kChunk = 64;
  static_assert(kChunk % kRows == 0);
  const int64_t chunks = ceil_div(s.T, kChunk);
  const Packed packed{keys, values, ld};
  KernelError error = kKernelOk;
  parallel_ranges(s.H * chunks, s.H * s.T * s.T * s.D / 16, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t h = item / chunks, i = item % chunks, chunk = i % 2 == 0 ? i / 2 : chunks - 1 - i / 2;
      const KernelError e = run_tiles(o, lse, q, packed, s, h, chunk * kChunk, min_of((chunk + 1) * kChunk, s.T));
      if (e != kKernelOk) __atomic_store_n(&error, e, __ATOMIC_RELAXED);
    }
  });
  return error;
}

}  // namespace

KernelError attention_forward(void* o, float* lse, const void* q, const void* k, const void* v, const AttentionShape& s,
                              DType dtype, StreamHandle) {
  const int64_t ld = round_up(s.D, kLanes);
  const int64_t floats = s.K * (panel_floats(s.T, s.D) + s.T * ld);
  float* memory =
      static_cast<float*>(thread_scratch(ScratchSlot::kCaller, floats * static_cast<int64_t>(sizeof(float))));
  if (memory == nullptr) return ENOMEM;
  return for_storage(dtype, [&]<class T>(T*) {
    KernelError error = kKernelOk;
    for (int64_t b = 0; b < s.B; ++b) {
      for_documents(s, b, [&](int64_t first, const AttentionShape& document) {
        if (error != kKernelOk) return;
        const int64_t n = b * s.T + first;
        error = forward_sequence(static_cast<T*>(o) + n * s.o_stride,
                                 Lse{lse != nullptr ? lse + b * s.H * s.T + first : nullptr, s.T},
                                 static_cast<const T*>(q) + n * s.q_stride, static_cast<const T*>(k) + n * s.k_stride,
                                 static_cast<const T*>(v) + n * s.v_stride, document, memory);
      });
    }
    return error;
  });
}

}  // namespace kintsugi::kernels::cpu::KTG_ISA
