// kernels/norm.h as plain loops.   N rows   C width
// T: storage of activations; F: of weights, statistics and weight gradients (float, or double in tests).
#pragma once

#include <cmath>

#include "kernels/norm.h"
#include "kernels/reference/storage.h"

namespace kintsugi::kernels::reference {

// First element of row n.
inline int64_t row_offset(int64_t n, int64_t C, RowLayout layout) {
  if (layout.inner == 1 && layout.outer_stride == 0) return n * C;
  return n / layout.inner * layout.outer_stride + n % layout.inner * C;
}

template <class T, class F>
void rms_norm_forward(T* y, F* rstd, const T* x, const F* w, int64_t N, int64_t C, RowLayout layout, double eps) {
  for (int64_t n = 0; n < N; ++n) {
    const int64_t row = row_offset(n, C, layout);
    double sum = 0;
    for (int64_t c = 0; c < C; ++c) sum += get(x[row + c]) * get(x[row + c]);
    const double r = 1.0 / std::sqrt(sum / static_cast<double>(C) + eps);
    put(rstd[n], r);
    for (int64_t c = 0; c < C; ++c) put(y[row + c], get(x[row + c]) * r * get(w[c]));
  }
}

// dx = rstd (g - xhat mean(g xhat)) with g = dy w and xhat = x rstd;  dw = sum_n dy xhat.
template <class T, class F>
void rms_norm_backward(T* dx, F* dw, const T* dy, const T* x, const F* w, const F* rstd, const T* dresidual, int64_t N,
                       int64_t C, RowLayout layout, bool accumulate_dw) {
  for (int64_t c = 0; c < C; ++c) {  // dw first: dx may overwrite dy
    double sum = accumulate_dw ? get(dw[c]) : 0.0;
    for (int64_t n = 0; n < N; ++n) {
      const int64_t i = row_offset(n, C, layout) + c;
      sum += get(dy[i]) * get(x[i]) * get(rstd[n]);
    }
    put(dw[c], sum);
  }
  for (int64_t n = 0; n < N; ++n) {
    const int64_t row = row_offset(n, C, layout);
    const double r = get(rstd[n]);
    double mean = 0;
    for (int64_t c = 0; c < C; ++c) mean += get(dy[row + c]) * get(w[c]) * get(x[row + c]) * r;
    mean /= static_cast<double>(C);
    for (int64_t c = 0; c < C; ++c) {
      const double through = r * (get(dy[row + c]) * get(w[c]) - get(x[row + c]) * r * mean);
      put(dx[row + c], dresidual != nullptr ? through + get(dresidual[row + c]) : through);
    }
  }
}

template <class T, class F>
void layer_norm_forward(T* y, F* mean, F* rstd, const T* x, const F* w, const F* b, int64_t N, int64_t C, double eps) {
  for (int64_t n = 0; n < N; ++n) {
    const T* row = x + n * C;
    double m = 0, variance = 0;
    for (int64_t c = 0; c < C; ++c) m += get(row[c]);
    m /= static_cast<double>(C);
    for (int64_t c = 0; c < C; ++c) variance += (get(row[c]) - m) * (get(row[c]) - m);
    const double r = 1.0 / std::sqrt(variance / static_cast<double>(C) + eps);
    put(mean[n], m);
    put(rstd[n], r);
    for (int64_t c = 0; c < C; ++c) put(y[n * C + c], (get(row[c]) - m) * r * get(w[c]) + get(b[c]));
  }
}

// dx = rstd (g - mean(g) - xhat mean(g xhat)) with g = dy w and xhat = (x - mean) rstd;
// dw = sum_n dy xhat;  db = sum_n dy.
template <class T, class F>
void layer_norm_backward(T* dx, F* dw, F* db, const T* dy, const T* x, const F* w, const F* mean, const F* rstd,
                         const T* dresidual, int64_t N, int64_t C, bool accumulate_dw) {
  for (int64_t c = 0; c < C; ++c) {
    double w_sum = accumulate_dw ? get(dw[c]) : 0.0;
    double b_sum = accumulate_dw ? get(db[c]) : 0.0;
    for (int64_t n = 0; n < N; ++n) {
      w_sum += get(dy[n * C + c]) * (get(x[n * C + c]) - get(mean[n])) * get(rstd[n]);
      b_sum += get(dy[n * C + c]);
    }
    put(dw[c], w_sum);
    put(db[c], b_sum);
  }
  for (int64_t n = 0; n < N; ++n) {
    const double m = get(mean[n]), r = get(rstd[n]);
    double g_mean = 0, gx_mean = 0;
    for (int64_t c = 0; c < C; ++c) {
      const double g = get(dy[n * C + c]) * get(w[c]);
      g_mean += g;
      gx_mean += g * (get(x[n * C + c]) - m) * r;
    }
    g_mean /= static_cast<double>(C);
    gx_mean /= static_cast<double>(C);
    for (int64_t c = 0; c < C; ++c) {
      const double xhat = (get(x[n * C + c]) - m) * r;
      const double through = r * (get(dy[n * C + c]) * get(w[c]) - g_mean - xhat * gx_mean);
      put(dx[n * C + c], dresidual != nullptr ? through + get(dresidual[n * C + c]) : through);
    }
  }
}

}  // namespace kintsugi::kernels::reference
