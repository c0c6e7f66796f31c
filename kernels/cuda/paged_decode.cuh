// Decode attention over the paged cache on the device: what paged_attention.cu launches. Internal to kernels/cuda.
//   S sequences   H, K, D heads, key/value heads, head size   P tokens in a kv_block
//
// A block of four warps takes one split of one sequence's positions for up to 8 query heads of one key/value head, so
// the cache is read once for all of them. Positions [0, length) are cut into equal splits of a multiple of 64; how many
// there are at most, and how long a sequence is before it is cut, depends on shapes alone, so a recorded launch serves
// every length. Each split leaves a maximum, a sum and an unnormalised output a query head; the block of the last split
// joins them in a fixed order. So a result has the same bits whatever the other sequences hold.
// Method: Dao et al., Flash-Decoding (2023).
#pragma once

#include "kernels/cuda/async_copy.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/paged_decode_cluster.cuh"
#include "kernels/cuda/paged_decode_item.cuh"
#include "kernels/cuda/paged_decode_rotation.cuh"

namespace kintsugi::kernels::cuda {

// Keys and values of one warp on their way: each lane requests what it will itself use, kStages tiles ahead, into
// pieces of shared memory that nobody else touches. So no barrier is needed, and a stage's layout is the lanes' order.
//   A tile: keys (16 positions, D) as mma_32's rows r and r + 8, values as positions 2c, 2c + 1, 2c + 8, 2c + 9.
template <int kChunks>
class TileQueue {
 public:
  static constexpr int kStages = 3;
  static constexpr int kPieces = 8 * kChunks;  // of a lane in a tile: half keys, half values
  static constexpr int kBlockBytes = kDecodeWarps * kStages * kPieces * 32 * 16;

  // skip: a position whose row is left zero, or -1.
  __device__ TileQueue(uint4* memory, const PagedArguments& a, const DecodeItem& item, int skip)
      : a_(a),
        item_(item),
        skip_(skip),
        lane_(static_cast<int>(threadIdx.x) % 32),
        mine_(memory + static_cast<int>(threadIdx.x) / 32 * (kStages * kPieces * 32) + lane_) {}

  // The kv_block of this lane's position of the tile.
  __device__ int look_up(int tile) const { return kv_block_of(a_, item_, tile + lane_ % kTile); }
  // Requests the tile, which may lie past the end. One call a stage, in turn.
  __device__ void request(int tile, int kv_block) {
    if (tile < item_.end) {
      const int r = lane_ / 4, c = lane_ % 4, position = tile + lane_ % kTile;
      const int64_t row = position < item_.end && position != skip_ ? row_of(a_, item_, position, kv_block) : -1;
      uint4* const to = mine_ + in_ * (kPieces * 32);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int64_t from = __shfl_sync(~0u, row, r + 8 * i);
#pragma unroll
        for (int j = 0; j < 2 * kChunks; ++j) piece(to + (2 * kChunks * i + j) * 32, a_.k_cache, from, 32 * j + 8 * c);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t from = __shfl_sync(~0u, row, 2 * c + i % 2 + 8 * (i / 2));
#pragma unroll
        for (int j = 0; j < kChunks; ++j) {
          piece(to + (4 * kChunks + kChunks * i + j) * 32, a_.v_cache, from, 64 * j + 8 * r);
        }
      }
    }
    end_async_group();
    in_ = in_ + 1 == kStages ? 0 : in_ + 1;
  }

  // Waits for the oldest tile, with kStages requested. Its stage is free then.
  __device__ void take(uint4 (&k)[2][2 * kChunks], uint4 (&v)[4][kChunks]) {
    wait_async_groups<kStages - 1>();
    const uint4* const from = mine_ + out_ * (kPieces * 32);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 2 * kChunks; ++j) k[i][j] = from[(2 * kChunks * i + j) * 32];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < kChunks; ++j) v[i][j] = from[(4 * kChunks + kChunks * i + j) * 32];
    }
    out_ = out_ + 1 == kStages ? 0 : out_ + 1;
  }

 private:
  // Zeros where there is no row, or past its end.
  __device__ void piece(uint4* to, const void* cache, int64_t row, int d) const {
    const bool exists = row >= 0 && d < a_.D;
    copy_async(to, static_cast<const __nv_bfloat16*>(cache) + (exists ? row + d : 0), exists);
  }

  const PagedArguments& a_;
  const DecodeItem& item_;
  const int skip_, lane_;
  uint4* const mine_;
  int in_ = 0, out_ = 0;
};

// Puts the new token's key and value, which this launch itself makes, where a tile's lanes expect them.
template <int kChunks>
__device__ void insert_new_token(uint4 (&k)[2][2 * kChunks], uint4 (&v)[4][kChunks],
                                 const RotatedRows<64 * kChunks>& rows, int in_tile, int D) {
  const int lane = static_cast<int>(threadIdx.x) % 32, r = lane / 4, c = lane % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 2 * kChunks; ++j) {
      const int d = 32 * j + 8 * c;
      if (in_tile == r + 8 * i && d < D) k[i][j] = *reinterpret_cast<const uint4*>(rows.k + d);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      const int d = 64 * j + 8 * r;
      if (in_tile == 2 * c + i % 2 + 8 * (i / 2) && d < D) v[i][j] = *reinterpret_cast<const uint4*>(rows.v + d);
    }
  }
}

