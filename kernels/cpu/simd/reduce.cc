// kernels/reduce.h, vectorised.
#include "kernels/cpu/simd/parallel.h"
#include "kernels/cpu/simd/tables.h"
#include "kernels/cross_entropy.h"

namespace kintsugi::kernels::cpu::KTG_ISA {
namespace {

double lanes_sum(const SquareSums& sums) {
  double s[kLanes];
  sums.store(s);
  for (int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (int64_t i = 0; i < width; ++i) s[i] += s[i + width];
  }
  return s[0];
}

double block_squares(const float* x, int64_t count) {
  SquareSums sums;
  for_vectors(count, [&](int64_t i, auto lanes) { sums.add(load(x + i, lanes)); });
  return lanes_sum(sums);
}

// Elements [begin, begin + count) of a gradient that has a table there: piece by piece with zeros in their places.
double table_squares(const Gradient& x, int64_t begin, int64_t count) {
  constexpr int64_t kPiece = 64 * kLanes;
  float piece[kPiece];
  SquareSums sums;
  for (int64_t done = 0; done < count; done += kPiece) {
    const int64_t from = begin + done, length = min_of(kPiece, count - done);
    x.for_parts(from, from + length, [&](int64_t part, int64_t end, bool written) {
      const auto bytes = static_cast<size_t>(end - part) * sizeof(float);
      if (written) {
        __builtin_memcpy(piece + (part - from), x.data + part, bytes);
      } else {
        __builtin_memset(piece + (part - from), 0, bytes);
      }
    });
    for_vectors(length, [&](int64_t i, auto lanes) { sums.add(load(piece + i, lanes)); });
  }
  return lanes_sum(sums);
}

KernelError sum_squares(double* partials, const Gradient& x, int64_t first, int64_t count, int64_t block, int64_t n,
                        StreamHandle) {
  parallel_ranges(count, count * block, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t left = n - (first + b) * block;
      const int64_t begin_of_b = b * block, length = left > 0 ? min_of(block, left) : 0;
      partials[b] = x.has_table(begin_of_b, begin_of_b + length) ? table_squares(x, begin_of_b, length)
                                                                 : block_squares(x.data + begin_of_b, length);
    }
  });
  return kKernelOk;
}

KernelError sum(double* result, const float* x, int64_t n, StreamHandle) {
  double total = 0;
  for (int64_t i = 0; i < n; ++i) total += static_cast<double>(x[i]);
  *result = total;
  return kKernelOk;
}

KernelError add(float* dst, const float* a, const float* b, int64_t n, StreamHandle) {
  parallel_elements(n, [&](int64_t begin, int64_t end) {
    for_vectors(end - begin, [&](int64_t i, auto lanes) {
      store(dst + begin + i, load(a + begin + i, lanes) + load(b + begin + i, lanes), lanes);
    });
  });
  return kKernelOk;
}

constexpr int64_t left_part(int64_t count) {  // the largest power of two below count
  int64_t p = 1;
  while (p * 2 < count) p *= 2;
  return p;
}

// The tree over `count` sources known at compile time: all partial sums in registers.
template <int64_t count, class Lanes>
inline Vec tree_of(const float* const* srcs, int64_t i, Lanes lanes) {
  if constexpr (count == 1) {
    return load(srcs[0] + i, lanes);
  } else {
    constexpr int64_t p = left_part(count);
    return tree_of<p>(srcs, i, lanes) + tree_of<count - p>(srcs + p, i, lanes);
  }
}

// Any count: a partial sum waits on the stack for each complete power of two, as in a binary counter.
template <class Lanes>
inline Vec tree_of_many(const float* const* srcs, int64_t count, int64_t i, Lanes lanes) {
  Vec waiting[7];
  int depth = 0;
  for (int64_t s = 0; s < count; ++s) {
    Vec x = load(srcs[s] + i, lanes);
    for (int64_t full = s; (full & 1) != 0; full >>= 1) x = waiting[--depth] + x;
    waiting[depth++] = x;
  }
  Vec total = waiting[--depth];
  while (depth > 0) total = waiting[--depth] + total;
  return total;
}

template <class Tree>
void tree_pass(float* dst, int64_t n, Tree tree) {
  parallel_elements(n, [&](int64_t begin, int64_t end) {
    for_vectors(end - begin, [&](int64_t i, auto lanes) { store(dst + begin + i, tree(begin + i, lanes), lanes); });
  });
}

