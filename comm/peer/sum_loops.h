// The loops of sum.cc for one instruction set. Included several times, inside a namespace each, with
//   KTG_VECTOR_BYTES    width of a vector
//   KTG_STREAM(p, v)    stores v at p (aligned to the width) past the caches
// No include guard on purpose; no standard library in here, so that no inline function of it is compiled for an
// instruction set that the machine may lack.

typedef float Vec __attribute__((vector_size(KTG_VECTOR_BYTES), aligned(4), may_alias));
constexpr int64_t kLanes = KTG_VECTOR_BYTES / 4;

template <int N>
inline __attribute__((always_inline)) Vec sum_at(const float* const* srcs, int64_t i) {
  if constexpr (N == 1) {
    return *reinterpret_cast<const Vec*>(srcs[0] + i);
  } else {
    return sum_at<N / 2>(srcs, i) + sum_at<N / 2>(srcs + N / 2, i);
  }
}

template <int N>
inline __attribute__((always_inline)) float sum_one(const float* const* srcs, int64_t i) {
  if constexpr (N == 1) {
    return srcs[0][i];
  } else {
    return sum_one<N / 2>(srcs, i) + sum_one<N / 2>(srcs + N / 2, i);
  }
}

// One cache line (16 floats) at a time, so that a streaming store fills it at once.
template <int N, bool kStream>
void sum_even(float* const* dsts, int num_dsts, const float* const* srcs_in, int64_t n) {
  const float* srcs[N];
  for (int s = 0; s < N; ++s) srcs[s] = srcs_in[s];
  constexpr int64_t kLine = 16;
  constexpr int kVecs = static_cast<int>(kLine / kLanes);
  int64_t i = 0;
  for (; i + kLine <= n; i += kLine) {
    Vec v[kVecs];
    for (int k = 0; k < kVecs; ++k) v[k] = sum_at<N>(srcs, i + k * kLanes);
    for (int d = 0; d < num_dsts; ++d) {
      for (int k = 0; k < kVecs; ++k) {
        float* p = dsts[d] + i + k * kLanes;
        if constexpr (kStream) {
          KTG_STREAM(p, v[k]);
        } else {
          *reinterpret_cast<Vec*>(p) = v[k];
        }
      }
    }
  }
  for (; i < n; ++i) {
    const float sum = sum_one<N>(srcs, i);
    for (int d = 0; d < num_dsts; ++d) dsts[d][i] = sum;
  }
}

// dst = a + b over one block.
inline void add_block(float* dst, const float* a, const float* b, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    *reinterpret_cast<Vec*>(dst + i) = *reinterpret_cast<const Vec*>(a + i) + *reinterpret_cast<const Vec*>(b + i);
  }
  for (; i < n; ++i) dst[i] = a[i] + b[i];
}

template <bool kStream>
void copy_floats(float* const* dsts, int num_dsts, const float* src, int64_t n) {
  const float* srcs[1] = {src};
  sum_even<1, kStream>(dsts, num_dsts, srcs, n);
}
