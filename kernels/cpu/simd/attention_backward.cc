// The backward half of kernels/attention.h. P is computed again from the scores and lse:
//   P = exp(scale Q K^T - lse)   dV = P^T dO   dS = P (dO V^T - delta), delta = rowsum(dO O)
//   dQ = scale dS K   dK = scale dS^T Q
// Query rows are taken in blocks of kQueries, keys in blocks of kKeys, tiles of kRows rows inside. One thread does all
// of a key/value head, its query heads in ascending order, so that dK and dV are summed in one order.
#include "kernels/composed_attention.h"
#include "kernels/cpu/scratch.h"
#include "kernels/cpu/simd/attention.h"
#include "kernels/cpu/simd/attention_pack.h"
#include "kernels/cpu/simd/math.h"
#include "kernels/cpu/simd/parallel.h"
#include "kernels/cpu/simd/tables.h"
#include "kernels/cpu/simd/tile.h"

namespace kintsugi::kernels::cpu::KTG_ISA {
namespace {

constexpr int kRows = kTileVecs > 1 ? 8 : 4;
constexpr int64_t kQueries = 32, kKeys = 128;
static_assert(kQueries % kRows == 0 && kKeys % kQueries == 0);

// Packed fp32 operands of one key/value head and of one query head of its group, and the sums.
struct Head {
  float *k, *k_t, *v_t;  // (T, ld); panels
  float *dk, *dv;        // (T, ld)
  float *q, *d_o, *dq;   // (T, ld), q scaled
  float *p, *ds;         // (kQueries, kKeys)
  float* delta;          // (T)
  int64_t ld;
};

int64_t head_floats(const AttentionShape& s) {
  const int64_t ld = round_up(s.D, kLanes);
  return 2 * panel_floats(s.T, s.D) + 6 * s.T * ld + 2 * kQueries * kKeys + round_up(s.T, kLanes);
}

Head carve(float* memory, const AttentionShape& s) {
  Head h;
  h.ld = round_up(s.D, kLanes);
  const auto take = [&](int64_t floats) {
    float* taken = memory;
    memory += floats;
    return taken;
  };
  h.k_t = take(panel_floats(s.T, s.D)), h.v_t = take(panel_floats(s.T, s.D));
  h.k = take(s.T * h.ld), h.dk = take(s.T * h.ld), h.dv = take(s.T * h.ld);
  h.q = take(s.T * h.ld), h.d_o = take(s.T * h.ld), h.dq = take(s.T * h.ld);
  h.p = take(kQueries * kKeys), h.ds = take(kQueries * kKeys);
  h.delta = take(round_up(s.T, kLanes));
  return h;
}

// P and dS of rows [t0 + r0, + kRows) and keys [j0, j0 + width); 0 where the key lies after the row.
void scores_tile(const Head& h, const float* lse, int64_t D, int64_t t, int64_t rows, int64_t j0, int64_t width,
                 float* p, float* ds) {
  const int64_t cols = round_up(width, kLanes);
  multiply_panels<kRows>(rows, p, kKeys, h.q + t * h.ld, h.ld, h.k_t, j0, width, D);
  multiply_panels<kRows>(rows, ds, kKeys, h.d_o + t * h.ld, h.ld, h.v_t, j0, width, D);
  for (int64_t r = 0; r < rows; ++r) {
    const Vec shift = Vec::set(lse[t + r]), delta = Vec::set(h.delta[t + r]);
    const int64_t count = min_of(width, t + r + 1 - j0);
    float* p_row = p + r * kKeys;
    float* ds_row = ds + r * kKeys;
    for_vectors(count, [&](int64_t j, auto lanes) {
      const Vec prob = exp(Vec::load(p_row + j) - shift);
      keep(prob, lanes, 0.0f).store(p_row + j);
      keep(prob * (Vec::load(ds_row + j) - delta), lanes, 0.0f).store(ds_row + j);
    });
    for (int64_t j = round_up(count, kLanes); j < cols; j += kLanes) {
      Vec::zero().store(p_row + j);
      Vec::zero().store(ds_row + j);
    }
  }
}

// Rows [t0, t0 + count) of one query head against keys [j0, j0 + kKeys): adds to dq, dk and dv.
void block(const Head& h, const float* lse, int64_t D, int64_t t0, int64_t count, int64_t j0) {
  const int64_t key_end = min_of(j0 + kKeys, t0 + count);
  for (int64_t r = 0; r < count; r += kRows) {
    const int64_t rows = min_of(kRows, count - r), t = t0 + r;
    const int64_t width = min_of(kKeys, t + rows - j0);
    float* p = h.p + r * kKeys;
    float* ds = h.ds + r * kKeys;
    scores_tile(h, lse, D, t, rows, j0, width, p, ds);
    tile_rows<kRows, kKeys, 1>(rows, h.dq + t * h.ld, h.ld, ds, 0, h.k + j0 * h.ld, h.ld, h.ld, width,
                               j0 == 0 ? Start::kZero : Start::kFromC);
  }
  // Transposed: a tile of keys takes the query rows from its own first key on; earlier rows do not see any of them.
  for (int64_t j = j0; j < key_end; j += kRows) {
    const int64_t rows = min_of(kRows, key_end - j), first = max_of(t0, j), depth = t0 + count - first;
    const int64_t offset = (first - t0) * kKeys + (j - j0);
    tile_rows<kRows, 1, kKeys>(rows, h.dv + j * h.ld, h.ld, h.p + offset, 0, h.d_o + first * h.ld, h.ld, h.ld, depth,
                               Start::kFromC);
    tile_rows<kRows, 1, kKeys>(rows, h.dk + j * h.ld, h.ld, h.ds + offset, 0, h.q + first * h.ld, h.ld, h.ld, depth,
                               Start::kFromC);
  }
}

// Stores packed rows times `scale` as D columns of T.
template <class T>
void unpack_head(T* out, const float* x, int64_t rows, int64_t D, int64_t stride, float scale) {
  const int64_t ld = round_up(D, kLanes);
  const Vec s = Vec::set(scale);
  for (int64_t t = 0; t < rows; ++t) {
    for_vectors(D, [&](int64_t d, auto lanes) { store(out + t * stride + d, Vec::load(x + t * ld + d) * s, lanes); });
  }
}

template <class T>
void row_dots(float* delta, const float* d_o, const T* o, int64_t rows, int64_t D, int64_t stride) {
  const int64_t ld = round_up(D, kLanes);
  for (int64_t t = 0; t < rows; ++t) {
    Vec sum = Vec::zero();
    for_vectors(D, [&](int64_t d, auto lanes) {
      sum = mul_add(Vec::load(d_o + t * ld + d), load(o + t * stride + d, lanes), sum);
    });
    delta[t] = sum.sum();
  }
}

// Rows [t0, t0 + count) of what the next query head, and after the group's last one the next group, will pack.
template <class T>
void prefetch_next(const T* d_o, const T* o, const T* q, const T* k, const T* v, const AttentionShape& s, int64_t h,
                   int64_t t0, int64_t count) {
  const int64_t next = h + 1;
  if (next == s.H) return;
  prefetch_rows(q + t0 * s.q_stride + next * s.D, count, s.D, s.q_stride);
  prefetch_rows(d_o + t0 * s.o_stride + next * s.D, count, s.D, s.o_stride);
  prefetch_rows(o + t0 * s.o_stride + next * s.D, count, s.D, s.o_stride);
  const int64_t group = s.H / s.K;
  if (next % group != 0) return;
  prefetch_rows(k + t0 * s.k_stride + next / group * s.D, count, s.D, s.k_stride);
  prefetch_rows(v + t0 * s.v_stride + next / group * s.D, count, s.D, s.v_stride);
}

// All of one key/value head: pointers at its sequence's first token, lse of head h at lse + h lse_stride.
template <class T>
void backward_group(T* dq, T* dk, T* dv, const T* d_o, const T* o, const float* lse, int64_t lse_stride, const T* q,
                    const T* k, const T* v, const AttentionShape& s, int64_t g, const Head& head) {
  pack_rows(head.k, k + g * s.D, s.T, s.D, s.k_stride, 1.0f);
  for (int64_t t0 = 0; t0 < s.T; t0 += kLanes) {
    pack_panel_block(head.k_t, k + g * s.D, t0, s.T, s.D, s.k_stride);
    pack_panel_block(head.v_t, v + g * s.D, t0, s.T, s.D, s.v_stride);
  }
  const size_t sum_bytes = static_cast<size_t>(s.T * head.ld) * sizeof(float);
  __builtin_memset(head.dk, 0, sum_bytes);
  __builtin_memset(head.dv, 0, sum_bytes);
  const int64_t group = s.H / s.K;
  for (int64_t h = g * group; h < (g + 1) * group; ++h) {
    pack_rows(head.q, q + h * s.D, s.T, s.D, s.q_stride, s.scale);
    pack_rows(head.d_o, d_o + h * s.D, s.T, s.D, s.o_stride, 1.0f);
    row_dots(head.delta, head.d_o, o + h * s.D, s.T, s.D, s.o_stride);
    for (int64_t t0 = 0; t0 < s.T; t0 += kQueries) {
      const int64_t count = min_of(kQueries, s.T - t0);
      prefetch_next(d_o, o, q, k, v, s, h, t0, count);
      prefetch_rows(dq + t0 * s.q_stride + h * s.D, count, s.D, s.q_stride);  // to be written below
      for (int64_t j0 = 0; j0 < t0 + count; j0 += kKeys) block(head, lse + h * lse_stride, s.D, t0, count, j0);
    }
    unpack_head(dq + h * s.D, head.dq, s.T, s.D, s.q_stride, s.scale);
  }
  unpack_head(dk + g * s.D, head.dk, s.T, s.D, s.k_stride, 1.0f);  // the scale came in with q
  unpack_head(dv + g * s.D, head.dv, s.T, s.D, s.v_stride, 1.0f);
}

}  // namespace

KernelError attention_backward(void* dq, void* dk, void* dv, const void* d_o, const void* o, const float* lse,
                               const void* q, const void* k, const void* v, const AttentionShape& s, void*, DType dtype,
                               StreamHandle stream) {
  const KernelError error = for_storage(dtype, [&]<class T>(T*) {
    KernelError failure = kKernelOk;
    parallel_ranges(s.B * s.K, s.B * s.H * s.T * s.T * s.D / 8, [&](int64_t begin, int64_t end) {
      float* memory = static_cast<float*>(
          thread_scratch(ScratchSlot::kWorker, head_floats(s) * static_cast<int64_t>(sizeof(float))));
      if (memory == nullptr) {
        __atomic_store_n(&failure, ENOMEM, __ATOMIC_RELAXED);
        return;
      }
      const Head head = carve(memory, s);
      for (int64_t item = begin; item < end; ++item) {
        const int64_t b = item / s.K;
        for_documents(s, b, [&](int64_t first, const AttentionShape& document) {
          const int64_t n = b * s.T + first, q0 = n * s.q_stride, k0 = n * s.k_stride, v0 = n * s.v_stride,
                        o0 = n * s.o_stride;
          backward_group(static_cast<T*>(dq) + q0, static_cast<T*>(dk) + k0, static_cast<T*>(dv) + v0,
                         static_cast<const T*>(d_o) + o0, static_cast<const T*>(o) + o0, lse + b * s.H * s.T + first,
                         s.T, static_cast<const T*>(q) + q0, static_cast<const T*>(k) + k0,
                         static_cast<const T*>(v) + v0, document, item % s.K, head);
        });
      }
    });
    return failure;
  });
  return error != kKernelOk ? error : turn_back<rope>(dq, dk, s, dtype, stream);
}

// Nothing of the caller's: the packed operands lie in each thread's scratch.
int64_t attention_backward_workspace_bytes(const AttentionShape&, DType) { return 0; }

// Documents are taken one by one.
int64_t no_document_mask(const AttentionShape&, DType) { return 0; }
KernelError write_no_document_mask(void*, const AttentionShape&, DType, StreamHandle) { return kKernelOk; }

KernelError nothing_to_prepare(const AttentionShape&, DType, bool) { return kKernelOk; }
bool nothing_built(const AttentionShape&, DType) { return false; }

const char* attention_library(const AttentionShape&, DType) { return "vectorised for the CPU"; }

const AttentionKernels& attention() {
  static constexpr AttentionKernels kTable{
      attention_forward, attention_backward,     attention_backward_workspace_bytes,
      no_document_mask,  write_no_document_mask, nothing_to_prepare,
      nothing_built,     attention_library};
  return kTable;
}

}  // namespace kintsugi::kernels::cpu::KTG_ISA
