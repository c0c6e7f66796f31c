// kernels/rope.h, vectorised over the pairs of a head.
#include "kernels/cpu/simd/parallel.h"
#include "kernels/cpu/simd/tables.h"

namespace kintsugi::kernels::cpu::KTG_ISA {
namespace {

template <class T>
void rotate_token(T* x, const float* cosines, const float* sines, int64_t H, int64_t D, bool inverse) {
  const int64_t half = D / 2;
  for_vectors(half, [&](int64_t d, auto lanes) {
    const Vec c = load(cosines + d, lanes), s = load(sines + d, lanes);
    const Vec signed_s = inverse ? Vec::zero() - s : s;
    for (int64_t h = 0; h < H; ++h) {
      T* head = x + h * D + d;
      const Vec a = load(head, lanes), b = load(head + half, lanes);
      store(head, neg_mul_add(b, signed_s, a * c), lanes);
      store(head + half, mul_add(a, signed_s, b * c), lanes);
    }
  });
}

KernelError rotate(void* x, const int32_t* positions, const float* cos_sin, int64_t N, int64_t H, int64_t D,
                   int64_t stride, bool inverse, DType dtype, StreamHandle) {
  return for_storage(dtype, [&]<class T>(T*) {
    parallel_ranges(N, N * H * D, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        const float* cosines = cos_sin + positions[n] * D;
        rotate_token(static_cast<T*>(x) + n * stride, cosines, cosines + D / 2, H, D, inverse);
      }
    });
    return kKernelOk;
  });
}

}  // namespace

const RopeKernels& rope() {
  static constexpr RopeKernels kTable{rotate};
  return kTable;
}

}  // namespace kintsugi::kernels::cpu::KTG_ISA
