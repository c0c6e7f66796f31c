#include "kernels/rope.h"

#include "kernels/reference/rope_loops.h"

namespace kintsugi::kernels::reference {
namespace {

KernelError rotate_all(void* x, const int32_t* positions, const float* cos_sin, int64_t N, int64_t H, int64_t D,
                       int64_t stride, bool inverse, DType dtype, StreamHandle) {
  return for_dtype(dtype,
                   [&]<class T>(T) { rotate(static_cast<T*>(x), positions, cos_sin, N, H, D, stride, inverse); });
}

}  // namespace

const RopeKernels& rope() {
  static constexpr RopeKernels kTable{rotate_all};
  return kTable;
}

}  // namespace kintsugi::kernels::reference
