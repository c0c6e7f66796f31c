// The vote's kernels: a few hundred numbers, so one block each; what counts is that nothing leaves the device.
#include <cuda_runtime_api.h>

#include "kernels/vote.h"

namespace kintsugi::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kStagedBytes = 40 << 10;  // of shared memory
constexpr int64_t kSummedUnits = 512;       // side by side; further ones one after another

__device__ int64_t load_from_host(const int64_t* word) {
  int64_t value;
  asm volatile("ld.acquire.sys.global.b64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

__device__ int32_t load_from_host(const int32_t* word) {
  int32_t value;
  asm volatile("ld.acquire.sys.global.b32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

__device__ void store_to_host(int64_t* word, int64_t value) {
  asm volatile("st.release.sys.global.b64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// Bytes that mean nothing are written, too: records travel and are read whole.
__device__ void clear_words(char* record, int64_t begin_bytes, int64_t end_bytes) {
  auto* words = reinterpret_cast<uint64_t*>(record);
  for (int64_t i = begin_bytes / 8 + threadIdx.x; i < end_bytes / 8; i += blockDim.x) words[i] = 0;
}

__global__ void fill_record_kernel(void* record, const StepInputs* inputs, const LossSums* losses, int64_t num_losses,
                                   bool add_up, VoteShape shape) {
  auto* out = reinterpret_cast<LossSums*>(static_cast<char*>(record) + shape.losses_offset());
  if (!add_up) {
    for (int64_t i = threadIdx.x; i < num_losses; i += blockDim.x) out[i] = losses[i];
  }
  const auto brought = static_cast<int64_t>(sizeof(LossSums)) * (add_up ? 1 : num_losses);
  const auto partials = static_cast<int64_t>(sizeof(double)) * shape.num_units * shape.blocks_per_rank();
  clear_words(static_cast<char*>(record), shape.losses_offset() + brought, shape.partials_offset());
  clear_words(static_cast<char*>(record), shape.partials_offset() + partials, shape.record_bytes());
  if (threadIdx.x != 0) return;
  *static_cast<VoteHeader*>(record) = {inputs->step, static_cast<int32_t>(add_up ? 1 : num_losses),
                                       inputs->stop_requested};
  if (!add_up) return;
  LossSums sum;
  for (int64_t i = 0; i < num_losses; ++i) {
    sum.loss += losses[i].loss;
    sum.num_tokens += losses[i].num_tokens;
  }
  *out = sum;
}

// The words are read after all records have been: whoever raises one before an abort knows that a vote which the
// abort cut short is not published.
__global__ void __launch_bounds__(kThreads)
    tally_kernel(AdamWScalars* scalars, VotePublication* published, const void* records, VoteShape shape,
                 const StepInputs* inputs, const int64_t* stop_word, const int32_t* closed) {
  extern __shared__ double staged[];
  __shared__ double squares[kSummedUnits];
  const int64_t bytes = shape.world_size() * shape.record_bytes();
  const bool stage = bytes <= kStagedBytes;
  if (stage) {
    for (int64_t i = threadIdx.x; i < bytes / 8; i += blockDim.x) {
      staged[i] = static_cast<const double*>(records)[i];
    }
    __syncthreads();
    records = staged;
  }
  for (int64_t u = threadIdx.x; u < shape.num_units && u < kSummedUnits; u += blockDim.x) {
    squares[u] = unit_squares(shape, records, u);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  const VoteCount count = count_votes(shape, records, inputs->step, [&](int64_t u) {
    return u < kSummedUnits ? squares[u] : unit_squares(shape, records, u);
  });
  AdamWScalars result = update_scalars(*inputs, count);
  const bool stopped = stop_word != nullptr && load_from_host(stop_word) > inputs->generation;
  const bool shut = closed != nullptr && load_from_host(closed) != 0;
  if (stopped || shut || count.odd_rank >= 0) result.skip = 1;
  *scalars = result;
  if (stopped || shut) return;
  published->count = count;
  __threadfence_system();
  store_to_host(&published->step, inputs->step);
}

KernelError fill_record(void* record, const StepInputs* inputs, const LossSums* losses, int64_t num_losses, bool add_up,
                        const VoteShape& shape, StreamHandle stream) {
  fill_record_kernel<<<1, 64, 0, static_cast<cudaStream_t>(stream)>>>(record, inputs, losses, num_losses, add_up,
                                                                      shape);
  return cudaGetLastError();
}

KernelError tally(AdamWScalars* scalars, VotePublication* published, const void* records, const VoteShape& shape,
                  const StepInputs* inputs, const int64_t* stop_word, const int32_t* closed, StreamHandle stream) {
  const int64_t bytes = shape.world_size() * shape.record_bytes();
  const size_t staged = bytes <= kStagedBytes ? static_cast<size_t>(bytes) : 0;
  tally_kernel<<<1, kThreads, staged, static_cast<cudaStream_t>(stream)>>>(scalars, published, records, shape, inputs,
                                                                           stop_word, closed);
  return cudaGetLastError();
}

}  // namespace

const VoteKernels& vote() {
  static constexpr VoteKernels kTable{fill_record, tally};
  return kTable;
}

}  // namespace kintsugi::kernels::cuda
