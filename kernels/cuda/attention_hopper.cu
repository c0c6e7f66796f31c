#include "kernels/cuda/attention_backward.cuh"
#include "kernels/cuda/attention_forward.cuh"
#include "kernels/cuda/attention_hopper.h"
#include "kernels/cuda/fused_linear_launch.cuh"
#include "kernels/cuda/library_handles.h"

namespace kintsugi::kernels::cuda {
namespace {

constexpr int64_t kBlock = 64;
constexpr int32_t kHeadsTogether = 32;
constexpr int64_t kCounterBytes = 256;

// A warpgroup that multiplies: its blocks of all items.
template <class S>
__device__ inline void multiply_tiles(const AttentionBlock<S>& at, const AttentionOperands& t,
                                      const AttentionItems& items, int32_t group) {
  StepRing<S> ring(at);
  for (uint32_t n = 0;; ++n) {
    hopper::wait(at.item_full(), n % 2);
    int32_t index = 0;
    if (threadIdx.x % 32 == 0) hopper::load_shared(index, at.item);
    index = __shfl_sync(0xffffffffu, index, 0);
    if (threadIdx.x % 32 == 0) hopper::arrive(at.item_free());
    if (index >= items.count()) break;
    const AttentionWork<S> work(t, items, index);
    if (!work.has(t, group)) {
      if constexpr (S::kKept > 0) {
        const uint32_t set = at.wait_kept(n);
        __syncwarp();
        if (threadIdx.x % 32 == 0) hopper::arrive(at.kept_free(set));
      }
      ring.skip(S::kOpeningStages + work.steps * work.heads);
    } else if constexpr (S::kPart == AttentionPart::kForward) {
      forward_block(at, ring, t, work, group);
    } else if constexpr (S::kPart == AttentionPart::kQueries) {
      query_block(at, ring, t, work, group, n);
    } else {
      key_block(at, ring, t, work, group, n);
    }
  }
  if (threadIdx.x % 128 == 0) hopper::wait_stores_read<0>();
}

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1)
    attention_tiles_kernel(const __grid_constant__ AttentionOperands operands, const AttentionItems items) {
  extern __shared__ char shared[];
  const AttentionBlock<S> at(shared);
  if (threadIdx.x == 0) at.init_barriers();
  __syncthreads();
  const int32_t group = part_of_block(128);
  if (group == 0) {
    hopper::give_registers<S::kFew>();
    if (threadIdx.x == 0) copy_tiles(at, operands, items);
  } else {
    hopper::take_registers<S::kMany>();
    multiply_tiles(at, operands, items, group - 1);
  }
}

int64_t blocks_of(const AttentionShape& s) { return ceil_div(s.T, kBlock); }

template <class S>
KernelError launch_tiles(const AttentionOperands& operands, int64_t heads, cudaStream_t stream) {
  static const cudaError_t kAllowed =
      cudaFuncSetAttribute(attention_tiles_kernel<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kSharedBytes);
  if (kAllowed != cudaSuccess) return kAllowed;
  const int64_t chunks = ceil_div(heads, kHeadsTogether);
  const AttentionItems items{static_cast<int32_t>(heads),
                             static_cast<int32_t>(ceil_div(operands.blocks, S::kWarpgroups)),
                             static_cast<int32_t>(ceil_div(heads, chunks))};
  const int64_t blocks = std::min<int64_t>(heads * items.tiles, kMultiprocessors);
  attention_tiles_kernel<S><<<static_cast<unsigned>(blocks), S::kThreads, S::kSharedBytes, stream>>>(operands, items);
  return launch_error();
}

template <AttentionPart kPart>
KernelError launch(const AttentionOperands& operands, const AttentionShape& s, cudaStream_t stream) {
  const int64_t heads = s.B * (kPart == AttentionPart::kKeys ? s.K : s.H);
  return s.D == 64 ? launch_tiles<AttentionTile<kPart, 64>>(operands, heads, stream)
                   : launch_tiles<AttentionTile<kPart, 128>>(operands, heads, stream);
}

// What a kernel is given, put together array by array.
struct AttentionCall {
  AttentionCall(const AttentionShape& shape, void* counters) : s(shape) {
    t.next = static_cast<int32_t*>(counters);
    t.positions = s.positions;
    t.cos_sin = s.cos_sin;
    t.T = static_cast<int32_t>(s.T);
    t.H = static_cast<int32_t>(s.H);
    t.K = static_cast<int32_t>(s.K);
    t.blocks = static_cast<int32_t>(blocks_of(s));
    t.scale = s.scale;
  }
  void map(CUtensorMap* to, const void* data, int64_t heads, int64_t stride) {
    maps.make(to, data, CU_TENSOR_MAP_SWIZZLE_128B,
              {{heads * s.D, 1, 64}, {s.T, stride, kBlock}, {s.B, s.T * stride, 1}});
  }
  void map_forward(const void* q, const void* k, const void* v, const void* o) {
    map(&t.q, q, s.H, s.q_stride);
    map(&t.k, k, s.K, s.k_stride);
    map(&t.v, v, s.K, s.v_stride);
    map(&t.o, o, s.H, s.o_stride);
  }
  // In front of the first launch, when all is mapped.
  KernelError begin(cudaStream_t stream) const {
    return maps.error() != kKernelOk ? maps.error() : cudaMemsetAsync(t.next, 0, 2 * sizeof(int32_t), stream);
  }

