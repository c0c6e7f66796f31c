// kernels/sampling.h on the device.
//
// Eight blocks, a cluster, share one sequence: thread t of the cluster holds the logits of kPerThread consecutive
// tokens in registers, so each is read once and ids ascend with threads. Every step of the search is then one pass
// over registers and one reduction over the cluster, through distributed shared memory in a fixed order.
//
// Logits are compared by their key, the float's bits mapped so that unsigned order is numeric order (its upper half for
// bf16, whose lower half says nothing). top_k and top_p are both a threshold key and a number of tokens at it, the
// lowest ids; each threshold is found by bisection over the bits of the key.
#include <cooperative_groups.h>
#include <cuda_bf16.h>

#include <climits>
#include <type_traits>

#include "kernels/cuda/launch.cuh"
#include "kernels/philox.h"
#include "kernels/sampling.h"

namespace kintsugi::kernels::cuda {
namespace {

namespace cg = cooperative_groups;

constexpr int kClusterBlocks = 8;
constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kMostPerThread = 64;
constexpr int64_t kMaxVocab = int64_t{kClusterBlocks} * kThreads * kMostPerThread;

// The float's bits in numeric order. Finite numbers have keys from 0x00800000 up; 0 is below all.
__device__ inline uint32_t key_of(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits ^ (bits >> 31 != 0 ? 0xffffffffu : 0x80000000u);
}
__device__ inline float from_key(uint32_t key) {
  return __uint_as_float(key ^ (key >> 31 != 0 ? 0x80000000u : 0xffffffffu));
}

struct Sum {
  template <class X>
  __device__ X operator()(X a, X b) const {
    return a + b;
  }
};
struct Max {
  template <class X>
  __device__ X operator()(X a, X b) const {
    return a > b ? a : b;
  }
};

// What is exchanged: 8 bytes, a double's bits or an integer.
using Word = unsigned long long;
__device__ inline Word word_of(double x) { return static_cast<Word>(__double_as_longlong(x)); }
__device__ inline Word word_of(Word x) { return x; }
template <class X>
__device__ X from_word(Word x) {
  if constexpr (std::is_same_v<X, double>) {
    return __longlong_as_double(static_cast<long long>(x));
  } else {
    return x;
  }
}

// Reductions and prefix sums over the cluster's threads. Every thread calls them, in the same order.
class ClusterReduction {
 public:
  struct Shared {
    Word warp[kWarps];
    Word block[2][kClusterBlocks];  // by turns, so that a slow block can still read the previous result
  };
  // Waits until every block of the cluster runs: until then it has no shared memory.
  __device__ explicit ClusterReduction(Shared& shared) : shared_(shared) { cg::this_cluster().sync(); }

  // X: double or Word. Combined in the order of lanes, warps, blocks by a fixed tree.
  template <class X, class Op>
  __device__ X all(X x, Op op) {
    for (int offset = 16; offset > 0; offset /= 2) x = op(x, __shfl_xor_sync(~0u, x, offset));
    return over_blocks(over_warps(x, op), op);
  }
  // Sum over the threads before this one; *total: over all.
  __device__ double before(double x, double* total) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    double upto = x;
    for (int offset = 1; offset < 32; offset *= 2) {
      const double left = __shfl_up_sync(~0u, upto, offset);
      if (lane >= offset) upto += left;
    }
    if (lane == 31) shared_.warp[warp] = word_of(upto);
    __syncthreads();
    double warps_before = 0, block = 0;
    for (int w = 0; w < kWarps; ++w) {
      if (w == warp) warps_before = block;
      block += from_word<double>(shared_.warp[w]);
    }
    __syncthreads();
    share(word_of(block));
    double blocks_before = 0, sum = 0;
    const auto rank = static_cast<int>(cg::this_cluster().block_rank());
    for (int b = 0; b < kClusterBlocks; ++b) {
      if (b == rank) blocks_before = sum;
      sum += from_word<double>(shared_.block[turn_][b]);
    }
    *total = sum;
    return blocks_before + warps_before + (upto - x);
  }

