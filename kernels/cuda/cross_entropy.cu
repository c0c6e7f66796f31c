// kernels/cross_entropy.h on the device. One read of the logits, and one write of the gradient in place:
//   V small           a warp keeps a row in registers
//   forward           a block reads a row once, with a running maximum and sum
//   forward_backward  a cluster of 1, 2, 4 or 8 blocks keeps a row in shared memory, each block its part, small enough
//                     that several blocks of a multiprocessor are in different stages; they exchange maximum and sum
//                     through distributed shared memory
// Rows at odd addresses, and rows beyond what eight blocks hold, are read twice.
#include <cfloat>

#include "kernels/cross_entropy.h"
#include "kernels/cuda/async_copy.cuh"
#include "kernels/cuda/device.cuh"

namespace kintsugi::kernels::cuda {
namespace {

// e^x. Gradients in bf16 cannot show the difference of the faster way, whose argument is rounded once more; those in
// fp32 are trained from until rounding errors have grown a thousandfold.
template <class T>
__device__ inline float exp_of(float x) {
  if constexpr (std::is_same_v<T, float>) return expf(x);
  return fast_exp2(x * kLog2e);
}

// sum = the sum of e^(v - max) over values seen, logits of type T. Starts below every finite number, so that -inf
// logits count as 0.
template <class T>
struct Softmax {
  float max = -FLT_MAX, sum = 0.0f;

  template <int kCount>
  __device__ void add(const float (&v)[kCount]) {
    float most = v[0];
#pragma unroll
    for (int i = 1; i < kCount; ++i) most = fmaxf(most, v[i]);
    if (most > max) {
      sum *= exp_of<T>(max - most);
      max = most;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum += exp_of<T>(v[i] - max);
  }
  __device__ void merge(float other_max, float other_sum) {
    const float most = fmaxf(max, other_max);
    sum = sum * exp_of<T>(max - most) + other_sum * exp_of<T>(other_max - most);
    max = most;
  }
  // Over the warp; every lane gets the same bits.
  __device__ void merge_lanes() {
    float most = max;
    for (int offset = 16; offset > 0; offset /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, offset));
    sum = lanes_sum(sum * exp_of<T>(max - most), 32);
    max = most;
  }
  // Over the block, of whole warps. `scratch` is used once.
  __device__ void merge_block(float2 (&scratch)[32]) {
    merge_lanes();
    const int lane = static_cast<int>(threadIdx.x) & 31, warps = static_cast<int>(blockDim.x) / 32;
    if (lane == 0) scratch[threadIdx.x / 32] = make_float2(max, sum);
    __syncthreads();
    const float2 other = lane < warps ? scratch[lane] : make_float2(-FLT_MAX, 0.0f);
    max = other.x, sum = other.y;
    merge_lanes();
  }
  __device__ float log_sum() const { return max + log2f(sum) * kLn2; }
};

// The gradient of a row from its softmax.
template <class T>
struct RowGradient {
  static constexpr bool kExact = std::is_same_v<T, float>;
  float max;
  float scale;  // 1 / sum where kExact, else log2(sum)
  int32_t target;

  __device__ RowGradient(const Softmax<T>& s, int32_t target_)
      : max(s.max), scale(kExact ? 1.0f / s.sum : log2f(s.sum)), target(target_) {}

  // Of the pack that begins at logit c.
  template <int kVec>
  __device__ Packed<T, kVec> of(const Packed<T, kVec>& logits, int32_t c) const {
    float v[kVec];
    logits.get(v);
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      v[e] = kExact ? expf(v[e] - max) * scale : fast_exp2(fmaf(v[e] - max, kLog2e, -scale));
    }
    if (target >= c && target < c + kVec) {
#pragma unroll
      for (int e = 0; e < kVec; ++e) v[e] -= c + e == target ? 1.0f : 0.0f;
    }
    return Packed<T, kVec>::of(v);
  }
};

template <class T>
struct Loss {
  float* losses;
  T* logits;  // written by the backward kernels only
  const int32_t* targets;
  int64_t N;
  int32_t V;
};

constexpr int kRowThreads = 256;  // 8 rows a block

// A warp takes kRows rows, whose packs are all loading before the first is used.
template <class T, int kVec, int kPacks, int kRows, bool kBackward>
__global__ void __launch_bounds__(kRowThreads) warp_rows_kernel(Loss<T> a) {
  using P = Packed<T, kVec>;
  const int64_t n = (int64_t{blockIdx.x} * (kRowThreads / 32) + threadIdx.x / 32) * kRows;
  if (n >= a.N) return;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) & 31;
  const auto column = [&](int k) { return (lane + 32 * k) * kVec; };
  P packs[kRows][kPacks];
  int32_t targets[kRows];
  float target_logits[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (n + r >= a.N) continue;
    targets[r] = a.targets[n + r];
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (column(k) < a.V) packs[r][k] = P::load(a.logits + (n + r) * a.V + column(k));
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (n + r >= a.N || targets[r] == kIgnoredTarget) continue;
    target_logits[r] = static_cast<float>(a.logits[(n + r) * a.V + targets[r]]);
  }
  __syncwarp();  // all target logits are read before they are overwritten
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (n + r >= a.N) continue;
    T* row = a.logits + (n + r) * a.V;
    const bool ignored = targets[r] == kIgnoredTarget;
    Softmax<T> softmax;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (column(k) >= a.V) continue;
      float v[kVec];
      packs[r][k].get(v);
      softmax.add(v);
    }
    softmax.merge_lanes();
    if (lane == 0) a.losses[n + r] = ignored ? 0.0f : softmax.log_sum() - target_logits[r];
    if constexpr (kBackward) {
      const RowGradient<T> gradient(softmax, targets[r]);
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        if (column(k) < a.V) (ignored ? P::zero() : gradient.of(packs[r][k], column(k))).store(row + column(k));
      }
    }
  }
}

