// The new token's row in decode attention: norm of its heads, rotation, and its way into the cache. Internal to
// kernels/cuda.
#pragma once

#include "kernels/cuda/paged_decode_item.cuh"

namespace kintsugi::kernels::cuda {

// What a lane needs to turn rows of the new token, beside the rows: loaded before they are complete. It takes the pairs
// of elements d and d + D / 2 with d = lane + 32 i.
template <int kMaxD>
struct RotationOfLane {
  static constexpr int kPairs = kMaxD / 64;
  struct Norm {
    float low[kPairs], high[kPairs];
    bool exists;
  };
  float cosine[kPairs], sine[kPairs];
  Norm q_norm, k_norm;

  __device__ RotationOfLane(const DecodeRotation& how, int position, int D) {
    const int lane = static_cast<int>(threadIdx.x) % 32, half = D / 2;
    const float* const cos_sin = how.cos_sin + static_cast<int64_t>(position) * D;
    q_norm.exists = how.q_norm != nullptr;
    k_norm.exists = how.k_norm != nullptr;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int d = lane + 32 * i;
      if (d >= half) continue;
      cosine[i] = cos_sin[d];
      sine[i] = cos_sin[d + half];
      if (q_norm.exists) q_norm.low[i] = how.q_norm[d], q_norm.high[i] = how.q_norm[d + half];
      if (k_norm.exists) k_norm.low[i] = how.k_norm[d], k_norm.high[i] = how.k_norm[d + half];
    }
  }

  // Turns one head's raw row into what attention reads, by one warp: RMSNorm where there is one, then RoPE, each
  // rounded as when it is a launch of its own.
  __device__ void turn(__nv_bfloat16* out, const __nv_bfloat16* raw, const Norm& norm, float eps, int D) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, half = D / 2;
    float a[kPairs] = {}, b[kPairs] = {};
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int d = lane + 32 * i;
      if (d < half) a[i] = __bfloat162float(raw[d]), b[i] = __bfloat162float(raw[d + half]);
    }
    if (norm.exists) {
      float squares = 0.0f;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) squares = fmaf(a[i], a[i], fmaf(b[i], b[i], squares));
      for (int offset = 16; offset > 0; offset /= 2) squares += __shfl_xor_sync(~0u, squares, offset);
      const float rstd = rsqrtf(squares / static_cast<float>(D) + eps);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        a[i] = __bfloat162float(__float2bfloat16_rn(a[i] * rstd * norm.low[i]));
        b[i] = __bfloat162float(__float2bfloat16_rn(b[i] * rstd * norm.high[i]));
      }
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int d = lane + 32 * i;
      if (d >= half) continue;
      out[d] = __float2bfloat16_rn(fmaf(a[i], cosine[i], -b[i] * sine[i]));
      out[d + half] = __float2bfloat16_rn(fmaf(b[i], cosine[i], a[i] * sine[i]));
    }
  }
};

// The turned rows that a block makes for itself.
template <int kMaxD>
struct RotatedRows {
  alignas(16) __nv_bfloat16 q[kHeadsPerBlock][kMaxD + 8];
  alignas(16) __nv_bfloat16 k[kMaxD], v[kMaxD];  // of the new token, where this block's split holds it
};

// Whether the block writes the new token's key and value to the cache, and so has them in RotatedRows.
__device__ inline bool writes_new_token(const DecodeItem& item) { return item.has_last && item.slot >= 0; }

// Eight elements of the new token's row, to the cache.
__device__ inline void put_piece(void* cache, int64_t at, const uint4& piece) {
  *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(cache) + at) = piece;
}

// The block's query heads, and, where it `writes`, the new token's key and value, to the cache, too. Ends with a
// barrier.
template <int kMaxD>
__device__ void rotate_rows(RotatedRows<kMaxD>& rows, const RotationOfLane<kMaxD>& rotation, const PagedArguments& a,
                            const DecodeItem& item, bool writes) {
  const DecodeRotation& how = a.rotation;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const auto* const raw = static_cast<const __nv_bfloat16*>(a.q) + item.sequence * a.q_stride;
  const __nv_bfloat16 *const q = raw + static_cast<int64_t>(item.first_head) * a.D,
                             *const k = raw + static_cast<int64_t>(a.H + item.kv_head) * a.D,
                             *const v = raw + static_cast<int64_t>(a.H + a.K + item.kv_head) * a.D;
#pragma unroll 1
  for (int h = warp; h < item.num_heads; h += kDecodeWarps) {
    rotation.turn(rows.q[h], q + h * a.D, rotation.q_norm, how.eps, a.D);
  }
  if (writes) {
    const int piece = 8 * lane;  // of 256 elements at most
    const int64_t at = (item.slot * a.K + item.kv_head) * a.D;
    if (warp == kDecodeWarps - 1) {
      rotation.turn(rows.k, k, rotation.k_norm, how.eps, a.D);
      __syncwarp();
      if (piece < a.D) put_piece(const_cast<void*>(a.k_cache), at + piece, *reinterpret_cast<uint4*>(rows.k + piece));
    }
    if (warp == kDecodeWarps - 2 && piece < a.D) {
      const uint4 values = *reinterpret_cast<const uint4*>(v + piece);
      *reinterpret_cast<uint4*>(rows.v + piece) = values;
      put_piece(const_cast<void*>(a.v_cache), at + piece, values);
    }
  }
  __syncthreads();
}

}  // namespace kintsugi::kernels::cuda