 private:
  template <class X, class Op>
  __device__ X over_warps(X x, Op op) {
    if (threadIdx.x % 32 == 0) shared_.warp[threadIdx.x / 32] = word_of(x);
    __syncthreads();
    x = from_word<X>(shared_.warp[threadIdx.x % kWarps]);
    for (int offset = kWarps / 2; offset > 0; offset /= 2) x = op(x, __shfl_xor_sync(~0u, x, offset));
    __syncthreads();
    return x;
  }
  // shared_.block[turn_]: every block's x, in every block.
  __device__ void share(Word x) {
    turn_ ^= 1;
    const cg::cluster_group cluster = cg::this_cluster();
    if (threadIdx.x < kClusterBlocks) {
      Word* const there = cluster.map_shared_rank(&shared_.block[turn_][0], threadIdx.x);
      there[cluster.block_rank()] = x;
    }
    cluster.sync();
  }
  template <class X, class Op>
  __device__ X over_blocks(X x, Op op) {
    share(word_of(x));
    x = from_word<X>(shared_.block[turn_][0]);
    for (int b = 1; b < kClusterBlocks; ++b) x = op(x, from_word<X>(shared_.block[turn_][b]));
    return x;
  }

  Shared& shared_;
  int turn_ = 0;
};

__device__ inline float to_f32(float x) { return x; }
__device__ inline float to_f32(__nv_bfloat16 x) { return __bfloat162float(x); }

// The first `count` of a thread's logits, 16 bytes at a time where they lie so; zeros behind them, and for -0.
template <class T, int kPerThread>
__device__ void load_logits(float (&logit)[kPerThread], const T* from, int count) {
  constexpr int kVector = 16 / static_cast<int>(sizeof(T));
  const bool vectors = reinterpret_cast<uintptr_t>(from) % 16 == 0;
#pragma unroll
  for (int v = 0; v < kPerThread; v += kVector) {
    if (vectors && v + kVector <= count) {
      const uint4 bits = *reinterpret_cast<const uint4*>(from + v);
      const T* const x = reinterpret_cast<const T*>(&bits);
#pragma unroll
      for (int e = 0; e < kVector; ++e) logit[v + e] = to_f32(x[e]) + 0.0f;
    } else {
#pragma unroll
      for (int e = 0; e < kVector; ++e) logit[v + e] = v + e < count ? to_f32(from[v + e]) + 0.0f : 0.0f;
    }
  }
}

// One thread's logits and how they are weighed.
template <int kPerThread, int kShift>
struct Tokens {
  float logit[kPerThread];
  int first, count;  // ids first ... first + count - 1
  float max, inverse_temperature;

  __device__ uint32_t key(int e) const { return key_of(logit[e]) >> kShift; }
  __device__ float weight_of(float x) const { return expf((x - max) * inverse_temperature); }
  // Of all logits with this key.
  __device__ double weight_at(uint32_t k) const { return weight_of(from_key(k << kShift | low_bits(k))); }

  // sum of f(e) over this thread's tokens whose key is at least k.
  __device__ double count_from(uint32_t k) const {
    int n = 0;
#pragma unroll
    for (int e = 0; e < kPerThread; ++e) n += e < count && key(e) >= k ? 1 : 0;
    return n;
  }
  __device__ double mass_from(uint32_t k) const {
    double mass = 0;
#pragma unroll
    for (int e = 0; e < kPerThread; ++e) mass += e < count && key(e) >= k ? weight_of(logit[e]) : 0.0f;
    return mass;
  }

