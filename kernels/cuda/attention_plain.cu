// Tiles of queries and keys in shared memory, fp32 arithmetic.   B batch   T tokens   H query heads   K key/value heads
// D head size.   A thread block is 16 x 16 threads; thread (ty, tx) owns rows ty R + i of a tile of 16 R rows, and of
// scores the columns tx + 16 j, of head elements the columns tx + 16 j, too.
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cmath>

#include "kernels/cuda/attention_plain.h"

namespace kintsugi::kernels::cuda {
namespace {

constexpr int kSide = 16, kThreads = kSide * kSide;

__device__ float load(const float* x) { return *x; }
__device__ float load(const __nv_bfloat16* x) { return __bfloat162float(*x); }
__device__ void store(float* y, float x) { *y = x; }
__device__ void store(__nv_bfloat16* y, float x) { *y = __float2bfloat16_rn(x); }

// Sizes of one instantiation: head elements padded to DMAX with zeros, tiles of ROWS rows. Rows in shared memory are 4
// floats longer than they need to be, so that 16-byte accesses of consecutive rows meet different banks.
template <int DMAX_, int R_>
struct Tile {
  static constexpr int DMAX = DMAX_, R = R_, ROWS = kSide * R, LD = DMAX + 4, COLUMNS = DMAX / kSide;
  static constexpr int LDS = ROWS + 4;  // of a tile of scores
  static constexpr int kOperandFloats = ROWS * LD, kScoreFloats = ROWS * LDS;
};

// rows [first, first + ROWS) of a head of a (T, stride) array into shared memory; zeros beyond T and D.
template <class Z, class S>
__device__ void load_tile(float* tile, const S* x, int64_t first, int64_t T, int D, int64_t stride) {
  for (int i = threadIdx.x; i < Z::ROWS * Z::DMAX; i += kThreads) {
    const int row = i / Z::DMAX, d = i % Z::DMAX;
    tile[row * Z::LD + d] = first + row < T && d < D ? load(x + (first + row) * stride + d) : 0.0f;
  }
}

// scores[i][j] = sum_d a[ty R + i][d] b[tx + 16 j][d].
template <class Z>
__device__ void multiply_transposed(float (&scores)[Z::R][Z::R], const float* a, const float* b, int ty, int tx) {
#pragma unroll
  for (int i = 0; i < Z::R; ++i) {
#pragma unroll
    for (int j = 0; j < Z::R; ++j) scores[i][j] = 0;
  }
#pragma unroll 4
  for (int d = 0; d < Z::DMAX; d += 4) {
    float4 x[Z::R], y[Z::R];
#pragma unroll
    for (int i = 0; i < Z::R; ++i) x[i] = *reinterpret_cast<const float4*>(a + (ty * Z::R + i) * Z::LD + d);
#pragma unroll
    for (int j = 0; j < Z::R; ++j) y[j] = *reinterpret_cast<const float4*>(b + (tx + kSide * j) * Z::LD + d);
#pragma unroll
    for (int i = 0; i < Z::R; ++i) {
#pragma unroll
      for (int j = 0; j < Z::R; ++j) {
        scores[i][j] += x[i].x * y[j].x;
        scores[i][j] += x[i].y * y[j].y;
        scores[i][j] += x[i].z * y[j].z;
        scores[i][j] += x[i].w * y[j].w;
      }
    }
  }
}

// out[i][c] += sum_s weights[ty R + i][s] x[s][tx + 16 c].
template <class Z>
__device__ void add_product(float (&out)[Z::R][Z::COLUMNS], const float* weights, const float* x, int ty, int tx) {
#pragma unroll 1
  for (int s = 0; s < Z::ROWS; s += 4) {
    float4 w[Z::R];
#pragma unroll
    for (int i = 0; i < Z::R; ++i) w[i] = *reinterpret_cast<const float4*>(weights + (ty * Z::R + i) * Z::LDS + s);
#pragma unroll
    for (int c = 0; c < Z::COLUMNS; ++c) {
      const float* column = x + s * Z::LD + tx + kSide * c;
      const float x0 = column[0], x1 = column[Z::LD], x2 = column[2 * Z::LD], x3 = column[3 * Z::LD];
#pragma unroll
      for (int i = 0; i < Z::R; ++i) {
        out[i][c] += w[i].x * x0;
        out[i][c] += w[i].y * x1;
        out[i][c] += w[i].z * x2;
        out[i][c] += w[i].w * x3;
      }
    }
  }
}

// Over the 16 threads of a row.
__device__ float row_max(float x) {
#pragma unroll
  for (int offset = kSide / 2; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  return x;
}
__device__ float row_sum(float x) {
#pragma unroll
  for (int offset = kSide / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

// The first key that token t of sequence b may see. Documents lie one after the other, so it never falls with t.
__device__ int64_t first_key(const AttentionShape& s, int64_t b, int64_t t) {
  return s.document_starts == nullptr || t >= s.T ? 0 : s.document_starts[b * s.T + t];
}

struct Position {
  int64_t tile, b;
};
// Blocks of one sequence lie side by side, those with the most work first.
__device__ Position position_of(int64_t block, int64_t tiles, bool last_first) {
  const int64_t tile = block % tiles;
  return {last_first ? tiles - 1 - tile : tile, block / tiles};
}

template <class Z, class S>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(S* o, float* lse, const S* q, const S* k, const S* v, AttentionShape s, int64_t tiles) {
  extern __shared__ float4 shared[];
  float* const queries = reinterpret_cast<float*>(shared);
  float* const keys = queries + Z::kOperandFloats;
  float* const values = keys + Z::kOperandFloats;
  float* const weights = values + Z::kOperandFloats;
  const int ty = threadIdx.x / kSide, tx = threadIdx.x % kSide, D = static_cast<int>(s.D);
  const Position at = position_of(blockIdx.x, tiles, true);
  const int64_t h = blockIdx.y, group = h / (s.H / s.K), first = at.tile * Z::ROWS;
  q += at.b * s.T * s.q_stride + h * s.D;
  k += at.b * s.T * s.k_stride + group * s.D;
  v += at.b * s.T * s.v_stride + group * s.D;
  o += at.b * s.T * s.o_stride + h * s.D;

  load_tile<Z>(queries, q, first, s.T, D, s.q_stride);
  float out[Z::R][Z::COLUMNS] = {}, max[Z::R], sum[Z::R];
  int64_t seen_from[Z::R];
#pragma unroll
  for (int i = 0; i < Z::R; ++i) {
    max[i] = -INFINITY, sum[i] = 0;
    seen_from[i] = first_key(s, at.b, first + ty * Z::R + i);
  }
  for (int64_t start = first_key(s, at.b, first) / Z::ROWS * Z::ROWS; start <= first; start += Z::ROWS) {
    __syncthreads();  // the previous tile has been used
    load_tile<Z>(keys, k, start, s.T, D, s.k_stride);
    load_tile<Z>(values, v, start, s.T, D, s.v_stride);
    __syncthreads();
    float scores[Z::R][Z::R];
    multiply_transposed<Z>(scores, queries, keys, ty, tx);
#pragma unroll
    for (int i = 0; i < Z::R; ++i) {
      const int64_t t = first + ty * Z::R + i;
      float largest = max[i];
#pragma unroll
      for (int j = 0; j < Z::R; ++j) {
        const int64_t key = start + tx + kSide * j;
        scores[i][j] = key <= t && key >= seen_from[i] ? scores[i][j] * s.scale : -INFINITY;
        largest = fmaxf(largest, scores[i][j]);
      }
      largest = row_max(largest);
      // A row that has seen no key yet, because its document begins in a later tile, stays as it is.
      const float base = largest == -INFINITY ? 0.0f : largest;
      const float shrink = expf(max[i] - base);
      float part = 0;
#pragma unroll
      for (int j = 0; j < Z::R; ++j) {
        const float p = expf(scores[i][j] - base);
        part += p;
        weights[(ty * Z::R + i) * Z::LDS + tx + kSide * j] = p;
      }
      sum[i] = sum[i] * shrink + row_sum(part);
      max[i] = largest;
#pragma unroll
      for (int c = 0; c < Z::COLUMNS; ++c) out[i][c] *= shrink;
    }
    __syncthreads();
    add_product<Z>(out, weights, values, ty, tx);
  }
#pragma unroll
  for (int i = 0; i < Z::R; ++i) {
    const int64_t t = first + ty * Z::R + i;
    if (t >= s.T) break;
    const float inverse = 1.0f / sum[i];
#pragma unroll
    for (int c = 0; c < Z::COLUMNS; ++c) {
      const int d = tx + kSide * c;
      if (d < D) store(o + t * s.o_stride + d, out[i][c] * inverse);
    }
    if (lse != nullptr && tx == 0) lse[(at.b * s.H + h) * s.T + t] = max[i] + logf(sum[i]);
  }
}

// delta[b,h,t] = sum_d do o: one warp a row.
template <class S>
__global__ void __launch_bounds__(kThreads) delta_kernel(float* delta, const S* d_o, const S* o, AttentionShape s) {
  const int64_t row = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;  // (b T + t) H + h
  if (row >= s.B * s.T * s.H) return;
  const int64_t n = row / s.H, h = row % s.H;
  const int64_t offset = n * s.o_stride + h * s.D;
  float sum = 0;
  for (int64_t d = threadIdx.x % 32; d < s.D; d += 32) sum += load(d_o + offset + d) * load(o + offset + d);
#pragma unroll
  for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, i);
  if (threadIdx.x % 32 == 0) delta[((n / s.T) * s.H + h) * s.T + n % s.T] = sum;
}

// From scores q k and do v of a tile: p = softmax, ds = p (do v - delta) scale.
template <class Z>
__device__ void softmax_gradient(float (&p)[Z::R][Z::R], float (&ds)[Z::R][Z::R], const float* lse, const float* delta,
                                 const AttentionShape& s, int64_t b, int64_t query0, int64_t key0, int ty, int tx) {
#pragma unroll
  for (int i = 0; i < Z::R; ++i) {
    const int64_t t = query0 + ty * Z::R + i, seen_from = first_key(s, b, t);
    const float row_lse = t < s.T ? lse[t] : 0.0f, row_delta = t < s.T ? delta[t] : 0.0f;
#pragma unroll
    for (int j = 0; j < Z::R; ++j) {
      const int64_t key = key0 + tx + kSide * j;
      const bool seen = t < s.T && key <= t && key >= seen_from;
      p[i][j] = seen ? expf(p[i][j] * s.scale - row_lse) : 0.0f;
      ds[i][j] = p[i][j] * (ds[i][j] - row_delta) * s.scale;
    }
  }
}

// One block owns a tile of keys of one key/value head, and takes the group's query heads and query tiles in order.
template <class Z, class S>
__global__ void __launch_bounds__(kThreads)
    backward_keys_kernel(S* dk, S* dv, const S* d_o, const float* lse, const float* delta, const S* q, const S* k,
                         const S* v, AttentionShape s, int64_t tiles) {
  extern __shared__ float4 shared[];
  float* const keys = reinterpret_cast<float*>(shared);
  float* const values = keys + Z::kOperandFloats;
  float* const queries = values + Z::kOperandFloats;
  float* const grads = queries + Z::kOperandFloats;
  float* const p_transposed = grads + Z::kOperandFloats;
  float* const ds_transposed = p_transposed + Z::kScoreFloats;
  const int ty = threadIdx.x / kSide, tx = threadIdx.x % kSide, D = static_cast<int>(s.D);
  const Position at = position_of(blockIdx.x, tiles, false);
  const int64_t group = blockIdx.y, heads = s.H / s.K, first = at.tile * Z::ROWS;
  load_tile<Z>(keys, k + at.b * s.T * s.k_stride + group * s.D, first, s.T, D, s.k_stride);
  load_tile<Z>(values, v + at.b * s.T * s.v_stride + group * s.D, first, s.T, D, s.v_stride);
  float dk_out[Z::R][Z::COLUMNS] = {}, dv_out[Z::R][Z::COLUMNS] = {};
  for (int64_t h = group * heads; h < (group + 1) * heads; ++h) {
    const float* const head_lse = lse + (at.b * s.H + h) * s.T;
    const float* const head_delta = delta + (at.b * s.H + h) * s.T;
    for (int64_t start = first; start < s.T; start += Z::ROWS) {
      if (first_key(s, at.b, start) >= first + Z::ROWS) break;  // later documents only, from here on
      __syncthreads();                                          // the previous tile has been used
      load_tile<Z>(queries, q + at.b * s.T * s.q_stride + h * s.D, start, s.T, D, s.q_stride);
      load_tile<Z>(grads, d_o + at.b * s.T * s.o_stride + h * s.D, start, s.T, D, s.o_stride);
      __syncthreads();
      float p[Z::R][Z::R], ds[Z::R][Z::R];
      multiply_transposed<Z>(p, queries, keys, ty, tx);
      multiply_transposed<Z>(ds, grads, values, ty, tx);
      softmax_gradient<Z>(p, ds, head_lse, head_delta, s, at.b, start, first, ty, tx);
#pragma unroll
      for (int i = 0; i < Z::R; ++i) {
#pragma unroll
        for (int j = 0; j < Z::R; ++j) {
          p_transposed[(tx + kSide * j) * Z::LDS + ty * Z::R + i] = p[i][j];
          ds_transposed[(tx + kSide * j) * Z::LDS + ty * Z::R + i] = ds[i][j];
        }
      }
      __syncthreads();
      add_product<Z>(dv_out, p_transposed, grads, ty, tx);
      add_product<Z>(dk_out, ds_transposed, queries, ty, tx);
    }
  }
#pragma unroll
  for (int i = 0; i < Z::R; ++i) {
    const int64_t t = first + ty * Z::R + i;
    if (t >= s.T) break;
    S* const dk_row = dk + (at.b * s.T + t) * s.k_stride + group * s.D;
    S* const dv_row = dv + (at.b * s.T + t) * s.v_stride + group * s.D;
#pragma unroll
    for (int c = 0; c < Z::COLUMNS; ++c) {
      const int d = tx + kSide * c;
      if (d < D) store(dk_row + d, dk_out[i][c]), store(dv_row + d, dv_out[i][c]);
    }
  }
}

// One block owns a tile of queries of one head.
template <class Z, class S>
__global__ void __launch_bounds__(kThreads)
    backward_queries_kernel(S* dq, const S* d_o, const float* lse, const float* delta, const S* q, const S* k,
                            const S* v, AttentionShape s, int64_t tiles) {
  extern __shared__ float4 shared[];
  float* const queries = reinterpret_cast<float*>(shared);
  float* const grads = queries + Z::kOperandFloats;
  float* const keys = grads + Z::kOperandFloats;
  float* const values = keys + Z::kOperandFloats;
  float* const ds_tile = values + Z::kOperandFloats;
  const int ty = threadIdx.x / kSide, tx = threadIdx.x % kSide, D = static_cast<int>(s.D);
  const Position at = position_of(blockIdx.x, tiles, true);
  const int64_t h = blockIdx.y, group = h / (s.H / s.K), first = at.tile * Z::ROWS;
  load_tile<Z>(queries, q + at.b * s.T * s.q_stride + h * s.D, first, s.T, D, s.q_stride);
  load_tile<Z>(grads, d_o + at.b * s.T * s.o_stride + h * s.D, first, s.T, D, s.o_stride);
  const float* const head_lse = lse + (at.b * s.H + h) * s.T;
  const float* const head_delta = delta + (at.b * s.H + h) * s.T;
  float out[Z::R][Z::COLUMNS] = {};
  for (int64_t start = first_key(s, at.b, first) / Z::ROWS * Z::ROWS; start <= first; start += Z::ROWS) {
    __syncthreads();  // the previous tile has been used
    load_tile<Z>(keys, k + at.b * s.T * s.k_stride + group * s.D, start, s.T, D, s.k_stride);
    load_tile<Z>(values, v + at.b * s.T * s.v_stride + group * s.D, start, s.T, D, s.v_stride);
    __syncthreads();
    float p[Z::R][Z::R], ds[Z::R][Z::R];
    multiply_transposed<Z>(p, queries, keys, ty, tx);
    multiply_transposed<Z>(ds, grads, values, ty, tx);
    softmax_gradient<Z>(p, ds, head_lse, head_delta, s, at.b, first, start, ty, tx);
#pragma unroll
    for (int i = 0; i < Z::R; ++i) {
#pragma unroll
      for (int j = 0; j < Z::R; ++j) ds_tile[(ty * Z::R + i) * Z::LDS + tx + kSide * j] = ds[i][j];
    }
    __syncthreads();
    add_product<Z>(out, ds_tile, keys, ty, tx);
  }
#pragma unroll
  for (int i = 0; i < Z::R; ++i) {
    const int64_t t = first + ty * Z::R + i;
    if (t >= s.T) break;
#pragma unroll
    for (int c = 0; c < Z::COLUMNS; ++c) {
      const int d = tx + kSide * c;
      if (d < D) store(dq + (at.b * s.T + t) * s.q_stride + h * s.D + d, out[i][c]);
    }
  }
}

template <class Kernel>
cudaError_t allow_shared_memory(Kernel* kernel, int bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

// Calls body(Tile{}, storage type{}) for the smallest padded head size that holds D.
template <class Body>
cudaError_t for_tile(int64_t D, DType dtype, Body&& body) {
  const auto with_type = [&]<class Z>(Z tile) {
    return dtype == DType::kBF16 ? body(tile, __nv_bfloat16{}) : body(tile, float{});
  };
  if (D <= 64) return with_type(Tile<64, 4>{});
  if (D <= 96) return with_type(Tile<96, 4>{});
  if (D <= 128) return with_type(Tile<128, 4>{});
  return with_type(Tile<256, 2>{});
}

bool valid(const AttentionShape& s) {
  return s.B >= 0 && s.T >= 0 && s.H >= 1 && s.H < 65536 && s.K >= 1 && s.H % s.K == 0 && s.D >= 1 &&
         s.D <= kPlainAttentionMaxHeadSize;
}

}  // namespace

KernelError plain_attention_forward(void* o, float* lse, const void* q, const void* k, const void* v,
                                    const AttentionShape& s, DType dtype, StreamHandle stream) {
  if (!valid(s)) return cudaErrorInvalidValue;
  if (s.B == 0 || s.T == 0) return kKernelOk;
  return for_tile(s.D, dtype, [&]<class Z, class S>(Z, S) {
    constexpr int kBytes = (3 * Z::kOperandFloats + Z::kScoreFloats) * 4;
    if (const cudaError_t error = allow_shared_memory(forward_kernel<Z, S>, kBytes); error != cudaSuccess) return error;
    const int64_t tiles = (s.T + Z::ROWS - 1) / Z::ROWS;
    const dim3 grid(static_cast<unsigned>(tiles * s.B), static_cast<unsigned>(s.H));
    forward_kernel<Z, S><<<grid, kThreads, kBytes, static_cast<cudaStream_t>(stream)>>>(
        static_cast<S*>(o), lse, static_cast<const S*>(q), static_cast<const S*>(k), static_cast<const S*>(v), s,
        tiles);
    return cudaGetLastError();
  });
}

KernelError plain_attention_backward(void* dq, void* dk, void* dv, const void* d_o, const void* o, const float* lse,
                                     const void* q, const void* k, const void* v, const AttentionShape& s,
                                     void* workspace, DType dtype, StreamHandle stream) {
  if (!valid(s)) return cudaErrorInvalidValue;
  if (s.B == 0 || s.T == 0) return kKernelOk;
  return for_tile(s.D, dtype, [&]<class Z, class S>(Z, S) {
    constexpr int kKeysBytes = (4 * Z::kOperandFloats + 2 * Z::kScoreFloats) * 4;
    constexpr int kQueriesBytes = (4 * Z::kOperandFloats + Z::kScoreFloats) * 4;
    static_assert(kKeysBytes <= 227 * 1024);
    if (const cudaError_t error = allow_shared_memory(backward_keys_kernel<Z, S>, kKeysBytes); error != cudaSuccess) {
      return error;
    }
    if (const cudaError_t error = allow_shared_memory(backward_queries_kernel<Z, S>, kQueriesBytes);
        error != cudaSuccess) {
      return error;
    }
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    float* const delta = static_cast<float*>(workspace);
    const auto* const typed_q = static_cast<const S*>(q);
    const auto* const typed_k = static_cast<const S*>(k);
    const auto* const typed_v = static_cast<const S*>(v);
    const auto* const typed_do = static_cast<const S*>(d_o);
    const int64_t rows = s.B * s.T * s.H;
    delta_kernel<S><<<static_cast<unsigned>((rows + kThreads / 32 - 1) / (kThreads / 32)), kThreads, 0, cuda_stream>>>(
        delta, typed_do, static_cast<const S*>(o), s);
    const int64_t tiles = (s.T + Z::ROWS - 1) / Z::ROWS;
    const unsigned blocks = static_cast<unsigned>(tiles * s.B);
    backward_keys_kernel<Z, S><<<dim3(blocks, static_cast<unsigned>(s.K)), kThreads, kKeysBytes, cuda_stream>>>(
        static_cast<S*>(dk), static_cast<S*>(dv), typed_do, lse, delta, typed_q, typed_k, typed_v, s, tiles);
    backward_queries_kernel<Z, S><<<dim3(blocks, static_cast<unsigned>(s.H)), kThreads, kQueriesBytes, cuda_stream>>>(
        static_cast<S*>(dq), typed_do, lse, delta, typed_q, typed_k, typed_v, s, tiles);
    return cudaGetLastError();
  });
}

int64_t plain_attention_workspace_bytes(const AttentionShape& s) { return s.B * s.H * s.T * 4; }

}  // namespace kintsugi::kernels::cuda
