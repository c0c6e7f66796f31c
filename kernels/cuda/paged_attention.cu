// kernels/paged_attention.h on the device: the launches of paged_decode.cuh, and the scatter of new keys and values.
#include <algorithm>

#include "kernels/cuda/decode_norm.cuh"
#include "kernels/cuda/gemv.h"
#include "kernels/cuda/paged_decode.cuh"

namespace kintsugi::kernels::cuda {
namespace {

constexpr int64_t kMaxHeadSize = 256;
// How many splits a sequence has is part of what its bits depend on. Up to kFewSequences it depends on nothing that
// another sequence could change: blocks for one sequence alone, one a multiprocessor, of which there are about 132.
// More sequences keep the device busy together, and each split pays for its own rotation and its part of the join: the
// more blocks there are, the longer a sequence is before it is cut.
constexpr int64_t kFewSequences = 16;
constexpr int64_t kBlocksForOneSequence = 128;
constexpr int64_t kFewPositions = 128, kManyPositions = 2048;  // of a split
constexpr int64_t kMostClusterPositions = 256;                 // of one that is a cluster's block
constexpr int64_t kMostPartsOfMany = 512;                      // splits of all sequences together

// Steps of more sequences have work enough in each launch.
constexpr int64_t kMaxLayerRows = 256;

int64_t head_groups(const PagedShape& s) { return (s.H / s.K + kHeadsPerBlock - 1) / kHeadsPerBlock; }

int64_t split_positions(const PagedShape& s) {
  if (s.S <= kFewSequences) return kFewPositions;
  // kManyPositions from two blocks a multiprocessor on.
  return std::clamp(kManyPositions * (s.S * s.K * head_groups(s)) / 256, kFewPositions, kManyPositions);
}

// At most this many splits for contexts of any length.
int64_t most_splits(const PagedShape& s) {
  const int64_t groups = s.K * head_groups(s);
  if (s.S > kFewSequences) {
    return s.S * groups > kMaxItems ? 1 : std::clamp<int64_t>(kMostPartsOfMany / s.S, 1, kMaxSplits);
  }
  return std::clamp<int64_t>((kBlocksForOneSequence + groups - 1) / groups, 1, kMaxSplits);
}

int64_t context_of(const PagedShape& s) { return s.block_table_width * s.kv_block_tokens; }

// Whether a sequence's splits are the blocks of a cluster: where as many as that may have are short enough.
bool in_cluster(const PagedShape& s, DType dtype) {
  const int64_t context = context_of(s);
  return dtype == DType::kBF16 && s.S <= kFewSequences && context > kFewPositions &&
         context <= kMaxClusterSplits * kMostClusterPositions;
}

int64_t num_splits(const PagedShape& s, DType dtype) {
  const int64_t context = context_of(s), positions = split_positions(s);
  if (in_cluster(s, dtype)) {
    int64_t splits = 2;
    while (splits < kMaxClusterSplits && splits * kFewPositions < context) splits *= 2;
    return splits;
  }
  return std::clamp<int64_t>((context + positions - 1) / positions, 1, most_splits(s));
}

int64_t decode_workspace_bytes(const PagedShape& s, DType) {
  PagedShape few = s;
  few.S = std::min(s.S, kFewSequences);
  const int64_t parts = std::max(few.S * most_splits(few), kMostPartsOfMany);
  return parts * s.H * (8 + s.D * 4) + 8;
}

// 16-byte loads need it of every row.
bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

bool fits(const void* q, const void* k_cache, const void* v_cache, const PagedShape& s, DType dtype) {
  if (s.D < 8 || s.D > kMaxHeadSize || s.D % 8 != 0 || s.K < 1 || s.H % s.K != 0 || s.kv_block_tokens < 1) return false;
  if (s.S * num_splits(s, dtype) > INT32_MAX || s.block_table_width > INT32_MAX || s.K * head_groups(s) > 65535)
    return false;
  if (dtype == DType::kF32) return true;
  return aligned(q) && aligned(k_cache) && aligned(v_cache) && s.q_stride % 8 == 0;
}

struct Launch {
  PagedArguments arguments{};
  dim3 grid;
  unsigned cluster = 1;  // blocks of x in one
};

KernelError prepare(Launch* launch, void* o, const void* q, const void* k_cache, const void* v_cache,
                    const int32_t* block_tables, const int32_t* context_lens, const PagedShape& s, DType dtype,
                    void* workspace) {
  if (!fits(q, k_cache, v_cache, s, dtype)) return cudaErrorInvalidValue;
  const int64_t splits = num_splits(s, dtype);
  launch->cluster = in_cluster(s, dtype) ? static_cast<unsigned>(splits) : 1;
  if (splits > 1 && workspace == nullptr) return cudaErrorInvalidValue;
  PagedArguments& a = launch->arguments;
  a.o = o;
  a.q = q;
  a.k_cache = k_cache;
  a.v_cache = v_cache;
  a.block_tables = block_tables;
  a.context_lens = context_lens;
  if (splits > 1) {
    a.partial_ml = static_cast<Parcel2*>(workspace);
    a.partial = reinterpret_cast<Parcel4*>(a.partial_ml + (s.S * s.H * splits + 1) / 2 * 2);  // 16-byte aligned
  }
  a.H = static_cast<int>(s.H);
  a.K = static_cast<int>(s.K);
  a.D = static_cast<int>(s.D);
  a.P = static_cast<int>(s.kv_block_tokens);
  a.width = static_cast<int>(s.block_table_width);
  a.splits = static_cast<int>(splits);
  a.split_positions = static_cast<int>(split_positions(s));
  a.head_groups = static_cast<int>(head_groups(s));
  a.q_stride = s.q_stride;
  a.o_stride = s.o_stride;
  a.scale_log2 = s.scale * kLog2E;
  launch->grid = dim3(static_cast<unsigned>(s.S * splits), static_cast<unsigned>(s.K * head_groups(s)));
  return kKernelOk;
}

KernelError run(const Launch& launch, void (*kernel)(PagedArguments), int64_t dynamic_shared_bytes,
                StreamHandle stream) {
  return launch_overlapped_clusters(kernel, launch.grid, dim3(kDecodeThreads), launch.cluster,
                                    static_cast<cudaStream_t>(stream), dynamic_shared_bytes, launch.arguments);
}

template <int kChunks, bool kRotate, bool kCluster>
KernelError run_bf16(const Launch& launch, StreamHandle stream) {
  constexpr int kBytes = TileQueue<kChunks>::kBlockBytes;
  static_assert(kBytes >= sizeof(DecodeShared<64 * kChunks>));
  static constexpr auto kKernel = paged_decode_bf16_kernel<kChunks, kRotate, kCluster>;
  static const cudaError_t allowed = allow_shared_memory(kKernel, kBytes);
  return allowed != cudaSuccess ? allowed : run(launch, kKernel, kBytes, stream);
}

template <int kChunks, bool kRotate>
KernelError run_bf16(const Launch& launch, StreamHandle stream) {
  return launch.cluster > 1 ? run_bf16<kChunks, kRotate, true>(launch, stream)
                            : run_bf16<kChunks, kRotate, false>(launch, stream);
}

template <bool kRotate>
KernelError run_bf16(const Launch& launch, int64_t D, StreamHandle stream) {
  if (D <= 64) return run_bf16<1, kRotate>(launch, stream);
  if (D <= 128) return run_bf16<2, kRotate>(launch, stream);
  return run_bf16<4, kRotate>(launch, stream);
}

KernelError decode(void* o, const void* q, const void* k_cache, const void* v_cache, const int32_t* block_tables,
                   const int32_t* context_lens, const PagedShape& s, DType dtype, void* workspace,
                   StreamHandle stream) {
  if (s.S == 0) return kKernelOk;
  Launch launch;
  if (const KernelError error =
          prepare(&launch, o, q, k_cache, v_cache, block_tables, context_lens, s, dtype, workspace);
      error != kKernelOk) {
    return error;
  }
  if (dtype == DType::kBF16) return run_bf16<false>(launch, s.D, stream);
  if (s.D <= 64) return run(launch, paged_decode_f32_kernel<2>, 0, stream);
  return run(launch, s.D <= 128 ? paged_decode_f32_kernel<4> : paged_decode_f32_kernel<8>, 0, stream);
}

bool layer_applies(int64_t N, int64_t C, int64_t F, int64_t D) {
  return N <= kMaxLayerRows && C % 8 == 0 && C <= kMaxNormWidth && F % 8 == 0 && D % 8 == 0 && D <= kMaxHeadSize;
}

KernelError rotate_and_decode(void* o, const void* qkv, void* k_cache, void* v_cache, const int32_t* block_tables,
                              const int32_t* context_lens, const PagedShape& s, const DecodeRotation& rotation,
                              void* workspace, StreamHandle stream) {
  if (s.S == 0) return kKernelOk;
  Launch launch;
  if (const KernelError error =
          prepare(&launch, o, qkv, k_cache, v_cache, block_tables, context_lens, s, DType::kBF16, workspace);
      error != kKernelOk) {
    return error;
  }
  launch.arguments.rotation = rotation;
  return run_bf16<true>(launch, s.D, stream);
}

// One thread moves one Piece of a token's keys and the same of its values.
template <class Piece>
__global__ void write_kv_kernel(Piece* k_cache, Piece* v_cache, const Piece* k, const Piece* v, const int64_t* slots,
                                int64_t N, int64_t row, int64_t k_stride, int64_t v_stride) {
  allow_next();
  wait_for_previous();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= N * row) return;
  const int64_t n = i / row, at = i % row, slot = slots[n];
  if (slot < 0) return;
  k_cache[slot * row + at] = k[n * k_stride + at];
  v_cache[slot * row + at] = v[n * v_stride + at];
}

template <class Piece>
KernelError launch_write_kv(void* k_cache, void* v_cache, const void* k, const void* v, const int64_t* slots, int64_t N,
                            int64_t row, int64_t k_stride, int64_t v_stride, StreamHandle stream) {
  constexpr int64_t kThreads = 256;
  const int64_t blocks = (N * row + kThreads - 1) / kThreads;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  return launch_overlapped(write_kv_kernel<Piece>, dim3(static_cast<unsigned>(blocks)), dim3(kThreads),
                           static_cast<cudaStream_t>(stream), 0, static_cast<Piece*>(k_cache),
                           static_cast<Piece*>(v_cache), static_cast<const Piece*>(k), static_cast<const Piece*>(v),
                           slots, N, row, k_stride, v_stride);
}

KernelError write_kv(void* k_cache, void* v_cache, const void* k, const void* v, const int64_t* slots, int64_t N,
                     int64_t K, int64_t D, int64_t k_stride, int64_t v_stride, DType dtype, StreamHandle stream) {
  if (N == 0 || K * D == 0) return kKernelOk;
  const int64_t per_piece = 16 / size_of(dtype);
  if (K * D % per_piece == 0 && k_stride % per_piece == 0 && v_stride % per_piece == 0 && aligned(k_cache) &&
      aligned(v_cache) && aligned(k) && aligned(v)) {
    return launch_write_kv<uint4>(k_cache, v_cache, k, v, slots, N, K * D / per_piece, k_stride / per_piece,
                                  v_stride / per_piece, stream);
  }
  if (dtype == DType::kF32) {
    return launch_write_kv<uint32_t>(k_cache, v_cache, k, v, slots, N, K * D, k_stride, v_stride, stream);
  }
  return launch_write_kv<uint16_t>(k_cache, v_cache, k, v, slots, N, K * D, k_stride, v_stride, stream);
}

}  // namespace

const PagedAttentionKernels& paged_attention() {
  static constexpr PagedAttentionKernels kTable{decode, decode_workspace_bytes, write_kv};
  return kTable;
}

const DecodeLayerKernels& decode_layer() {
  static constexpr DecodeLayerKernels kTable{layer_applies, norm_gemv, rotate_and_decode};
  return kTable;
}

}  // namespace kintsugi::kernels::cuda
