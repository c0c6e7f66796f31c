// kernels/norm.h, vectorised. A row is read from memory once: statistics in a first pass, results in a second from
// cache. Weight gradients: each block of kBlockRows rows adds into its own partial row of the workspace, and the
// partial rows are then added in ascending order, so the sum's order depends on N alone.
#include "kernels/norm.h"

#include "kernels/cpu/simd/parallel.h"
#include "kernels/cpu/simd/tables.h"

namespace kintsugi::kernels::cpu::KTG_ISA {
namespace {

constexpr int64_t kBlockRows = 64;

int64_t row_offset(int64_t n, int64_t C, RowLayout layout) {
  if (layout.inner == 1) return n * (layout.outer_stride == 0 ? C : layout.outer_stride);
  return n / layout.inner * layout.outer_stride + n % layout.inner * C;
}

// Sum over a row of f(c, lanes), a Vec whose lanes beyond the row are zero, in four interleaved sums.
template <class F>
inline float row_sum(int64_t C, F f) {
  Vec s0 = Vec::zero(), s1 = s0, s2 = s0, s3 = s0;
  int64_t c = 0;
  for (; c + 4 * kLanes <= C; c += 4 * kLanes) {
    s0 = s0 + f(c, FullVector{});
    s1 = s1 + f(c + kLanes, FullVector{});
    s2 = s2 + f(c + 2 * kLanes, FullVector{});
    s3 = s3 + f(c + 3 * kLanes, FullVector{});
  }
  for_vectors(C - c, [&](int64_t i, auto lanes) { s0 = s0 + f(c + i, lanes); });
  return ((s0 + s1) + (s2 + s3)).sum();
}

inline float inverse_sqrt(float x) { return 1.0f / __builtin_sqrtf(x); }

// Adds partial rows 0 .. blocks-1 (each `stride` apart) to, or in place of, dw (C).
void add_partials(float* dw, const float* partials, int64_t blocks, int64_t stride, int64_t C, bool accumulate) {
  for_vectors(C, [&](int64_t c, auto lanes) {
    Vec sum = accumulate ? load(dw + c, lanes) : Vec::zero();
    for (int64_t b = 0; b < blocks; ++b) sum = sum + load(partials + b * stride + c, lanes);
    store(dw + c, sum, lanes);
  });
}

// f(begin row, end row, partial row) for each block of rows, in parallel; the partial rows come zeroed.
template <class F>
void for_row_blocks(int64_t N, int64_t width, float* partials, F f) {
  parallel_ranges(ceil_div(N, kBlockRows), N * width, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      float* partial = partials + b * width;
      __builtin_memset(partial, 0, static_cast<size_t>(width) * sizeof(float));
      f(b * kBlockRows, min_of((b + 1) * kBlockRows, N), partial);
    }
  });
}

template <class T>
inline float rms_row(T* y, const T* x, const float* w, int64_t C, float eps) {
  const float squares = row_sum(C, [&](int64_t c, auto lanes) {
    const Vec a = load(x + c, lanes);
    return a * a;
  });
  const float rstd = inverse_sqrt(squares / static_cast<float>(C) + eps);
  const Vec r = Vec::set(rstd);
  for_vectors(C, [&](int64_t c, auto lanes) { store(y + c, load(x + c, lanes) * r * load(w + c, lanes), lanes); });
  return rstd;
}

template <class T>
inline void add_row(T* sum, const T* x, const T* residual, int64_t C) {
  for_vectors(C, [&](int64_t c, auto lanes) { store(sum + c, load(x + c, lanes) + load(residual + c, lanes), lanes); });
}

struct LayerStatistics {
  float mean, rstd;
};

template <class T>
inline LayerStatistics layer_row(T* y, const T* x, const float* w, const float* b, int64_t C, float eps) {
  const float mean = row_sum(C, [&](int64_t c, auto lanes) { return load(x + c, lanes); }) / static_cast<float>(C);
  const Vec m = Vec::set(mean);
  const float squares = row_sum(C, [&](int64_t c, auto lanes) {
    const Vec d = keep(load(x + c, lanes) - m, lanes, 0.0f);
    return d * d;
  });
  const float rstd = inverse_sqrt(squares / static_cast<float>(C) + eps);
  const Vec r = Vec::set(rstd);
  for_vectors(C, [&](int64_t c, auto lanes) {
    store(y + c, mul_add((load(x + c, lanes) - m) * r, load(w + c, lanes), load(b + c, lanes)), lanes);
  });
  return {mean, rstd};
}