// What one warp has seen so far, for up to 8 query heads. bf16 on the tensor cores. Scores: (16 positions, D) keys
// times (D, 8 heads) queries; output: (D, 16 positions) values times (16 positions, 8 heads) weights. Both operands
// come in 16-byte pieces: keys in mma_32's order of k, values with rows d permuted (row r of step (j, i) is d = 64 j +
// 8 r + 2 i, row r + 8 is d + 1).
template <int kChunks>
class AttentionState {
 public:
  // The 16 positions from `tile` on, as far as they lie before `end`. q: row r of the queries, in pieces of 32 columns.
  __device__ void add(const uint4 (&k)[2][2 * kChunks], const uint4 (&v)[4][kChunks], const uint4 (&q)[2 * kChunks],
                      int tile, int end, float scale_log2) {
    const int r = static_cast<int>(threadIdx.x) % 32 / 4;
    float s[4] = {}, correction[2];
#pragma unroll
    for (int j = 0; j < 2 * kChunks; ++j) mma_32(s, k[0][j], k[1][j], q[j]);
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] = tile + r + 8 * (i / 2) < end ? s[i] * scale_log2 : -INFINITY;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float max = fmaxf(s[i], s[i + 2]);
      for (int offset = 4; offset < 32; offset *= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, offset));
      max = fmaxf(max, m_[i]);
      correction[i] = weight(m_[i], max);
      m_[i] = max;
      s[i] = weight(s[i], max);
      s[i + 2] = weight(s[i + 2], max);
      l_[i] = l_[i] * correction[i] + s[i] + s[i + 2];
    }
    const uint32_t p0 = transpose_8x8(pack_bf16(s[0], s[1])), p1 = transpose_8x8(pack_bf16(s[2], s[3]));
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float(&acc)[4] = o_[4 * j + i];
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[e] *= correction[e % 2];
        const uint32_t w0 = reinterpret_cast<const uint32_t*>(&v[0][j])[i],
                       w1 = reinterpret_cast<const uint32_t*>(&v[1][j])[i],
                       w2 = reinterpret_cast<const uint32_t*>(&v[2][j])[i],
                       w3 = reinterpret_cast<const uint32_t*>(&v[3][j])[i];
        mma(acc, __byte_perm(w0, w1, 0x5410), __byte_perm(w0, w1, 0x7632), __byte_perm(w2, w3, 0x5410),
            __byte_perm(w2, w3, 0x7632), p0, p1);
      }
    }
  }

  // To where JoinedWarps expects it, as what warp `warp` has seen.
  __device__ void leave(DecodeShared<64 * kChunks>& shared, int warp) {
    const int r = static_cast<int>(threadIdx.x) % 32 / 4, c = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      for (int offset = 4; offset < 32; offset *= 2) l_[i] += __shfl_xor_sync(~0u, l_[i], offset);
      if (r == 0) {
        shared.m[warp][2 * c + i] = m_[i];
        shared.l[warp][2 * c + i] = l_[i];
      }
    }
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float(&acc)[4] = o_[4 * j + i];
        const int d = 64 * j + 8 * r + 2 * i;
        *reinterpret_cast<float2*>(&shared.o[warp][2 * c][d]) = make_float2(acc[0], acc[2]);
        *reinterpret_cast<float2*>(&shared.o[warp][2 * c + 1][d]) = make_float2(acc[1], acc[3]);
      }
    }
  }

 private:
  float o_[4 * kChunks][4] = {};
  float m_[2] = {-INFINITY, -INFINITY}, l_[2] = {0.0f, 0.0f};  // of heads 2c and 2c + 1; l of this lane's positions
};

