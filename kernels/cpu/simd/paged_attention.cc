// kernels/paged_attention.h, vectorised. A sequence's positions are cut into splits of kSplit, which threads share;
// each split yields a maximum, a sum and an unnormalised output for every query head, and the splits are joined in
// ascending order. Splits are counted from position 0, so a result depends neither on the other sequences nor on the
// threads.
#include "kernels/paged_attention.h"

#include "kernels/cpu/scratch.h"
#include "kernels/cpu/simd/math.h"
#include "kernels/cpu/simd/parallel.h"
#include "kernels/cpu/simd/tables.h"

namespace kintsugi::kernels::cpu::KTG_ISA {
namespace {

constexpr int64_t kSplit = 512;
constexpr int64_t kChunk = 64;  // positions whose keys and values stay in the first-level cache for all query heads
constexpr float kMinusInfinity = -__builtin_inff();

// What one split leaves for one query head: kHeader floats (maximum, sum), then ld floats of output.
constexpr int64_t kHeader = kLanes;

template <class T>
struct Cache {
  const T* k;
  const T* v;
  const int32_t* table;  // the sequence's row of block_tables
  int64_t P, row;        // positions in a kv_block; elements between consecutive slots
  int64_t offset(int64_t position) const { return (table[position / P] * P + position % P) * row; }
};

template <class T>
float dot(const float* q, const T* k, int64_t D) {
  Vec sum = Vec::zero();
  for_vectors(D, [&](int64_t d, auto lanes) { sum = mul_add(Vec::load(q + d), load(k + d, lanes), sum); });
  return sum.sum();
}

// o += sum_j p[j] v_j for the chunk's positions.
template <class T>
void add_values(float* o, const float* p, const Cache<T>& cache, const int64_t* offsets, int64_t count, int64_t D) {
  for_vectors(D, [&](int64_t d, auto lanes) {
    Vec sum = Vec::load(o + d);
    for (int64_t j = 0; j < count; ++j) sum = mul_add(Vec::set(p[j]), load(cache.v + offsets[j] + d, lanes), sum);
    sum.store(o + d);
  });
}

// One chunk for one query head: the running softmax of attention_forward.cc.
template <class T>
void chunk(float* state, const float* q, const Cache<T>& cache, const int64_t* offsets, int64_t count, int64_t D) {
  float p[kChunk];
  float* o = state + kHeader;
  for (int64_t j = 0; j < count; ++j) p[j] = dot(q, cache.k + offsets[j], D);
  Vec max_lanes = Vec::set(state[0]);
  for_vectors(count,
              [&](int64_t j, auto lanes) { max_lanes = max(keep(load(p + j, lanes), lanes, state[0]), max_lanes); });
  const float new_max = max_lanes.max();
  Vec sum = Vec::zero();
  for_vectors(count, [&](int64_t j, auto lanes) {
    const Vec e = keep(exp(load(p + j, lanes) - Vec::set(new_max)), lanes, 0.0f);
    store(p + j, e, lanes);
    sum = sum + e;
  });
  const Vec correction = exp(Vec::set(state[0] - new_max));
  float factor[kLanes];
  correction.store(factor);
  for (int64_t d = 0; d < round_up(D, kLanes); d += kLanes) (Vec::load(o + d) * correction).store(o + d);
  add_values(o, p, cache, offsets, count, D);
  state[0] = new_max;
  state[1] = state[1] * factor[0] + sum.sum();
}

// Positions [begin, end) of one sequence for the query heads of one key/value head. queries: (heads, ld), scaled.
template <class T>
void split(float* states, int64_t state_stride, const float* queries, int64_t heads, const Cache<T>& cache,
           int64_t head_offset, int64_t begin, int64_t end, int64_t D) {
  const int64_t ld = round_up(D, kLanes);
  for (int64_t h = 0; h < heads; ++h) {
    float* state = states + h * state_stride;
    for (int64_t i = 0; i < kHeader + ld; ++i) state[i] = 0.0f;
    state[0] = kMinusInfinity;
  }
  int64_t offsets[kChunk];
  for (int64_t u = begin; u < end; u += kChunk) {
    const int64_t count = min_of(kChunk, end - u);
    for (int64_t j = 0; j < count; ++j) offsets[j] = cache.offset(u + j) + head_offset;
    for (int64_t h = 0; h < heads; ++h) chunk(states + h * state_stride, queries + h * ld, cache, offsets, count, D);
  }
}

// Joins `splits` states of one query head into the output row.
template <class T>
void join(T* o, float* states, int64_t splits, int64_t stride, int64_t D) {
  float max_value = kMinusInfinity;
  for (int64_t i = 0; i < splits; ++i) max_value = states[i * stride] > max_value ? states[i * stride] : max_value;
  float total = 0.0f;
  float* first = states + kHeader;
  for (int64_t i = 0; i < splits; ++i) {
    const Vec factor = exp(Vec::set(states[i * stride] - max_value));
    float f[kLanes];
    factor.store(f);
    total += states[i * stride + 1] * f[0];
    const float* part = states + i * stride + kHeader;
    for (int64_t d = 0; d < round_up(D, kLanes); d += kLanes) {
      const Vec scaled = Vec::load(part + d) * factor;
      (i == 0 ? scaled : Vec::load(first + d) + scaled).store(first + d);
    }
  }
  const Vec inverse = Vec::set(splits > 0 ? 1.0f / total : 0.0f);
  for_vectors(D, [&](int64_t d, auto lanes) {
    store(o + d, splits > 0 ? Vec::load(first + d) * inverse : Vec::zero(), lanes);
  });
}

template <class T>
KernelError decode_all(T* o, const T* q, const T* k_cache, const T* v_cache, const int32_t* block_tables,
                       const int32_t* context_lens, const PagedShape& s) {
  const int64_t ld = round_up(s.D, kLanes), group = s.H / s.K, stride = kHeader + ld;
  int64_t longest = 0, positions = 0;
  for (int64_t i = 0; i < s.S; ++i) {
    longest = max_of(longest, context_lens[i]);
    positions += context_lens[i];
  }
  const int64_t splits = ceil_div(longest, kSplit);
  const int64_t floats = s.S * s.H * (ld + splits * stride);
  float* queries =
      static_cast<float*>(thread_scratch(ScratchSlot::kCaller, floats * static_cast<int64_t>(sizeof(float))));
  if (queries == nullptr) return ENOMEM;
  float* states = queries + s.S * s.H * ld;  // (S, H, splits, stride)
  const Vec scale = Vec::set(s.scale);
  for (int64_t row = 0; row < s.S * s.H; ++row) {
    const T* in = q + row / s.H * s.q_stride + row % s.H * s.D;
    for_vectors(s.D, [&](int64_t d, auto lanes) { (load(in + d, lanes) * scale).store(queries + row * ld + d); });
  }
  parallel_ranges(s.S * s.K * splits, positions * s.H * s.D, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t i = item % splits, g = item / splits % s.K, seq = item / splits / s.K;
      if (i * kSplit >= context_lens[seq]) continue;
      const Cache<T> cache{k_cache, v_cache, block_tables + seq * s.block_table_width, s.kv_block_tokens, s.K * s.D};
      const int64_t row = seq * s.H + g * group;
      split(states + (row * splits + i) * stride, splits * stride, queries + row * ld, group, cache, g * s.D,
            i * kSplit, min_of((i + 1) * kSplit, context_lens[seq]), s.D);
    }
  });
  for (int64_t row = 0; row < s.S * s.H; ++row) {
    const int64_t seq = row / s.H;
    join(o + seq * s.o_stride + row % s.H * s.D, states + row * splits * stride, ceil_div(context_lens[seq], kSplit),
         stride, s.D);
  }
  return kKernelOk;
}