KernelError rms_norm_forward(void* y, float* rstd, const void* x, const float* w, int64_t N, int64_t C,
                             RowLayout layout, float eps, DType dtype, StreamHandle) {
  return for_storage(dtype, [&]<class T>(T*) {
    parallel_ranges(N, N * C, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        const int64_t row = row_offset(n, C, layout);
        rstd[n] = rms_row(static_cast<T*>(y) + row, static_cast<const T*>(x) + row, w, C, eps);
      }
    });
    return kKernelOk;
  });
}

KernelError residual_rms_norm_forward(void* sum, void* y, float* rstd, const void* x, const void* residual,
                                      const float* w, int64_t N, int64_t C, float eps, DType dtype, StreamHandle) {
  return for_storage(dtype, [&]<class T>(T*) {
    parallel_ranges(N, N * C, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        T* sum_row = static_cast<T*>(sum) + n * C;
        add_row(sum_row, static_cast<const T*>(x) + n * C, static_cast<const T*>(residual) + n * C, C);
        rstd[n] = rms_row(static_cast<T*>(y) + n * C, static_cast<const T*>(sum_row), w, C, eps);
      }
    });
    return kKernelOk;
  });
}

// dx = rstd (g - xhat mean(g xhat)) with g = dy w and xhat = x rstd; partial += dy xhat.
template <class T>
inline void rms_backward_row(T* dx, float* partial, const T* dy, const T* x, const float* w, float rstd,
                             const T* dresidual, int64_t C) {
  const float dot =
      row_sum(C, [&](int64_t c, auto lanes) { return load(dy + c, lanes) * load(w + c, lanes) * load(x + c, lanes); });
  const Vec r = Vec::set(rstd), mean = Vec::set(dot * rstd / static_cast<float>(C));
  for_vectors(C, [&](int64_t c, auto lanes) {
    const Vec d = load(dy + c, lanes), xhat = load(x + c, lanes) * r;
    store(partial + c, mul_add(d, xhat, load(partial + c, lanes)), lanes);
    Vec g = r * neg_mul_add(xhat, mean, d * load(w + c, lanes));
    if (dresidual != nullptr) g = g + load(dresidual + c, lanes);
    store(dx + c, g, lanes);
  });
}

KernelError rms_norm_backward(void* dx, float* dw, const void* dy, const void* x, const float* w, const float* rstd,
                              const void* dresidual, int64_t N, int64_t C, RowLayout layout, bool accumulate_dw,
                              void* workspace, DType dtype, StreamHandle) {
  return for_storage(dtype, [&]<class T>(T*) {
    float* partials = static_cast<float*>(workspace);
    for_row_blocks(N, C, partials, [&](int64_t begin, int64_t end, float* partial) {
      for (int64_t n = begin; n < end; ++n) {
        const int64_t row = row_offset(n, C, layout);
        const T* residual_row = dresidual != nullptr ? static_cast<const T*>(dresidual) + row : nullptr;
        rms_backward_row(static_cast<T*>(dx) + row, partial, static_cast<const T*>(dy) + row,
                         static_cast<const T*>(x) + row, w, rstd[n], residual_row, C);
      }
    });
    add_partials(dw, partials, ceil_div(N, kBlockRows), C, C, accumulate_dw);
    return kKernelOk;
  });
}

KernelError layer_norm_forward(void* y, float* mean, float* rstd, const void* x, const float* w, const float* b,
                               int64_t N, int64_t C, float eps, DType dtype, StreamHandle) {
  return for_storage(dtype, [&]<class T>(T*) {
    parallel_ranges(N, N * C, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        const LayerStatistics s = layer_row(static_cast<T*>(y) + n * C, static_cast<const T*>(x) + n * C, w, b, C, eps);
        mean[n] = s.mean;
        rstd[n] = s.rstd;
      }
    });
    return kKernelOk;
  });
}