// bf16 on the tensor cores.
//   kChunks: D <= 64 kChunks. kRotate: q, k and v of the new token are raw (a.rotation). kCluster: the splits of a
//   sequence are the blocks of a cluster.
template <int kChunks, bool kRotate, bool kCluster>
__global__ void __launch_bounds__(kDecodeThreads) paged_decode_bf16_kernel(const PagedArguments a) {
  using Queue = TileQueue<kChunks>;
  constexpr int kStages = Queue::kStages;
  extern __shared__ uint4 memory[];  // of the queues, then of what the warps leave
  __shared__ RotatedRows<kRotate ? 64 * kChunks : 8> rows;
  allow_next();
  if constexpr (kCluster) tell_cluster_of_begin();
  if constexpr (!kRotate) wait_for_previous();
  const DecodeItem item(a, kCluster, kRotate);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, r = lane / 4,
            c = lane % 4;
  const uint4 zero = make_uint4(0, 0, 0, 0);

  const bool writes = kRotate && writes_new_token(item);
  const int new_token = writes ? item.length - 1 : -1, first = item.begin + warp * kTile;
  Queue queue(memory, a, item, new_token);
  int kv_blocks[kStages];
#pragma unroll
  for (int i = 0; i < kStages; ++i) kv_blocks[i] = queue.look_up(first + i * item.step);
  if (!kCluster && item.split >= item.active) return;
#pragma unroll
  for (int i = 0; i < kStages; ++i) queue.request(first + i * item.step, kv_blocks[i]);

  uint4 q[2 * kChunks];
  const __nv_bfloat16* q_row = static_cast<const __nv_bfloat16*>(a.q) + item.sequence * a.q_stride +
                               static_cast<int64_t>(item.first_head + r) * a.D;
  if constexpr (kRotate) {
    const RotationOfLane<64 * kChunks> rotation(a.rotation, item.position, a.D);
    wait_for_previous();  // for q, k and v of the new token; the rest has been there for long
    rotate_rows(rows, rotation, a, item, writes);
    q_row = rows.q[r];
  }
#pragma unroll
  for (int j = 0; j < 2 * kChunks; ++j) {
    const int d = 32 * j + 8 * c;
    q[j] = r < item.num_heads && d < a.D ? *reinterpret_cast<const uint4*>(q_row + d) : zero;
  }

  AttentionState<kChunks> state;
  for (int tile = first; tile < item.end; tile += item.step) {
    uint4 k[2][2 * kChunks], v[4][kChunks];
    queue.take(k, v);
    const int ahead = tile + kStages * item.step;
    queue.request(ahead, ahead < item.end ? queue.look_up(ahead) : 0);  // a group a tile, and be it empty
    if constexpr (kRotate) {
      if (new_token >= tile && new_token < tile + kTile) insert_new_token(k, v, rows, new_token - tile, a.D);
    }
    state.add(k, v, q, tile, item.end, a.scale_log2);
  }

  auto& shared = *reinterpret_cast<DecodeShared<64 * kChunks>*>(memory);
  __syncthreads();  // nobody's queue is in use
  state.leave(shared, warp);
  if constexpr (kCluster) {
    __shared__ ClusterInbox<64 * kChunks> inbox;
    finish_in_cluster<__nv_bfloat16>(a, item, shared, inbox);
  } else {
    finish<__nv_bfloat16>(a, item, shared);
  }
}

// fp32: for checks rather than speed. A warp takes one position at a time, its lanes D.
//   kPerLane: D <= 32 kPerLane
template <int kPerLane>
__global__ void __launch_bounds__(kDecodeThreads) paged_decode_f32_kernel(const PagedArguments a) {
  __shared__ DecodeShared<32 * kPerLane> shared;
  allow_next();
  wait_for_previous();
  const DecodeItem item(a, false, false);
  if (item.split >= item.active) return;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const auto* const k_cache = static_cast<const float*>(a.k_cache);
  const auto* const v_cache = static_cast<const float*>(a.v_cache);
  const float* const q_rows =
      static_cast<const float*>(a.q) + item.sequence * a.q_stride + static_cast<int64_t>(item.first_head) * a.D;

  float q[kHeadsPerBlock][kPerLane], o[kHeadsPerBlock][kPerLane] = {}, m[kHeadsPerBlock], l[kHeadsPerBlock] = {};
#pragma unroll
  for (int h = 0; h < kHeadsPerBlock; ++h) {
    m[h] = -INFINITY;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int d = lane + 32 * i;
      q[h][i] = h < item.num_heads && d < a.D ? q_rows[static_cast<int64_t>(h) * a.D + d] * a.scale_log2 : 0.0f;
    }
  }
  for (int position = item.begin + warp; position < item.end; position += kDecodeWarps) {
    const int64_t row = row_of(a, item, position, kv_block_of(a, item, position));
    float k[kPerLane], v[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int d = lane + 32 * i;
      k[i] = d < a.D ? k_cache[row + d] : 0.0f;
      v[i] = d < a.D ? v_cache[row + d] : 0.0f;
    }
#pragma unroll
    for (int h = 0; h < kHeadsPerBlock; ++h) {
      float score = 0.0f;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) score += q[h][i] * k[i];
      for (int offset = 16; offset > 0; offset /= 2) score += __shfl_xor_sync(~0u, score, offset);
      const float max = fmaxf(m[h], score), correction = weight(m[h], max), p = weight(score, max);
      m[h] = max;
      l[h] = l[h] * correction + p;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) o[h][i] = o[h][i] * correction + p * v[i];
    }
  }
#pragma unroll
  for (int h = 0; h < kHeadsPerBlock; ++h) {
    if (lane == 0) {
      shared.m[warp][h] = m[h];
      shared.l[warp][h] = l[h];
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) shared.o[warp][h][lane + 32 * i] = o[h][i];
  }
  finish<float>(a, item, shared);
}

}  // namespace kintsugi::kernels::cuda
