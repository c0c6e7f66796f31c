// kernels/embedding.h, vectorised. The backward pass shares columns, never tokens, among threads, so that each element
// of the table is summed in ascending n by one thread.
#include "kernels/cpu/simd/parallel.h"
#include "kernels/cpu/simd/tables.h"

namespace kintsugi::kernels::cpu::KTG_ISA {
namespace {

KernelError forward(void* y, const int32_t* ids, const void* table, const int32_t* positions,
                    const void* position_table, int64_t N, int64_t C, DType dtype, StreamHandle) {
  return for_storage(dtype, [&]<class T>(T*) {
    const T* tokens = static_cast<const T*>(table);
    const T* places = static_cast<const T*>(position_table);
    parallel_ranges(N, N * C, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        const T* token = tokens + ids[n] * C;
        T* out = static_cast<T*>(y) + n * C;
        if (places == nullptr) {
          __builtin_memcpy(out, token, static_cast<size_t>(C) * sizeof(T));
          continue;
        }
        const T* place = places + positions[n] * C;
        for_vectors(
            C, [&](int64_t c, auto lanes) { store(out + c, load(token + c, lanes) + load(place + c, lanes), lanes); });
      }
    });
    return kKernelOk;
  });
}

template <class T>
void backward_columns(float* dtable, const T* dy, const int32_t* ids, int64_t N, int64_t C, int64_t rows,
                      bool accumulate, int64_t begin, int64_t end) {
  if (!accumulate) {
    for (int64_t r = 0; r < rows; ++r) {
      __builtin_memset(dtable + r * C + begin, 0, static_cast<size_t>(end - begin) * sizeof(float));
    }
  }
  for (int64_t n = 0; n < N; ++n) {
    float* row = dtable + ids[n] * C + begin;
    const T* d = dy + n * C + begin;
    for_vectors(end - begin,
                [&](int64_t c, auto lanes) { store(row + c, load(row + c, lanes) + load(d + c, lanes), lanes); });
  }
}

KernelError backward(float* dtable, const void* dy, const int32_t* ids, int64_t N, int64_t C, int64_t rows,
                     bool accumulate, void*, DType dtype, StreamHandle) {
  return for_storage(dtype, [&]<class T>(T*) {
    const int64_t elements = (N + (accumulate ? 0 : rows)) * C;
    parallel_ranges(ceil_div(C, kLanes), elements, [&](int64_t begin, int64_t end) {
      backward_columns(dtable, static_cast<const T*>(dy), ids, N, C, rows, accumulate, begin * kLanes,
                       min_of(end * kLanes, C));
    });
    return kKernelOk;
  });
}

}  // namespace

const EmbeddingKernels& embedding() {
  static constexpr EmbeddingKernels kTable{forward, backward, [](int64_t, int64_t) -> int64_t { return 0; }};
  return kTable;
}

}  // namespace kintsugi::kernels::cpu::KTG_ISA
