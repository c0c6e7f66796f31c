// kernels/reduce.h on the device. Sums in double have a fixed order that depends on sizes alone; sums of integers are
// added up by atomics, whose order cannot be seen.
#include "kernels/cross_entropy.h"
#include "kernels/cuda/flat.cuh"
#include "kernels/digest.h"
#include "kernels/reduce.h"

namespace kintsugi::kernels::cuda {
namespace {

constexpr int kSumThreads = 512;
constexpr int kMaxSources = 64;

// Calls f(x[i]) for the elements of [0, n) that are this thread's, of `threads` in all: 16 bytes at a time where
// `aligned`, several in flight.
template <class F>
__device__ inline void for_own_elements(const float* x, int64_t n, int64_t thread, int64_t threads, bool aligned, F f) {
  int64_t done = 0;
  if (aligned) {
    const int64_t vectors = n / 4;
    const float4* v = reinterpret_cast<const float4*>(x);
    int64_t i = thread;
    for (; i + 3 * threads < vectors; i += 4 * threads) {
      const float4 a = __ldcs(v + i), b = __ldcs(v + i + threads), c = __ldcs(v + i + 2 * threads),
                   d = __ldcs(v + i + 3 * threads);
      f(a.x), f(a.y), f(a.z), f(a.w), f(b.x), f(b.y), f(b.z), f(b.w);
      f(c.x), f(c.y), f(c.z), f(c.w), f(d.x), f(d.y), f(d.z), f(d.w);
    }
    for (; i < vectors; i += threads) {
      const float4 a = __ldcs(v + i);
      f(a.x), f(a.y), f(a.z), f(a.w);
    }
    done = vectors * 4;
  }
  for (int64_t i = done + thread; i < n; i += threads) f(x[i]);
}

// One block a partial; `aligned` must be the same for all of a partial's callers: it fixes the order.
__global__ void __launch_bounds__(kSumThreads)
    sum_squares_kernel(double* partials, const float* x, int64_t first, int64_t block, int64_t n, bool aligned) {
  __shared__ double scratch[32];
  const int64_t b = blockIdx.x;
  const int64_t left = n - (first + b) * block, length = left < 0 ? 0 : left < block ? left : block;
  double sum = 0;
  for_own_elements(x + b * block, length, threadIdx.x, kSumThreads, aligned, [&](float v) {
    const double d = v;
    sum = fma(d, d, sum);
  });
  sum = group_sum(sum, kSumThreads, scratch);
  if (threadIdx.x == 0) partials[b] = sum;
}

// The rows of a table that are to be read, of kSumThreads rows from `first` on: their numbers from there, ascending,
// into `list`. Returns how many. The block calls it together.
__device__ inline int32_t list_used_rows(const int32_t* used, int64_t first, int64_t rows, int32_t* list) {
  const bool own = first + threadIdx.x < rows && used[first + threadIdx.x] != 0;
  int32_t count = 0;
  const int32_t before = exclusive_sum<kSumThreads>(own ? 1 : 0, count);
  if (own) list[before] = static_cast<int32_t>(threadIdx.x);
  __syncthreads();
  return count;
}

// Adds to a thread's sum, in the order of the kernel above, what it would add there of the vectors of several ranges.
struct OwnSquares {
  static constexpr int kInFlight = 8;
  const float4* x;
  double sum = 0;

  __device__ void add(float4 v) {
    const double a = v.x, b = v.y, c = v.z, d = v.w;
    sum = fma(a, a, sum), sum = fma(b, b, sum), sum = fma(c, c, sum), sum = fma(d, d, sum);
  }
  // Of vectors [begin, end).
  __device__ static int64_t first_own(int64_t begin) {
    return begin + ((static_cast<int64_t>(threadIdx.x) - begin) & (kSumThreads - 1));
  }
  // range(j, begin, end) sets the j-th range's. Used rows may lie in few blocks, which then have the device's memory to
  // themselves: a thread reads several vectors before the first is added.
  template <class Range>
  __device__ void add_ranges(int32_t count, Range range) {
    int32_t j = -1;
    int64_t i = 0, end = 0;
    const auto settle = [&] {
      while (i >= end && j < count) {
        if (++j == count) return;
        int64_t begin = 0;
        range(j, begin, end);
        i = first_own(begin);
      }
    };
    settle();
    while (j < count) {
      float4 v[kInFlight];
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        v[k] = make_float4(0, 0, 0, 0);
        if (j == count) continue;
        v[k] = __ldcs(x + i);
        i += kSumThreads;
        settle();
      }
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) add(v[k]);
    }
  }
};

