// kernels/gemm.h as plain loops. T: storage of activations and matrices; F: of biases and weight gradients
// (float, or double in tests).   N rows   I input width   O output width
#pragma once

#include "kernels/reference/storage.h"

namespace kintsugi::kernels::reference {

template <class T, class F>
void linear_forward(T* y, const T* x, const T* w, const F* bias, int64_t N, int64_t I, int64_t O) {
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t o = 0; o < O; ++o) {
      double sum = 0;
      for (int64_t i = 0; i < I; ++i) sum += get(x[n * I + i]) * get(w[o * I + i]);
      put(y[n * O + o], bias != nullptr ? sum + get(bias[o]) : sum);
    }
  }
}

template <class T>
void linear_backward_input(T* dx, const T* dy, const T* w, int64_t N, int64_t I, int64_t O, bool accumulate) {
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t i = 0; i < I; ++i) {
      double sum = accumulate ? get(dx[n * I + i]) : 0.0;
      for (int64_t o = 0; o < O; ++o) sum += get(dy[n * O + o]) * get(w[o * I + i]);
      put(dx[n * I + i], sum);
    }
  }
}

template <class T, class F>
void linear_backward_weight(F* dw, const T* dy, const T* x, int64_t N, int64_t I, int64_t O, bool accumulate) {
  for (int64_t o = 0; o < O; ++o) {
    for (int64_t i = 0; i < I; ++i) {
      double sum = accumulate ? get(dw[o * I + i]) : 0.0;
      for (int64_t n = 0; n < N; ++n) sum += get(dy[n * O + o]) * get(x[n * I + i]);
      put(dw[o * I + i], sum);
    }
  }
}

template <class T, class F>
void linear_backward_bias(F* dbias, const T* dy, int64_t N, int64_t O, bool accumulate) {
  for (int64_t o = 0; o < O; ++o) {
    double sum = accumulate ? get(dbias[o]) : 0.0;
    for (int64_t n = 0; n < N; ++n) sum += get(dy[n * O + o]);
    put(dbias[o], sum);
  }
}

}  // namespace kintsugi::kernels::reference