  const AttentionShape& s;
  AttentionOperands t{};
  Maps maps;
};

}  // namespace

bool hopper_attention_applies(const AttentionShape& s, DType dtype) {
  return dtype == DType::kBF16 && (s.D == 64 || s.D == 128) && s.document_starts == nullptr && s.q_stride % 8 == 0 &&
         s.k_stride % 8 == 0 && s.v_stride % 8 == 0 && s.o_stride % 8 == 0 && s.T < int64_t{1} << 24 &&
         s.B * s.H * blocks_of(s) < int64_t{1} << 30;
}

KernelError hopper_attention_forward(void* o, float* lse, const void* q, const void* k, const void* v,
                                     const AttentionShape& s, StreamHandle stream) {
  void* counters = nullptr;
  if (const KernelError error = stream_scratch(&counters, stream); error != kKernelOk) return error;
  AttentionCall call(s, counters);
  call.map_forward(q, k, v, o);
  call.t.lse = lse;
  const cudaStream_t cuda_stream = stream_of(stream);
  if (const KernelError error = call.begin(cuda_stream); error != kKernelOk) return error;
  return launch<AttentionPart::kForward>(call.t, s, cuda_stream);
}

int64_t hopper_attention_workspace_bytes(const AttentionShape& s) {
  return kCounterBytes + s.B * s.H * blocks_of(s) * kBlock * 8;
}

KernelError hopper_attention_backward(void* dq, void* dk, void* dv, const void* d_o, const void* o, const float* lse,
                                      const void* q, const void* k, const void* v, const AttentionShape& s,
                                      void* workspace, StreamHandle stream) {
  AttentionCall call(s, workspace);
  call.map_forward(q, k, v, o);
  call.map(&call.t.d_o, d_o, s.H, s.o_stride);
  call.map(&call.t.dq, dq, s.H, s.q_stride);
  call.map(&call.t.dk, dk, s.K, s.k_stride);
  call.map(&call.t.dv, dv, s.K, s.v_stride);
  call.t.lse = const_cast<float*>(lse);
  call.t.row_facts = reinterpret_cast<float*>(static_cast<char*>(workspace) + kCounterBytes);
  const cudaStream_t cuda_stream = stream_of(stream);
  if (const KernelError error = call.begin(cuda_stream); error != kKernelOk) return error;
  const KernelError error = launch<AttentionPart::kQueries>(call.t, s, cuda_stream);
  return error != kKernelOk ? error : launch<AttentionPart::kKeys>(call.t, s, cuda_stream);
}

}  // namespace kintsugi::kernels::cuda