// The same sums, bit for bit, of a gradient with a table whose unused rows count as zeros: they are left out.
__global__ void __launch_bounds__(kSumThreads)
    sum_table_squares_kernel(double* partials, Gradient x, int64_t first, int64_t block, int64_t n, bool aligned) {
  __shared__ double scratch[32];
  __shared__ int32_t list[kSumThreads];
  const int64_t b = blockIdx.x;
  const int64_t left = n - (first + b) * block, length = left < 0 ? 0 : left < block ? left : block;
  const float* data = x.data + b * block;
  const int64_t table = x.table_begin - b * block, table_end = table + x.rows * x.width;  // seen from `data`
  const auto clip = [&](int64_t i) { return i < 0 ? 0 : i < length ? i : length; };
  const auto counts = [&](int64_t i) { return i < table || i >= table_end || x.used[(i - table) / x.width] != 0; };
  OwnSquares own{reinterpret_cast<const float4*>(data)};
  const int64_t vectors = aligned ? length / 4 : 0;
  if (aligned) {
    const auto dense = [&](int64_t from, int64_t to) {
      own.add_ranges(1, [&](int32_t, int64_t& begin, int64_t& end) { begin = from / 4, end = to / 4; });
    };
    const int64_t table_from = clip(table), table_to = clip(table_end);
    dense(0, table_from);
    const bool has_rows = table_from < table_to;
    const int64_t rows_end = has_rows ? (table_to - table + x.width - 1) / x.width : 0;
    for (int64_t row = has_rows ? (table_from - table) / x.width : 0; row < rows_end; row += kSumThreads) {
      const int32_t count = list_used_rows(x.used, row, rows_end, list);
      own.add_ranges(count, [&](int32_t j, int64_t& begin, int64_t& end) {
        const int64_t at = table + (row + list[j]) * x.width;
        begin = clip(at) / 4, end = clip(at + x.width) / 4;
      });
    }
    dense(table_to, vectors * 4);
  }
  for (int64_t i = vectors * 4 + threadIdx.x; i < length; i += kSumThreads) {
    const double d = counts(i) ? data[i] : 0.0f;
    own.sum = fma(d, d, own.sum);
  }
  const double sum = group_sum(own.sum, kSumThreads, scratch);
  if (threadIdx.x == 0) partials[b] = sum;
}

KernelError sum_squares(double* partials, const Gradient& x, int64_t first, int64_t count, int64_t block, int64_t n,
                        StreamHandle stream) {
  if (count <= 0) return kKernelOk;
  const auto blocks = static_cast<uint32_t>(count);
  const bool aligned = block % 4 == 0 && aligned16(x.data);
  if (x.has_table(0, count * block)) {
    sum_table_squares_kernel<<<blocks, kSumThreads, 0, stream_of(stream)>>>(partials, x, first, block, n, aligned);
  } else {
    sum_squares_kernel<<<blocks, kSumThreads, 0, stream_of(stream)>>>(partials, x.data, first, block, n, aligned);
  }
  return launch_error();
}

__global__ void __launch_bounds__(1024) sum_kernel(double* result, const float* x, int64_t n) {
  __shared__ double scratch[32];
  double parts[4] = {};
  for (int64_t i = threadIdx.x; i < n; i += 4 * 1024) {
#pragma unroll
    for (int p = 0; p < 4; ++p) parts[p] += i + p * 1024 < n ? x[i + p * 1024] : 0.0f;
  }
  const double sum = group_sum((parts[0] + parts[1]) + (parts[2] + parts[3]), 1024, scratch);
  if (threadIdx.x == 0) *result = sum;
}

KernelError sum(double* result, const float* x, int64_t n, StreamHandle stream) {
  sum_kernel<<<1, 1024, 0, stream_of(stream)>>>(result, x, n);
  return launch_error();
}

