// kernels/paged_attention.h as plain loops.
#include "kernels/paged_attention.h"

#include <cmath>
#include <limits>
#include <vector>

#include "kernels/reference/storage.h"

namespace kintsugi::kernels::reference {
namespace {

template <class T>
void decode_loops(T* o, const T* q, const T* k_cache, const T* v_cache, const int32_t* block_tables,
                  const int32_t* context_lens, const PagedShape& s) {
  const int64_t P = s.kv_block_tokens;
  for (int64_t seq = 0; seq < s.S; ++seq) {
    const int64_t length = context_lens[seq];
    std::vector<double> p(static_cast<size_t>(length));
    for (int64_t h = 0; h < s.H; ++h) {
      const int64_t g = h / (s.H / s.K);
      const T* q_row = q + seq * s.q_stride + h * s.D;
      const auto row_of = [&](int64_t u) {  // first element of position u's row in either cache
        return ((block_tables[seq * s.block_table_width + u / P] * P + u % P) * s.K + g) * s.D;
      };
      double max = -std::numeric_limits<double>::infinity();
      for (int64_t u = 0; u < length; ++u) {
        double dot = 0;
        for (int64_t d = 0; d < s.D; ++d) dot += get(q_row[d]) * get(k_cache[row_of(u) + d]);
        p[u] = static_cast<double>(s.scale) * dot;
        max = std::fmax(max, p[u]);
      }
      double sum = 0;
      for (int64_t u = 0; u < length; ++u) sum += p[u] = std::exp(p[u] - max);
      for (int64_t d = 0; d < s.D; ++d) {
        double acc = 0;
        for (int64_t u = 0; u < length; ++u) acc += p[u] * get(v_cache[row_of(u) + d]);
        put(o[seq * s.o_stride + h * s.D + d], length > 0 ? acc / sum : 0.0);
      }
    }
  }
}

KernelError decode(void* o, const void* q, const void* k_cache, const void* v_cache, const int32_t* block_tables,
                   const int32_t* context_lens, const PagedShape& shape, DType dtype, void* /*workspace*/,
                   StreamHandle) {
  return for_dtype(dtype, [&]<class T>(T) {
    decode_loops(static_cast<T*>(o), static_cast<const T*>(q), static_cast<const T*>(k_cache),
                 static_cast<const T*>(v_cache), block_tables, context_lens, shape);
  });
}

int64_t decode_workspace_bytes(const PagedShape&, DType) { return 0; }

KernelError write_kv(void* k_cache, void* v_cache, const void* k, const void* v, const int64_t* slots, int64_t N,
                     int64_t K, int64_t D, int64_t k_stride, int64_t v_stride, DType dtype, StreamHandle) {
  return for_dtype(dtype, [&]<class T>(T) {
    for (int64_t n = 0; n < N; ++n) {
      if (slots[n] < 0) continue;
      for (int64_t i = 0; i < K * D; ++i) {
        static_cast<T*>(k_cache)[slots[n] * K * D + i] = static_cast<const T*>(k)[n * k_stride + i];
        static_cast<T*>(v_cache)[slots[n] * K * D + i] = static_cast<const T*>(v)[n * v_stride + i];
      }
    }
  });
}

}  // namespace

const PagedAttentionKernels& paged_attention() {
  static constexpr PagedAttentionKernels kTable{decode, decode_workspace_bytes, write_kv};
  return kTable;
}

}  // namespace kintsugi::kernels::reference