KernelError residual_layer_norm_forward(void* sum, void* y, float* mean, float* rstd, const void* x,
                                        const void* residual, const float* w, const float* b, int64_t N, int64_t C,
                                        float eps, DType dtype, StreamHandle) {
  return for_storage(dtype, [&]<class T>(T*) {
    parallel_ranges(N, N * C, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        T* sum_row = static_cast<T*>(sum) + n * C;
        add_row(sum_row, static_cast<const T*>(x) + n * C, static_cast<const T*>(residual) + n * C, C);
        const LayerStatistics s = layer_row(static_cast<T*>(y) + n * C, static_cast<const T*>(sum_row), w, b, C, eps);
        mean[n] = s.mean;
        rstd[n] = s.rstd;
      }
    });
    return kKernelOk;
  });
}

// dx = rstd (g - mean(g) - xhat mean(g xhat)) with g = dy w and xhat = (x - mean) rstd;
// partial's first C elements += dy xhat, its last C elements += dy.
template <class T>
inline void layer_backward_row(T* dx, float* partial, const T* dy, const T* x, const float* w, LayerStatistics s,
                               const T* dresidual, int64_t C) {
  const Vec m = Vec::set(s.mean), r = Vec::set(s.rstd);
  const float inv_c = 1.0f / static_cast<float>(C);
  const float g_sum = row_sum(C, [&](int64_t c, auto lanes) { return load(dy + c, lanes) * load(w + c, lanes); });
  const float gx_sum = row_sum(C, [&](int64_t c, auto lanes) {  // dy = 0 beyond the row
    return load(dy + c, lanes) * load(w + c, lanes) * ((load(x + c, lanes) - m) * r);
  });
  const Vec g_mean = Vec::set(g_sum * inv_c), gx_mean = Vec::set(gx_sum * inv_c);
  for_vectors(C, [&](int64_t c, auto lanes) {
    const Vec d = load(dy + c, lanes), xhat = (load(x + c, lanes) - m) * r;
    store(partial + c, mul_add(d, xhat, load(partial + c, lanes)), lanes);
    store(partial + C + c, load(partial + C + c, lanes) + d, lanes);
    Vec g = r * neg_mul_add(xhat, gx_mean, d * load(w + c, lanes) - g_mean);
    if (dresidual != nullptr) g = g + load(dresidual + c, lanes);
    store(dx + c, g, lanes);
  });
}

KernelError layer_norm_backward(void* dx, float* dw, float* db, const void* dy, const void* x, const float* w,
                                const float* mean, const float* rstd, const void* dresidual, int64_t N, int64_t C,
                                bool accumulate_dw, void* workspace, DType dtype, StreamHandle) {
  return for_storage(dtype, [&]<class T>(T*) {
    float* partials = static_cast<float*>(workspace);
    for_row_blocks(N, 2 * C, partials, [&](int64_t begin, int64_t end, float* partial) {
      for (int64_t n = begin; n < end; ++n) {
        const T* residual_row = dresidual != nullptr ? static_cast<const T*>(dresidual) + n * C : nullptr;
        layer_backward_row(static_cast<T*>(dx) + n * C, partial, static_cast<const T*>(dy) + n * C,
                           static_cast<const T*>(x) + n * C, w, {mean[n], rstd[n]}, residual_row, C);
      }
    });
    add_partials(dw, partials, ceil_div(N, kBlockRows), 2 * C, C, accumulate_dw);
    add_partials(db, partials + C, ceil_div(N, kBlockRows), 2 * C, C, accumulate_dw);
    return kKernelOk;
  });
}

int64_t backward_workspace_bytes(int64_t N, int64_t C) {
  return ceil_div(N, kBlockRows) * 2 * C * static_cast<int64_t>(sizeof(float));
}

}  // namespace

const NormKernels& norm() {
  static constexpr NormKernels kTable{rms_norm_forward,        residual_rms_norm_forward,   rms_norm_backward,
                                      layer_norm_forward,      residual_layer_norm_forward, layer_norm_backward,
                                      backward_workspace_bytes};
  return kTable;
}

}  // namespace kintsugi::kernels::cpu::KTG_ISA
