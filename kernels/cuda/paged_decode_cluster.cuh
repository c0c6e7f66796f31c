// Splits of decode attention joined inside a thread block cluster. Internal to kernels/cuda.
//
// The blocks of a cluster run at the same time and write each other's shared memory. Each block of a sequence's splits
// sends every other one its part of what that one joins, and all meet at one barrier: nobody waits for a block that has
// not begun, and nothing goes through the second-level cache.
#pragma once

#include "kernels/cuda/paged_decode_item.cuh"

namespace kintsugi::kernels::cuda {

constexpr int kMaxClusterSplits = 8;  // more in a cluster are not portable

// Twice by all threads, in this order: that this block has begun, with no memory behind it to wait for, and that what
// it sends has gone.
__device__ inline void tell_cluster_of_begin() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ inline void arrive_in_cluster() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ inline void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// Address of what another block of the cluster has where this block has `p`.
__device__ inline uint32_t address_in_block(const void* p, int block) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(p))), "r"(block));
  return address;
}
__device__ inline void put_in_block(float4* p, int block, const float4& x) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address_in_block(p, block)), "f"(x.x),
               "f"(x.y), "f"(x.z), "f"(x.w)
               : "memory");
}
__device__ inline void put_in_block(float2* p, int block, float x, float y) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address_in_block(p, block)), "f"(x), "f"(y)
               : "memory");
}

// What the blocks of a cluster send to one of them. A block joins a share of the outputs, four neighbouring ones a
// group: `part`, and `ml`, maximum and sum of the group's query head.
template <int kMaxD>
struct ClusterInbox {
  static constexpr int kGroups = kHeadsPerBlock * kMaxD / 4 + kMaxClusterSplits;  // of all senders
  float4 part[kGroups];
  float2 ml[kGroups];
};

// Joins the warps of the block and the splits of the sequence, these in ascending order. The block has told its cluster
// that it began.
template <class T, int kMaxD>
__device__ void finish_in_cluster(const PagedArguments& a, const DecodeItem& item, const DecodeShared<kMaxD>& shared,
                                  ClusterInbox<kMaxD>& inbox) {
  const int groups = item.num_heads * a.D / 4, share = (groups + a.splits - 1) / a.splits;
  T* const o = static_cast<T*>(a.o) + item.sequence * a.o_stride + static_cast<int64_t>(item.first_head) * a.D;
  __syncthreads();     // what the warps leave is there
  wait_for_cluster();  // every block has begun
  for (int g = static_cast<int>(threadIdx.x); g < groups; g += kDecodeThreads) {
    const JoinedWarps joined(shared, 4 * g / a.D, 4 * g % a.D);
    const int block = g / share, to = item.split * share + g % share;
    put_in_block(&inbox.part[to], block, joined.value);
    put_in_block(&inbox.ml[to], block, joined.max, joined.sum);
  }
  arrive_in_cluster();
  wait_for_cluster();
  const int mine = min(share, groups - item.split * share);  // may be none
  for (int i = static_cast<int>(threadIdx.x); i < mine; i += kDecodeThreads) {
    float max = -INFINITY, sum = 0.0f;
    float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float2 ml[kMaxClusterSplits];
#pragma unroll
    for (int s = 0; s < kMaxClusterSplits; ++s) {
      if (s >= a.splits) continue;
      ml[s] = inbox.ml[s * share + i];
      max = fmaxf(max, ml[s].x);
    }
#pragma unroll
    for (int s = 0; s < kMaxClusterSplits; ++s) {
      if (s >= a.splits) continue;
      const float f = weight(ml[s].x, max);
      sum += f * ml[s].y;
      add_weighed(value, f, inbox.part[s * share + i]);
    }
    put(o + 4 * (item.split * share + i), value, sum);
  }
}

}  // namespace kintsugi::kernels::cuda
