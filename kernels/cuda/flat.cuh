// Elementwise kernels over flat arrays. An operation is a struct with
//   static constexpr int kElements     elements of one pack
//   struct Loaded                      what a pack reads
//   Loaded load(int64_t element)       reads the pack that begins there
//   void store(int64_t element, const Loaded&)
//   void one(int64_t element)          the same for one element at any address
// A thread has one pack: blocks that move less at a time keep the memory's rows in order.
#pragma once

#include "kernels/cuda/device.cuh"

namespace kintsugi::kernels::cuda {

inline constexpr int kFlatThreads = 256;

template <class Op>
__global__ void __launch_bounds__(kFlatThreads) flat_kernel(Op op, int64_t n) {
  const int64_t element = (int64_t{blockIdx.x} * kFlatThreads + threadIdx.x) * Op::kElements;
  if (element + Op::kElements <= n) {
    op.store(element, op.load(element));
  } else {
    for (int64_t i = element; i < n; ++i) op.one(i);
  }
}

template <class Op>
__global__ void __launch_bounds__(kFlatThreads) flat_scalar_kernel(Op op, int64_t n) {
  for (int64_t i = int64_t{blockIdx.x} * kFlatThreads + threadIdx.x; i < n; i += int64_t{gridDim.x} * kFlatThreads) {
    op.one(i);
  }
}

// `aligned`: every array that the operation touches begins at a 16-byte boundary.
template <class Op>
KernelError launch_flat(const Op& op, int64_t n, bool aligned, StreamHandle stream) {
  if (n <= 0) return kKernelOk;
  if (aligned) {
    const int64_t blocks = ceil_div(n, int64_t{kFlatThreads} * Op::kElements);
    flat_kernel<<<static_cast<uint32_t>(blocks), kFlatThreads, 0, stream_of(stream)>>>(op, n);
  } else {
    const int64_t blocks =
        ceil_div(n, kFlatThreads) < 16 * kMultiprocessors ? ceil_div(n, kFlatThreads) : 16 * kMultiprocessors;
    flat_scalar_kernel<<<static_cast<uint32_t>(blocks), kFlatThreads, 0, stream_of(stream)>>>(op, n);
  }
  return launch_error();
}

}  // namespace kintsugi::kernels::cuda