 private:
  // The bits that the shift dropped: ones below a negative bf16 number's key, zeros below a positive one's.
  __device__ static uint32_t low_bits(uint32_t k) {
    if (kShift == 0) return 0;
    return k >> (31 - kShift) != 0 ? 0u : (1u << kShift) - 1;
  }
};

// What a filter keeps: keys above `key`, and the `ties` lowest ids at it.
struct Kept {
  uint32_t key = 0;
  double ties = 0;
};

// The largest k with from(k) >= enough, by bisection, given that it holds at `low` and that from() falls with k.
template <class From>
__device__ uint32_t last_key(uint32_t low, uint32_t high, double enough, const From& from) {
  while (low < high) {
    const uint32_t middle = low + (high - low + 1) / 2;
    if (from(middle) >= enough) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

template <class TokensOf>
__device__ Kept keep_top_k(const TokensOf& tokens, uint32_t max_key, double top_k, ClusterReduction& cluster) {
  const auto from = [&](uint32_t k) { return cluster.all(tokens.count_from(k), Sum{}); };
  Kept kept;
  kept.key = last_key(1, max_key, top_k, from);
  kept.ties = top_k - from(kept.key + 1);
  return kept;
}

template <class TokensOf>
__device__ Kept keep_top_p(const TokensOf& tokens, uint32_t max_key, double top_p, const Kept& among,
                           ClusterReduction& cluster) {
  const auto above = [&](uint32_t k) { return cluster.all(tokens.mass_from(k), Sum{}); };  // for k > among.key
  const auto from = [&](uint32_t k) {
    if (k > among.key) return above(k);
    return above(among.key + 1) + (among.ties > 0 ? among.ties * tokens.weight_at(among.key) : 0.0);
  };
  const double enough = top_p * from(among.key);
  Kept kept;
  kept.key = last_key(among.key, max_key, enough, from);
  const double rest = enough - above(kept.key + 1), weight = kept.key == 0 ? 0.0 : tokens.weight_at(kept.key);
  const double there = kept.key == among.key
                           ? among.ties
                           : cluster.all(tokens.count_from(kept.key) - tokens.count_from(kept.key + 1), Sum{});
  kept.ties = weight > 0 ? fmin(fmax(ceil(rest / weight), 1.0), there) : there;
  return kept;
}

template <class T, int kPerThread>
__global__ void __cluster_dims__(kClusterBlocks, 1, 1) __launch_bounds__(kThreads)
    sample_kernel(int32_t* ids, const T* logits, const SequenceSampling* sampling, const int32_t* positions, int V) {
  constexpr int kShift = sizeof(T) == 2 ? 16 : 0;
  __shared__ ClusterReduction::Shared shared;
  wait_for_previous();
  ClusterReduction cluster(shared);
  const int s = static_cast<int>(blockIdx.x) / kClusterBlocks;
  const int thread = static_cast<int>(blockIdx.x) % kClusterBlocks * kThreads + static_cast<int>(threadIdx.x);
  const T* const row = logits + static_cast<int64_t>(s) * V;

  Tokens<kPerThread, kShift> tokens;
  tokens.first = thread * kPerThread;
  tokens.count = max(0, min(kPerThread, V - tokens.first));
  // The largest logit, of equals the lowest id; before all of them what is not finite.
  Word best = 0;
  load_logits(tokens.logit, row + tokens.first, tokens.count);
#pragma unroll
  for (int e = 0; e < kPerThread; ++e) {
    const uint32_t key = isfinite(tokens.logit[e]) ? key_of(tokens.logit[e]) : 0xffffffffu;
    const Word candidate = static_cast<Word>(key) << 32 | (0xffffffffu - static_cast<uint32_t>(tokens.first + e));
    if (e < tokens.count && candidate > best) best = candidate;
  }
  best = cluster.all(best, Max{});
  const auto best_id = static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(best));
  const auto best_key = static_cast<uint32_t>(best >> 32);
  const SequenceSampling how = sampling[s];
  const bool broken = best_key == 0xffffffffu;
  if (broken || how.temperature == 0) {  // the same for the whole cluster
    if (thread == 0) ids[s] = broken ? -1 - best_id : best_id;
    return;
  }

  tokens.max = from_key(best_key);
  tokens.inverse_temperature = static_cast<float>(1.0 / how.temperature);
  const uint32_t max_key = best_key >> kShift;
  Kept kept;
  if (how.top_k > 0 && how.top_k < V) kept = keep_top_k(tokens, max_key, static_cast<double>(how.top_k), cluster);
  if (how.top_p < 1) kept = keep_top_p(tokens, max_key, how.top_p, kept, cluster);

  // Inverse transform over the kept tokens in ascending order of id.
  double total_ties, total;
  double rank = 0;
#pragma unroll
  for (int e = 0; e < kPerThread; ++e) rank += e < tokens.count && tokens.key(e) == kept.key ? 1 : 0;
  rank = cluster.before(rank, &total_ties);
  const auto mass_of = [&](int e, double* ties_before) {
    if (e >= tokens.count || tokens.key(e) < kept.key) return 0.0;
    if (tokens.key(e) == kept.key && (*ties_before)++ >= kept.ties) return 0.0;
    return static_cast<double>(tokens.weight_of(tokens.logit[e]));
  };
  double mass = 0, ties = rank;
#pragma unroll
  for (int e = 0; e < kPerThread; ++e) mass += mass_of(e, &ties);
  double sum = cluster.before(mass, &total);
  const double target =
      total * philox_uniform(how.seed, kSamplingPurpose, how.stream, static_cast<uint64_t>(positions[s] + int64_t{1}));
  Word chosen = 0;  // all ones minus the lowest id whose sum passes the target
  ties = rank;
#pragma unroll
  for (int e = 0; e < kPerThread; ++e) {
    const double m = mass_of(e, &ties);
    sum += m;
    if (m > 0 && sum > target && chosen == 0) chosen = ULLONG_MAX - static_cast<unsigned>(tokens.first + e);
  }
  chosen = cluster.all(chosen, Max{});
  if (thread == 0) ids[s] = chosen == 0 ? best_id : static_cast<int32_t>(ULLONG_MAX - chosen);
}

template <class T>
KernelError launch_sample(int32_t* ids, const void* logits, const SequenceSampling* sampling, const int32_t* positions,
                          int64_t S, int64_t V, StreamHandle stream) {
  const auto launch = [&](void (*kernel)(int32_t*, const T*, const SequenceSampling*, const int32_t*, int)) {
    return launch_overlapped(kernel, dim3(static_cast<unsigned>(S * kClusterBlocks)), dim3(kThreads),
                             static_cast<cudaStream_t>(stream), 0, ids, static_cast<const T*>(logits), sampling,
                             positions, static_cast<int>(V));
  };
  constexpr int64_t kStep = int64_t{kClusterBlocks} * kThreads;
  if (V <= 8 * kStep) return launch(sample_kernel<T, 8>);
  if (V <= 16 * kStep) return launch(sample_kernel<T, 16>);
  if (V <= 40 * kStep) return launch(sample_kernel<T, 40>);
  return launch(sample_kernel<T, kMostPerThread>);
}

KernelError sample(int32_t* ids, const void* logits, const SequenceSampling* sampling, const int32_t* positions,
                   int64_t S, int64_t V, DType dtype, StreamHandle stream) {
  if (S == 0) return kKernelOk;
  if (V < 1 || V > kMaxVocab || S < 0 || S > INT_MAX / kClusterBlocks) return cudaErrorInvalidValue;
  return dtype == DType::kF32 ? launch_sample<float>(ids, logits, sampling, positions, S, V, stream)
                              : launch_sample<__nv_bfloat16>(ids, logits, sampling, positions, S, V, stream);
}

__global__ void advance_kernel(const DecodeInputs in, const int32_t* drawn, int S, int P, int width) {
  allow_next();
  wait_for_previous();
  const int s = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (s >= S) return;
  if (in.context_lens[s] == 0) {
    in.ids[s] = 0;
    in.positions[s] = 0;
    in.slots[s] = -1;
    return;
  }
  const int position = in.positions[s] + 1;
  in.positions[s] = position;
  in.context_lens[s] += 1;
  in.ids[s] = max(drawn[s], 0);
  const int64_t block = in.block_tables[static_cast<int64_t>(s) * width + position / P];
  in.slots[s] = block * P + position % P;
}

KernelError advance(const DecodeInputs& inputs, const int32_t* drawn, int64_t S, int64_t kv_block_tokens,
                    int64_t block_table_width, StreamHandle stream) {
  if (S == 0) return kKernelOk;
  if (S < 0 || S > INT_MAX || kv_block_tokens < 1 || kv_block_tokens > INT_MAX || block_table_width > INT_MAX) {
    return cudaErrorInvalidValue;
  }
  return launch_overlapped(advance_kernel, dim3(static_cast<unsigned>((S + 127) / 128)), dim3(128),
                           static_cast<cudaStream_t>(stream), 0, inputs, drawn, static_cast<int>(S),
                           static_cast<int>(kv_block_tokens), static_cast<int>(block_table_width));
}

int64_t max_vocab() { return kMaxVocab; }

}  // namespace

const SamplingKernels& sampling() {
  static constexpr SamplingKernels kTable{sample, advance, max_vocab};
  return kTable;
}

}  // namespace kintsugi::kernels::cuda