KernelError decode(void* o, const void* q, const void* k_cache, const void* v_cache, const int32_t* block_tables,
                   const int32_t* context_lens, const PagedShape& shape, DType dtype, void* /*workspace*/,
                   StreamHandle) {
  return for_storage(dtype, [&]<class T>(T*) {
    return decode_all(static_cast<T*>(o), static_cast<const T*>(q), static_cast<const T*>(k_cache),
                      static_cast<const T*>(v_cache), block_tables, context_lens, shape);
  });
}

// Scratch belongs to the thread (scratch.h).
int64_t decode_workspace_bytes(const PagedShape&, DType) { return 0; }

KernelError write_kv(void* k_cache, void* v_cache, const void* k, const void* v, const int64_t* slots, int64_t N,
                     int64_t K, int64_t D, int64_t k_stride, int64_t v_stride, DType dtype, StreamHandle) {
  return for_storage(dtype, [&]<class T>(T*) {
    parallel_ranges(N, N * K * D, [&](int64_t begin, int64_t end) {
      const size_t bytes = static_cast<size_t>(K * D) * sizeof(T);
      for (int64_t n = begin; n < end; ++n) {
        if (slots[n] < 0) continue;
        const int64_t row = slots[n] * K * D;
        __builtin_memcpy(static_cast<T*>(k_cache) + row, static_cast<const T*>(k) + n * k_stride, bytes);
        __builtin_memcpy(static_cast<T*>(v_cache) + row, static_cast<const T*>(v) + n * v_stride, bytes);
      }
    });
    return kKernelOk;
  });
}

}  // namespace

const PagedAttentionKernels& paged_attention() {
  static constexpr PagedAttentionKernels kTable{decode, decode_workspace_bytes, write_kv};
  return kTable;
}

}  // namespace kintsugi::kernels::cpu::KTG_ISA
