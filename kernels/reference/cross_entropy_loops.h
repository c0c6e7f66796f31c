// kernels/cross_entropy.h as plain loops. T: storage of logits; F: of losses (float, or double in tests).
#pragma once

#include <cmath>
#include <limits>

#include "kernels/cross_entropy.h"
#include "kernels/reference/storage.h"

namespace kintsugi::kernels::reference {

template <class T>
double log_sum_exp(const T* row, int64_t V) {
  double max = -std::numeric_limits<double>::infinity();
  for (int64_t v = 0; v < V; ++v) max = std::fmax(max, get(row[v]));
  double sum = 0;
  for (int64_t v = 0; v < V; ++v) sum += std::exp(get(row[v]) - max);
  return max + std::log(sum);
}

template <class T, class F>
void cross_entropy_forward(F* losses, const T* logits, const int32_t* targets, int64_t N, int64_t V) {
  for (int64_t n = 0; n < N; ++n) {
    const bool ignored = targets[n] == kIgnoredTarget;
    const T* row = logits + n * V;
    put(losses[n], ignored ? 0.0 : log_sum_exp(row, V) - get(row[targets[n]]));
  }
}

template <class T, class F>
void cross_entropy_forward_backward(F* losses, T* logits, const int32_t* targets, int64_t N, int64_t V) {
  cross_entropy_forward(losses, logits, targets, N, V);
  for (int64_t n = 0; n < N; ++n) {
    T* row = logits + n * V;
    const bool ignored = targets[n] == kIgnoredTarget;
    const double lse = ignored ? 0.0 : log_sum_exp(row, V);
    for (int64_t v = 0; v < V; ++v) {
      put(row[v], ignored ? 0.0 : std::exp(get(row[v]) - lse) - (v == targets[n] ? 1.0 : 0.0));
    }
  }
}

}  // namespace kintsugi::kernels::reference