constexpr int kStreamThreads = 512;

// A block a row; the backward pass reads it again.
template <class T, int kVec, bool kBackward>
__global__ void __launch_bounds__(kStreamThreads) stream_rows_kernel(Loss<T> a) {
  using P = Packed<T, kVec>;
  constexpr int kInFlight = 4;
  __shared__ float2 scratch[32];
  const int64_t n = blockIdx.x;
  const int32_t target = a.targets[n], first = static_cast<int32_t>(threadIdx.x) * kVec;
  constexpr int32_t kStep = kStreamThreads * kVec;
  T* row = a.logits + n * a.V;
  if (target == kIgnoredTarget) {
    if (threadIdx.x == 0) a.losses[n] = 0.0f;
    if constexpr (kBackward) {
      for (int32_t c = first; c < a.V; c += kStep) P::zero().store(row + c);
    }
    return;
  }
  const float target_logit = static_cast<float>(row[target]);
  Softmax<T> softmax;
  int32_t c = first;
  for (; c + (kInFlight - 1) * kStep < a.V; c += kInFlight * kStep) {
    P packs[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) packs[i] = P::load(row + c + i * kStep);
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      float v[kVec];
      packs[i].get(v);
      softmax.add(v);
    }
  }
  for (; c < a.V; c += kStep) {
    float v[kVec];
    P::load(row + c).get(v);
    softmax.add(v);
  }
  softmax.merge_block(scratch);
  if (threadIdx.x == 0) a.losses[n] = softmax.log_sum() - target_logit;
  if constexpr (kBackward) {
    const RowGradient<T> gradient(softmax, target);
    for (c = first; c < a.V; c += kStep) gradient.of(P::load(row + c), c).store(row + c);
  }
}

constexpr int kClusterThreads = 256;
constexpr int kMaxCluster = 8;
constexpr int64_t kComfortableBytes = 56 << 10;  // of a row in one block: four blocks a multiprocessor
constexpr int64_t kMostBytes = 200 << 10;

__device__ inline uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ inline uint32_t cluster_size() {
  uint32_t size;
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
  return size;
}
__device__ inline uint32_t rank_in_cluster() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// Stores to the same variable of another block of the cluster.
__device__ inline void store_in_block(float2* p, uint32_t rank, float2 value) {
  asm volatile(
      "{\n .reg .b32 remote;\n"
      " mapa.shared::cluster.u32 remote, %0, %1;\n"
      " st.shared::cluster.v2.f32 [remote], {%2, %3};\n}" ::"r"(shared_address(p)),
      "r"(rank), "f"(value.x), "f"(value.y)
      : "memory");
}

