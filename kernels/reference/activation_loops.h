// kernels/activation.h as plain loops. T: storage (float, bfloat16, or double in tests).
#pragma once

#include <cmath>

#include "kernels/reference/storage.h"

namespace kintsugi::kernels::reference {

inline double sigmoid(double a) { return 1.0 / (1.0 + std::exp(-a)); }

template <class T>
void swiglu_forward(T* y, const T* gate_up, int64_t N, int64_t F) {
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t f = 0; f < F; ++f) {
      const double gate = get(gate_up[n * 2 * F + f]), up = get(gate_up[n * 2 * F + F + f]);
      put(y[n * F + f], gate * sigmoid(gate) * up);
    }
  }
}

// silu'(a) = s (1 + a (1 - s)) with s = sigmoid(a).
template <class T>
void swiglu_backward(T* d_gate_up, const T* dy, const T* gate_up, int64_t N, int64_t F) {
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t f = 0; f < F; ++f) {
      const double gate = get(gate_up[n * 2 * F + f]), up = get(gate_up[n * 2 * F + F + f]);
      const double d = get(dy[n * F + f]), s = sigmoid(gate);
      put(d_gate_up[n * 2 * F + f], d * up * s * (1.0 + gate * (1.0 - s)));
      put(d_gate_up[n * 2 * F + F + f], d * gate * s);
    }
  }
}

inline constexpr double kGeluScale = 0.79788456080286535588;  // sqrt(2 / pi)
inline constexpr double kGeluCubic = 0.044715;

template <class T>
void gelu_forward(T* y, const T* x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const double a = get(x[i]);
    put(y[i], 0.5 * a * (1.0 + std::tanh(kGeluScale * (a + kGeluCubic * a * a * a))));
  }
}

template <class T>
void gelu_backward(T* dx, const T* dy, const T* x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const double a = get(x[i]);
    const double t = std::tanh(kGeluScale * (a + kGeluCubic * a * a * a));
    const double inner = kGeluScale * (1.0 + 3.0 * kGeluCubic * a * a);
    put(dx[i], get(dy[i]) * (0.5 * (1.0 + t) + 0.5 * a * (1.0 - t * t) * inner));
  }
}

template <class T>
void add(T* y, const T* a, const T* b, int64_t count) {
  for (int64_t i = 0; i < count; ++i) put(y[i], get(a[i]) + get(b[i]));
}

}  // namespace kintsugi::kernels::reference