struct AddF32 {
  float* dst;
  const float* a;
  const float* b;
  static constexpr int kElements = 4;
  struct Loaded {
    float4 a, b;
  };
  __device__ Loaded load(int64_t i) const {
    return {__ldcs(reinterpret_cast<const float4*>(a + i)), __ldcs(reinterpret_cast<const float4*>(b + i))};
  }
  __device__ void store(int64_t i, const Loaded& l) const {
    *reinterpret_cast<float4*>(dst + i) = make_float4(l.a.x + l.b.x, l.a.y + l.b.y, l.a.z + l.b.z, l.a.w + l.b.w);
  }
  __device__ void one(int64_t i) const { dst[i] = a[i] + b[i]; }
};

KernelError add(float* dst, const float* a, const float* b, int64_t n, StreamHandle stream) {
  return launch_flat(AddF32{dst, a, b}, n, aligned16(dst, a, b), stream);
}

struct Sources {
  const float* pointers[kMaxSources];
};

__device__ inline float4 plus(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
__device__ inline float plus(float a, float b) { return a + b; }

constexpr int left_part(int count) {  // the largest power of two below count
  int p = 1;
  while (p * 2 < count) p *= 2;
  return p;
}

template <int kFirst, int kCount, class V>
__device__ inline V tree_of(const V* terms) {
  if constexpr (kCount == 1) {
    return terms[kFirst];
  } else {
    constexpr int kLeft = left_part(kCount);
    return plus(tree_of<kFirst, kLeft>(terms), tree_of<kFirst + kLeft, kCount - kLeft>(terms));
  }
}

// A number of sources known at compile time: all of an element's terms are loading at once.
template <int kCount>
struct TreeSum {
  float* dst;
  Sources sources;
  static constexpr int kElements = 4;
  struct Loaded {
    float4 terms[kCount];
  };
  __device__ Loaded load(int64_t i) const {
    Loaded l;
#pragma unroll
    for (int s = 0; s < kCount; ++s) l.terms[s] = __ldcs(reinterpret_cast<const float4*>(sources.pointers[s] + i));
    return l;
  }
  __device__ void store(int64_t i, const Loaded& l) const {
    *reinterpret_cast<float4*>(dst + i) = tree_of<0, kCount>(l.terms);
  }
  __device__ void one(int64_t i) const {
    float terms[kCount];
#pragma unroll
    for (int s = 0; s < kCount; ++s) terms[s] = sources.pointers[s][i];
    dst[i] = tree_of<0, kCount>(terms);
  }
};

// Any number: a partial sum waits for each complete power of two, as in a binary counter.
struct TreeSumOfMany {
  float* dst;
  Sources sources;
  int count;
  static constexpr int kElements = 4;
  static constexpr int kLevels = 7;
  static constexpr int kAtOnce = 4;
  struct Loaded {};
  __device__ Loaded load(int64_t) const { return {}; }

  template <class V, class Term>
  __device__ V total(Term term) const {
    V waiting[kLevels];
    for (int s = 0; s < count; s += kAtOnce) {
      V terms[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (s + j < count) terms[j] = term(s + j);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (s + j >= count) continue;
        V x = terms[j];
        bool placed = false;
#pragma unroll
        for (int level = 0; level < kLevels; ++level) {
          if (placed) continue;
          if (((s + j) >> level & 1) != 0) {
            x = plus(waiting[level], x);
          } else {
            waiting[level] = x;
            placed = true;
          }
        }
      }
    }
    V sum;
    bool any = false;
#pragma unroll
    for (int level = 0; level < kLevels; ++level) {
      if ((count >> level & 1) == 0) continue;
      sum = any ? plus(waiting[level], sum) : waiting[level];
      any = true;
    }
    return sum;
  }
  __device__ void store(int64_t i, const Loaded&) const {
    *reinterpret_cast<float4*>(dst + i) =
        total<float4>([&](int s) { return *reinterpret_cast<const float4*>(sources.pointers[s] + i); });
  }
  __device__ void one(int64_t i) const {
    dst[i] = total<float>([&](int s) { return sources.pointers[s][i]; });
  }
};

KernelError tree_sum(float* dst, const float* const* srcs, int64_t count, int64_t n, StreamHandle stream) {
  if (count < 1 || count > kMaxSources) return cudaErrorInvalidValue;
  Sources sources{};
  bool aligned = aligned16(dst);
  for (int64_t s = 0; s < count; ++s) {
    sources.pointers[s] = srcs[s];
    aligned = aligned && aligned16(srcs[s]);
  }
  switch (count) {
    case 2:
      return launch_flat(TreeSum<2>{dst, sources}, n, aligned, stream);
    case 4:
      return launch_flat(TreeSum<4>{dst, sources}, n, aligned, stream);
    case 8:
      return launch_flat(TreeSum<8>{dst, sources}, n, aligned, stream);
    default:
      return launch_flat(TreeSumOfMany{dst, sources, static_cast<int>(count)}, n, aligned, stream);
  }
}

template <class To, class From>
struct Convert {
  To* dst;
  const From* x;
  static constexpr int kElements = 4;
  struct Loaded {
    float v[4];
  };
  __device__ Loaded load(int64_t i) const {
    Loaded l;
    load_four(l.v, x + i);
    return l;
  }
  __device__ void store(int64_t i, const Loaded& l) const { store_four(dst + i, l.v); }
  __device__ void one(int64_t i) const { dst[i] = static_cast<To>(x[i]); }
};

KernelError convert(void* dst, const float* x, int64_t n, DType dst_dtype, StreamHandle stream) {
  return for_dtype(dst_dtype, [&]<class T>(T) {
    return launch_flat(Convert<T, float>{static_cast<T*>(dst), x}, n, aligned16(dst, x), stream);
  });
}

KernelError convert_to_f32(float* dst, const void* x, int64_t n, DType dtype, StreamHandle stream) {
  return for_dtype(dtype, [&]<class T>(T) {
    return launch_flat(Convert<float, T>{dst, static_cast<const T*>(x)}, n, aligned16(dst, x), stream);
  });
}

// Checks read with a grid that fills the device once.
constexpr int kCheckThreads = 256;
uint32_t check_blocks(int64_t n, int64_t elements_per_thread) {
  const int64_t needed = ceil_div(n, kCheckThreads * elements_per_thread);
  return static_cast<uint32_t>(needed < 8 * kMultiprocessors ? needed : 8 * kMultiprocessors);
}

__global__ void __launch_bounds__(kCheckThreads)
    count_valid_kernel(unsigned long long* count, const int32_t* targets, int64_t n) {
  __shared__ unsigned long long scratch[32];
  unsigned long long valid = 0;
  for (int64_t i = int64_t{blockIdx.x} * kCheckThreads + threadIdx.x; i < n; i += int64_t{gridDim.x} * kCheckThreads) {
    valid += targets[i] != kIgnoredTarget ? 1 : 0;
  }
  valid = group_sum(valid, kCheckThreads, scratch);
  if (threadIdx.x == 0) atomicAdd(count, valid);
}

KernelError count_valid(int64_t* count, const int32_t* targets, int64_t n, StreamHandle stream) {
  const cudaError_t zeroed = cudaMemsetAsync(count, 0, sizeof *count, stream_of(stream));
  if (zeroed != cudaSuccess || n <= 0) return zeroed;
  count_valid_kernel<<<check_blocks(n, 8), kCheckThreads, 0, stream_of(stream)>>>(
      reinterpret_cast<unsigned long long*>(count), targets, n);
  return launch_error();
}

__global__ void __launch_bounds__(kCheckThreads)
    digest_kernel(unsigned long long* digest, const float* x, int64_t n, uint64_t seed, bool aligned) {
  __shared__ unsigned long long scratch[32];
  const int64_t thread = int64_t{blockIdx.x} * kCheckThreads + threadIdx.x;
  const int64_t threads = int64_t{gridDim.x} * kCheckThreads;
  unsigned long long sum = 0;
  int64_t done = 0;
  if (aligned) {
    constexpr int kInFlight = 4;
    const int64_t vectors = n / 4;  // of two words each
    const ulonglong2* words = reinterpret_cast<const ulonglong2*>(x);
    const auto add = [&](ulonglong2 w, int64_t i) {
      const uint64_t key = digest_key(seed, 2 * i);
      sum += digest_word(w.x, key);
      sum += digest_word(w.y, key + kDigestStep);
    };
    int64_t i = thread;
    for (; i + (kInFlight - 1) * threads < vectors; i += kInFlight * threads) {
      ulonglong2 w[kInFlight];
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) w[j] = __ldcs(words + i + j * threads);
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) add(w[j], i + j * threads);
    }
    for (; i < vectors; i += threads) add(__ldcs(words + i), i);
    done = vectors * 2;
  }
  for (int64_t j = done + thread; 2 * j < n; j += threads) {
    const uint64_t low = __float_as_uint(x[2 * j]), high = 2 * j + 1 < n ? __float_as_uint(x[2 * j + 1]) : 0u;
    sum += digest_word(high << 32 | low, digest_key(seed, j));
  }
  sum = group_sum(sum, kCheckThreads, scratch);
  if (threadIdx.x == 0) atomicAdd(digest, sum);
}

