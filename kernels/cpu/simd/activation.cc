// kernels/activation.h, vectorised. One pass over memory each; every element alone, so ranges may be cut anywhere.
#include "kernels/cpu/simd/math.h"
#include "kernels/cpu/simd/parallel.h"
#include "kernels/cpu/simd/tables.h"

namespace kintsugi::kernels::cpu::KTG_ISA {
namespace {

template <class T>
void swiglu_forward_rows(T* y, const T* gate_up, int64_t begin, int64_t end, int64_t F) {
  for (int64_t n = begin; n < end; ++n) {
    const T* gate = gate_up + n * 2 * F;
    const T* up = gate + F;
    T* out = y + n * F;
    for_vectors(F, [&](int64_t f, auto lanes) {
      const Vec a = load(gate + f, lanes);
      store(out + f, a * sigmoid(a) * load(up + f, lanes), lanes);
    });
  }
}

// silu'(a) = s (1 + a (1 - s)) with s = sigmoid(a).
template <class T>
void swiglu_backward_rows(T* d_gate_up, const T* dy, const T* gate_up, int64_t begin, int64_t end, int64_t F) {
  const Vec one = Vec::set(1.0f);
  for (int64_t n = begin; n < end; ++n) {
    const T* gate = gate_up + n * 2 * F;
    T* d_gate = d_gate_up + n * 2 * F;
    const T* d_out = dy + n * F;
    for_vectors(F, [&](int64_t f, auto lanes) {
      const Vec a = load(gate + f, lanes), up = load(gate + F + f, lanes), d = load(d_out + f, lanes);
      const Vec s = sigmoid(a);
      const Vec d_s = d * s;
      store(d_gate + f, d_s * up * mul_add(a, one - s, one), lanes);
      store(d_gate + F + f, d_s * a, lanes);
    });
  }
}

// 0.5 (1 + tanh(u)) = sigmoid(2 u), so gelu(x) = x sigmoid(2 u) with u = sqrt(2/pi) (x + 0.044715 x^3).
constexpr float kTwiceScale = 1.5957691216f;  // 2 sqrt(2 / pi)
constexpr float kCubic = 0.044715f;

inline Vec gelu_sigmoid(Vec x, Vec x2) {
  return sigmoid(Vec::set(kTwiceScale) * x * mul_add(Vec::set(kCubic), x2, Vec::set(1.0f)));
}

KernelError swiglu_forward(void* y, const void* gate_up, int64_t N, int64_t F, DType dtype, StreamHandle) {
  return for_storage(dtype, [&]<class T>(T*) {
    parallel_ranges(N, N * F, [&](int64_t begin, int64_t end) {
      swiglu_forward_rows(static_cast<T*>(y), static_cast<const T*>(gate_up), begin, end, F);
    });
    return kKernelOk;
  });
}

KernelError swiglu_backward(void* d_gate_up, const void* dy, const void* gate_up, int64_t N, int64_t F, DType dtype,
                            StreamHandle) {
  return for_storage(dtype, [&]<class T>(T*) {
    parallel_ranges(N, N * F, [&](int64_t begin, int64_t end) {
      swiglu_backward_rows(static_cast<T*>(d_gate_up), static_cast<const T*>(dy), static_cast<const T*>(gate_up), begin,
                           end, F);
    });
    return kKernelOk;
  });
}

KernelError gelu_forward(void* y, const void* x, int64_t N, int64_t F, DType dtype, StreamHandle) {
  return for_storage(dtype, [&]<class T>(T*) {
    parallel_elements(N * F, [&](int64_t begin, int64_t end) {
      const T* in = static_cast<const T*>(x) + begin;
      T* out = static_cast<T*>(y) + begin;
      for_vectors(end - begin, [&](int64_t i, auto lanes) {
        const Vec a = load(in + i, lanes);
        store(out + i, a * gelu_sigmoid(a, a * a), lanes);
      });
    });
    return kKernelOk;
  });
}

// d gelu / dx = s + x s (1 - s) 2 du/dx with s = sigmoid(2 u).
KernelError gelu_backward(void* dx, const void* dy, const void* x, int64_t N, int64_t F, DType dtype, StreamHandle) {
  return for_storage(dtype, [&]<class T>(T*) {
    parallel_elements(N * F, [&](int64_t begin, int64_t end) {
      const T* in = static_cast<const T*>(x) + begin;
      const T* d_out = static_cast<const T*>(dy) + begin;
      T* d_in = static_cast<T*>(dx) + begin;
      const Vec one = Vec::set(1.0f);
      for_vectors(end - begin, [&](int64_t i, auto lanes) {
        const Vec a = load(in + i, lanes), a2 = a * a;
        const Vec s = gelu_sigmoid(a, a2);
        const Vec du2 = Vec::set(kTwiceScale) * mul_add(Vec::set(3.0f * kCubic), a2, one);
        store(d_in + i, load(d_out + i, lanes) * mul_add(a * s * (one - s), du2, s), lanes);
      });
    });
    return kKernelOk;
  });
}

KernelError add(void* y, const void* a, const void* b, int64_t n, DType dtype, StreamHandle) {
  return for_storage(dtype, [&]<class T>(T*) {
    parallel_elements(n, [&](int64_t begin, int64_t end) {
      const T* left = static_cast<const T*>(a) + begin;
      const T* right = static_cast<const T*>(b) + begin;
      T* out = static_cast<T*>(y) + begin;
      for_vectors(end - begin, [&](int64_t i, auto lanes) {
        store(out + i, load(left + i, lanes) + load(right + i, lanes), lanes);
      });
    });
    return kKernelOk;
  });
}

}  // namespace

const ActivationKernels& activation() {
  static constexpr ActivationKernels kTable{swiglu_forward, swiglu_backward, gelu_forward, gelu_backward, add};
  return kTable;
}

}  // namespace kintsugi::kernels::cpu::KTG_ISA