template <int64_t count>
KernelError tree_sum_of(float* dst, const float* const* srcs, int64_t n) {
  tree_pass(dst, n, [&](int64_t i, auto lanes) { return tree_of<count>(srcs, i, lanes); });
  return kKernelOk;
}

KernelError tree_sum(float* dst, const float* const* srcs, int64_t count, int64_t n, StreamHandle) {
  if (count < 1 || count > 64) return EINVAL;
  switch (count) {
    case 1:
      return tree_sum_of<1>(dst, srcs, n);
    case 2:
      return tree_sum_of<2>(dst, srcs, n);
    case 3:
      return tree_sum_of<3>(dst, srcs, n);
    case 4:
      return tree_sum_of<4>(dst, srcs, n);
    case 6:
      return tree_sum_of<6>(dst, srcs, n);
    case 8:
      return tree_sum_of<8>(dst, srcs, n);
    case 16:
      return tree_sum_of<16>(dst, srcs, n);
    default:
      tree_pass(dst, n, [&](int64_t i, auto lanes) { return tree_of_many(srcs, count, i, lanes); });
      return kKernelOk;
  }
}

template <class To, class From>
void convert_elements(To* dst, const From* x, int64_t n) {
  parallel_elements(n, [&](int64_t begin, int64_t end) {
    for_vectors(end - begin, [&](int64_t i, auto lanes) { store(dst + begin + i, load(x + begin + i, lanes), lanes); });
  });
}

KernelError convert(void* dst, const float* x, int64_t n, DType dst_dtype, StreamHandle) {
  return for_storage(dst_dtype, [&]<class T>(T*) {
    convert_elements(static_cast<T*>(dst), x, n);
    return kKernelOk;
  });
}

KernelError convert_to_f32(float* dst, const void* x, int64_t n, DType dtype, StreamHandle) {
  return for_storage(dtype, [&]<class T>(T*) {
    convert_elements(dst, static_cast<const T*>(x), n);
    return kKernelOk;
  });
}

KernelError count_valid(int64_t* count, const int32_t* targets, int64_t n, StreamHandle) {
  int64_t valid = 0;
  for (int64_t i = 0; i < n; ++i) valid += targets[i] != kIgnoredTarget;
  *count = valid;
  return kKernelOk;
}

uint64_t digest_of_words(const float* x, int64_t num_words, uint64_t key) {
  DigestSums sums;
  int64_t j = 0;
  for (; j + 8 <= num_words; j += 8) {
    sums.add(x + 2 * j, key);
    key += 8 * kDigestStep;
  }
  uint64_t total = sums.total();
  for (; j < num_words; ++j) {
    uint64_t word;
    __builtin_memcpy(&word, x + 2 * j, sizeof word);
    total += digest_word(word, key);
    key += kDigestStep;
  }
  return total;
}

KernelError digest(uint64_t* digest, const float* x, int64_t n, uint64_t seed, StreamHandle) {
  uint64_t total = 0;
  parallel_ranges(n / 2, n, [&](int64_t begin, int64_t end) {  // whole words; wrapping sums need no order
    const uint64_t part = digest_of_words(x + 2 * begin, end - begin, digest_key(seed, begin));
    __atomic_fetch_add(&total, part, __ATOMIC_RELAXED);
  });
  if (n % 2 != 0) {
    uint32_t last;
    __builtin_memcpy(&last, x + n - 1, sizeof last);
    total += digest_word(last, digest_key(seed, n / 2));
  }
  *digest = total;
  return kKernelOk;
}

KernelError non_finite(int32_t* flag, const void* x, int64_t n, DType dtype, StreamHandle) {
  return for_storage(dtype, [&]<class T>(T*) {
    parallel_elements(n, [&](int64_t begin, int64_t end) {
      Vec zeros = Vec::zero();  // x - x: 0 for finite x, else NaN
      for_vectors(end - begin, [&](int64_t i, auto lanes) {
        const Vec v = load(static_cast<const T*>(x) + begin + i, lanes);
        zeros = zeros + (v - v);
      });
      if (zeros.sum() != 0.0f) __atomic_store_n(flag, 1, __ATOMIC_RELAXED);
    });
    return kKernelOk;
  });
}

}  // namespace

const ReduceKernels& reduce() {
  static constexpr ReduceKernels kTable{sum_squares,    sum,         add,    tree_sum,  convert,
                                        convert_to_f32, count_valid, digest, non_finite};
  return kTable;
}

}  // namespace kintsugi::kernels::cpu::KTG_ISA