template <class T>
__global__ void __launch_bounds__(kClusterThreads, 4) cluster_rows_kernel(Loss<T> a) {
  constexpr int kVec = kVectorSize<T>;
  using P = Packed<T, kVec>;
  extern __shared__ uint4 kept[];
  __shared__ float2 scratch[32];
  __shared__ float2 parts[kMaxCluster];
  const uint32_t blocks = cluster_size(), rank = rank_in_cluster();
  const int64_t n = blockIdx.x / blocks;
  const int32_t packs = a.V / kVec, target = a.targets[n];
  const int32_t begin = static_cast<int32_t>(int64_t{packs} * rank / blocks);
  const int32_t count = static_cast<int32_t>(int64_t{packs} * (rank + 1) / blocks) - begin;
  T* part = a.logits + n * a.V + int64_t{begin} * kVec;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  if (target == kIgnoredTarget) {  // all blocks of the cluster alike
    if (rank == 0 && thread == 0) a.losses[n] = 0.0f;
    for (int32_t i = thread; i < count; i += kClusterThreads) P::zero().store(part + i * kVec);
    return;
  }
  for (int32_t i = thread; i < count; i += kClusterThreads) copy_to_shared(kept + i, part + i * kVec);
  if (blocks > 1) cluster_arrive();  // the others' shared memory exists once they have arrived
  const float target_logit = static_cast<float>(a.logits[n * a.V + target]);
  wait_for_all_copies();  // a thread reads what it copied itself: no barrier
  Softmax<T> softmax;
  for (int32_t i = thread; i < count; i += kClusterThreads) {
    float v[kVec];
    P{kept[i]}.get(v);
    softmax.add(v);
  }
  softmax.merge_block(scratch);
  if (blocks > 1) {
    cluster_wait();
    if (thread < static_cast<int32_t>(blocks)) {
      store_in_block(&parts[rank], threadIdx.x, make_float2(softmax.max, softmax.sum));
    }
    cluster_arrive();
    cluster_wait();
    softmax = Softmax<T>{parts[0].x, parts[0].y};
    for (uint32_t b = 1; b < blocks; ++b) softmax.merge(parts[b].x, parts[b].y);
  }
  if (rank == 0 && thread == 0) a.losses[n] = softmax.log_sum() - target_logit;
  const RowGradient<T> gradient(softmax, target);
  for (int32_t i = thread; i < count; i += kClusterThreads) {
    gradient.of(P{kept[i]}, (begin + i) * kVec).store(part + i * kVec);
  }
}

template <class T>
KernelError launch_clusters(const Loss<T>& a, StreamHandle stream) {
  static const cudaError_t kAllowed =
      cudaFuncSetAttribute(cluster_rows_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostBytes);
  if (kAllowed != cudaSuccess) return kAllowed;
  const int64_t packs = a.V / kVectorSize<T>;
  int64_t blocks = 1;
  while (blocks < kMaxCluster && ceil_div(packs, blocks) * 16 > kComfortableBytes) blocks *= 2;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(blocks);
  attribute.val.clusterDim.y = 1;
  attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(a.N * blocks));
  config.blockDim = dim3(kClusterThreads);
  config.dynamicSmemBytes = static_cast<size_t>(ceil_div(packs, blocks) * 16);
  config.stream = stream_of(stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, cluster_rows_kernel<T>, a);
}

template <bool kBackward, class T>
KernelError launch(const Loss<T>& a, StreamHandle stream) {
  if (a.N <= 0 || a.V <= 0) return kKernelOk;
  constexpr int kVec = kVectorSize<T>;
  const auto blocks = static_cast<uint32_t>(a.N);
  if (a.V % kVec != 0 || !aligned16(a.logits)) {
    stream_rows_kernel<T, 1, kBackward><<<blocks, kStreamThreads, 0, stream_of(stream)>>>(a);
    return launch_error();
  }
  const int32_t packs = a.V / kVec;
  const auto warps = [&](auto num_packs, auto num_rows) {
    const int64_t warp_blocks = ceil_div(a.N, kRowThreads / 32 * num_rows.value);
    warp_rows_kernel<T, kVec, num_packs.value, num_rows.value, kBackward>
        <<<static_cast<uint32_t>(warp_blocks), kRowThreads, 0, stream_of(stream)>>>(a);
    return launch_error();
  };
  if (packs <= 32) return warps(std::integral_constant<int, 1>{}, std::integral_constant<int, 4>{});
  if (packs <= 64) return warps(std::integral_constant<int, 2>{}, std::integral_constant<int, 2>{});
  if (packs <= 128) return warps(std::integral_constant<int, 4>{}, std::integral_constant<int, 1>{});
  if (packs <= 256) return warps(std::integral_constant<int, 8>{}, std::integral_constant<int, 1>{});
  if (kBackward && ceil_div(packs, kMaxCluster) * 16 <= kMostBytes) return launch_clusters(a, stream);
  stream_rows_kernel<T, kVec, kBackward><<<blocks, kStreamThreads, 0, stream_of(stream)>>>(a);
  return launch_error();
}

KernelError forward(float* losses, const void* logits, const int32_t* targets, int64_t N, int64_t V, DType dtype,
                    StreamHandle stream) {
  return for_dtype(dtype, [&]<class T>(T) {
    T* read_only = const_cast<T*>(static_cast<const T*>(logits));
    return launch<false>(Loss<T>{losses, read_only, targets, N, static_cast<int32_t>(V)}, stream);
  });
}

KernelError forward_backward(float* losses, void* logits_in_gradients_out, const int32_t* targets, int64_t N, int64_t V,
                             DType dtype, StreamHandle stream) {
  return for_dtype(dtype, [&]<class T>(T) {
    T* logits = static_cast<T*>(logits_in_gradients_out);
    return launch<true>(Loss<T>{losses, logits, targets, N, static_cast<int32_t>(V)}, stream);
  });
}

}  // namespace

const CrossEntropyKernels& cross_entropy() {
  static constexpr CrossEntropyKernels kTable{forward, forward_backward};
  return kTable;
}

}  // namespace kintsugi::kernels::cuda
