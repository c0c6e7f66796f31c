#include "kernels/cross_entropy.h"

#include "kernels/reference/cross_entropy_loops.h"

namespace kintsugi::kernels::reference {
namespace {

KernelError forward(float* losses, const void* logits, const int32_t* targets, int64_t N, int64_t V, DType dtype,
                    StreamHandle) {
  return for_dtype(dtype,
                   [&]<class T>(T) { cross_entropy_forward(losses, static_cast<const T*>(logits), targets, N, V); });
}

KernelError forward_backward(float* losses, void* logits, const int32_t* targets, int64_t N, int64_t V, DType dtype,
                             StreamHandle) {
  return for_dtype(dtype,
                   [&]<class T>(T) { cross_entropy_forward_backward(losses, static_cast<T*>(logits), targets, N, V); });
}

}  // namespace

const CrossEntropyKernels& cross_entropy() {
  static constexpr CrossEntropyKernels kTable{forward, forward_backward};
  return kTable;
}

}  // namespace kintsugi::kernels::reference
