// kernels/embedding.h as plain loops. The backward sum is in fp32 because its order is part of the contract.
#include "kernels/embedding.h"

#include "kernels/reference/storage.h"

namespace kintsugi::kernels::reference {
namespace {

KernelError forward(void* y, const int32_t* ids, const void* table, const int32_t* positions,
                    const void* position_table, int64_t N, int64_t C, DType dtype, StreamHandle) {
  return for_dtype(dtype, [&]<class T>(T) {
    const T* tokens = static_cast<const T*>(table);
    const T* places = static_cast<const T*>(position_table);
    for (int64_t n = 0; n < N; ++n) {
      for (int64_t c = 0; c < C; ++c) {
        const double token = get(tokens[ids[n] * C + c]);
        put(static_cast<T*>(y)[n * C + c], places != nullptr ? token + get(places[positions[n] * C + c]) : token);
      }
    }
  });
}

KernelError index(void*, const int32_t*, int64_t, int64_t, const TableUpdate&, StreamHandle) { return kKernelOk; }

KernelError backward(float* dtable, const void* dy, const int32_t* ids, const void*, int64_t N, int64_t C, int64_t rows,
                     const TableUpdate& update, DType dtype, StreamHandle) {
  return for_dtype(dtype, [&]<class T>(T) {
    int32_t* const used = update.used;
    for (int64_t r = 0; used != nullptr && !update.accumulate && r < rows; ++r) used[r] = 0;
    if (used == nullptr && !update.accumulate) {
      for (int64_t i = 0; i < rows * C; ++i) dtable[i] = 0.0f;
    }
    for (int64_t n = 0; used != nullptr && n < N; ++n) {
      if (used[ids[n]] != 0) continue;
      used[ids[n]] = 1;
      for (int64_t c = 0; c < C; ++c) dtable[ids[n] * C + c] = 0.0f;
    }
    for (int64_t n = 0; n < N; ++n) {
      for (int64_t c = 0; c < C; ++c) {
        dtable[ids[n] * C + c] += static_cast<float>(get(static_cast<const T*>(dy)[n * C + c]));
      }
    }
  });
}

}  // namespace

const EmbeddingKernels& embedding() {
  static constexpr EmbeddingKernels kTable{forward, index, [](int64_t, int64_t) -> int64_t { return 0; }, backward};
  return kTable;
}

}  // namespace kintsugi::kernels::reference
