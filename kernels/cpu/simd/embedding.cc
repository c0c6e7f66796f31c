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

// A row's mark in TableUpdate::used while it is about to be written for the first time.
constexpr int32_t kNew = 2;

template <class T>
void backward_columns(float* dtable, const T* dy, const int32_t* ids, int64_t N, int64_t C, int64_t rows,
                      const TableUpdate& update, int64_t begin, int64_t end) {
  if (!update.accumulate || update.used != nullptr) {
    for (int64_t r = 0; r < rows; ++r) {
      if (update.used != nullptr && update.used[r] != kNew) continue;
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

void mark_rows(const TableUpdate& update, const int32_t* ids, int64_t N, int64_t rows) {
  if (!update.accumulate) __builtin_memset(update.used, 0, static_cast<size_t>(rows) * sizeof(int32_t));
  for (int64_t n = 0; n < N; ++n) {
    if (update.used[ids[n]] == 0) update.used[ids[n]] = kNew;
  }
}

// The ids in their order are all that the backward pass here needs.
KernelError index(void*, const int32_t*, int64_t, int64_t, const TableUpdate&, StreamHandle) { return kKernelOk; }

KernelError backward(float* dtable, const void* dy, const int32_t* ids, const void*, int64_t N, int64_t C, int64_t rows,
                     const TableUpdate& update, DType dtype, StreamHandle) {
  if (update.used != nullptr) mark_rows(update, ids, N, rows);
  return for_storage(dtype, [&]<class T>(T*) {
    const int64_t elements = (N + (update.accumulate ? 0 : rows)) * C;
    parallel_ranges(ceil_div(C, kLanes), elements, [&](int64_t begin, int64_t end) {
      backward_columns(dtable, static_cast<const T*>(dy), ids, N, C, rows, update, begin * kLanes,
                       min_of(end * kLanes, C));
    });
    for (int64_t n = 0; update.used != nullptr && n < N; ++n) update.used[ids[n]] = 1;
    return kKernelOk;
  });
}

}  // namespace

const EmbeddingKernels& embedding() {
  static constexpr EmbeddingKernels kTable{forward, index, [](int64_t, int64_t) -> int64_t { return 0; }, backward};
  return kTable;
}

}  // namespace kintsugi::kernels::cpu::KTG_ISA