KernelError digest(uint64_t* digest, const float* x, int64_t n, uint64_t seed, StreamHandle stream) {
  const cudaError_t zeroed = cudaMemsetAsync(digest, 0, sizeof *digest, stream_of(stream));
  if (zeroed != cudaSuccess || n <= 0) return zeroed;
  digest_kernel<<<check_blocks(n, 16), kCheckThreads, 0, stream_of(stream)>>>(
      reinterpret_cast<unsigned long long*>(digest), x, n, seed, aligned16(x));
  return launch_error();
}

// The exponent bits of an element are all ones when it is infinite or NaN.
__device__ inline bool any_not_finite(uint32_t word, float) { return (word & 0x7f800000u) == 0x7f800000u; }
__device__ inline bool any_not_finite(uint32_t word, Bf16) {
  return (word & 0x7f80u) == 0x7f80u || (word & 0x7f800000u) == 0x7f800000u;
}

template <class T>
__global__ void __launch_bounds__(kCheckThreads) non_finite_kernel(int32_t* flag, const T* x, int64_t n, bool aligned) {
  const int64_t thread = int64_t{blockIdx.x} * kCheckThreads + threadIdx.x;
  const int64_t threads = int64_t{gridDim.x} * kCheckThreads;
  bool found = false;
  int64_t done = 0;
  if (aligned) {
    constexpr int kInFlight = 4;
    const int64_t vectors = n / kVectorSize<T>;
    const uint4* v = reinterpret_cast<const uint4*>(x);
    const auto check = [&](uint4 w) {
      found = found || any_not_finite(w.x, T{}) || any_not_finite(w.y, T{}) || any_not_finite(w.z, T{}) ||
              any_not_finite(w.w, T{});
    };
    int64_t i = thread;
    for (; i + (kInFlight - 1) * threads < vectors; i += kInFlight * threads) {
      uint4 w[kInFlight];
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) w[j] = __ldcs(v + i + j * threads);
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) check(w[j]);
    }
    for (; i < vectors; i += threads) check(__ldcs(v + i));
    done = vectors * kVectorSize<T>;
  }
  for (int64_t i = done + thread; i < n; i += threads) found = found || !isfinite(static_cast<float>(x[i]));
  if (found) *flag = 1;  // several threads may write the same 1
}

KernelError non_finite(int32_t* flag, const void* x, int64_t n, DType dtype, StreamHandle stream) {
  if (n <= 0) return kKernelOk;
  return for_dtype(dtype, [&]<class T>(T) {
    non_finite_kernel<<<check_blocks(n, 4 * kVectorSize<T>), kCheckThreads, 0, stream_of(stream)>>>(
        flag, static_cast<const T*>(x), n, aligned16(x));
    return launch_error();
  });
}

}  // namespace

const ReduceKernels& reduce() {
  static constexpr ReduceKernels kTable{sum_squares,    sum,         add,    tree_sum,  convert,
                                        convert_to_f32, count_valid, digest, non_finite};
  return kTable;
}

}  // namespace kintsugi::kernels::cuda
