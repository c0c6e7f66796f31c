// kernels/attention.h as plain loops.   B batch   T tokens   H query heads   K key/value heads   D head size
// S: storage of q, k, v, o and their gradients; F: of lse (float, or double in tests).
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "kernels/attention.h"
#include "kernels/reference/storage.h"

namespace kintsugi::kernels::reference {

template <class S>
double dot(const S* a, const S* b, int64_t D) {
  double sum = 0;
  for (int64_t d = 0; d < D; ++d) sum += get(a[d]) * get(b[d]);
  return sum;
}

// The first key that token t of sequence b may see.
inline int64_t first_key(const AttentionShape& s, int64_t b, int64_t t) {
  return s.document_starts != nullptr ? s.document_starts[b * s.T + t] : 0;
}

template <class S, class F>
void attention_forward(S* o, F* lse, const S* q, const S* k, const S* v, const AttentionShape& s) {
  std::vector<double> p(static_cast<size_t>(s.T));
  for (int64_t b = 0; b < s.B; ++b) {
    for (int64_t h = 0; h < s.H; ++h) {
      const int64_t g = h / (s.H / s.K);  // the key/value head of this group of query heads
      for (int64_t t = 0; t < s.T; ++t) {
        const S* q_row = q + (b * s.T + t) * s.q_stride + h * s.D;
        double max = -std::numeric_limits<double>::infinity();
        const int64_t first = first_key(s, b, t);
        for (int64_t u = first; u <= t; ++u) {
          p[u] = static_cast<double>(s.scale) * dot(q_row, k + (b * s.T + u) * s.k_stride + g * s.D, s.D);
          max = std::fmax(max, p[u]);
        }
        double sum = 0;
        for (int64_t u = first; u <= t; ++u) sum += p[u] = std::exp(p[u] - max);
        S* o_row = o + (b * s.T + t) * s.o_stride + h * s.D;
        for (int64_t d = 0; d < s.D; ++d) {
          double acc = 0;
          for (int64_t u = first; u <= t; ++u) acc += p[u] * get(v[(b * s.T + u) * s.v_stride + g * s.D + d]);
          put(o_row[d], acc / sum);
        }
        if (lse != nullptr) put(lse[(b * s.H + h) * s.T + t], max + std::log(sum));
      }
    }
  }
}

// dv_u = sum_t p_tu do_t;  ds_tu = p_tu (do_t . v_u - do_t . o_t);  dq_t = scale sum_u ds_tu k_u;  dk_u likewise.
// dk and dv sum over the group's query heads, so they are gathered in double rows first.
template <class S, class F>
void attention_backward(S* dq, S* dk, S* dv, const S* d_o, const S* o, const F* lse, const S* q, const S* k, const S* v,
                        const AttentionShape& s) {
  const int64_t group = s.H / s.K;
  const double scale = s.scale;
  std::vector<double> dq_row(static_cast<size_t>(s.D));
  std::vector<double> dk_rows(static_cast<size_t>(s.T * s.D)), dv_rows(static_cast<size_t>(s.T * s.D));
  for (int64_t b = 0; b < s.B; ++b) {
    for (int64_t g = 0; g < s.K; ++g) {
      dk_rows.assign(dk_rows.size(), 0.0);
      dv_rows.assign(dv_rows.size(), 0.0);
      for (int64_t h = g * group; h < (g + 1) * group; ++h) {
        for (int64_t t = 0; t < s.T; ++t) {
          const int64_t n = b * s.T + t;
          const S* q_row = q + n * s.q_stride + h * s.D;
          const S* do_row = d_o + n * s.o_stride + h * s.D;
          const double delta = dot(do_row, o + n * s.o_stride + h * s.D, s.D);
          dq_row.assign(dq_row.size(), 0.0);
          for (int64_t u = first_key(s, b, t); u <= t; ++u) {
            const S* k_row = k + (b * s.T + u) * s.k_stride + g * s.D;
            const S* v_row = v + (b * s.T + u) * s.v_stride + g * s.D;
            const double p = std::exp(scale * dot(q_row, k_row, s.D) - get(lse[(b * s.H + h) * s.T + t]));
            const double ds = p * (dot(do_row, v_row, s.D) - delta);
            for (int64_t d = 0; d < s.D; ++d) {
              dv_rows[u * s.D + d] += p * get(do_row[d]);
              dk_rows[u * s.D + d] += scale * ds * get(q_row[d]);
              dq_row[d] += scale * ds * get(k_row[d]);
            }
          }
          for (int64_t d = 0; d < s.D; ++d) put(dq[n * s.q_stride + h * s.D + d], dq_row[d]);
        }
      }
      for (int64_t u = 0; u < s.T; ++u) {
        for (int64_t d = 0; d < s.D; ++d) {
          put(dk[(b * s.T + u) * s.k_stride + g * s.D + d], dk_rows[u * s.D + d]);
          put(dv[(b * s.T + u) * s.v_stride + g * s.D + d], dv_rows[u * s.D + d]);
        }
      }
    }
  }
}

}  // namespace kintsugi::kernels::reference
