// One thread block a row of the mask, 16 bytes a thread at a time.
#include "kernels/cuda/attention_documents.h"
#include "kernels/cuda/device.cuh"

namespace kintsugi::kernels::cuda {
namespace {

constexpr int kThreads = 128;
// -2^30 in bf16, twice. Finite, so that the running maximum of a row which has met earlier documents only is a number;
// what it has gathered until then is multiplied by exp(-2^30 - m) = 0 at the first key of its own document.
constexpr uint32_t kLow = 0xce80, kBothLow = kLow << 16 | kLow;

__device__ uint32_t pair(int64_t u, int64_t start) {
  if (u + 1 < start) return kBothLow;
  return u < start ? kLow : 0;  // little-endian: element u is the lower half
}

__global__ void __launch_bounds__(kThreads) mask_kernel(uint4* mask, const int32_t* starts, int64_t row_vectors) {
  const int64_t start = starts[blockIdx.x];
  uint4* const row = mask + int64_t{blockIdx.x} * row_vectors;
  for (int64_t i = threadIdx.x; i < row_vectors; i += kThreads) {
    const int64_t u = 8 * i;
    row[i] = make_uint4(pair(u, start), pair(u + 2, start), pair(u + 4, start), pair(u + 6, start));
  }
}

}  // namespace

KernelError fill_document_mask(void* mask, const int32_t* document_starts, int64_t B, int64_t T, StreamHandle stream) {
  mask_kernel<<<static_cast<unsigned>(B * T), kThreads, 0, stream_of(stream)>>>(
      static_cast<uint4*>(mask), document_starts, document_mask_stride(T) / 8);
  return launch_error();
}

}  // namespace kintsugi::kernels::cuda
