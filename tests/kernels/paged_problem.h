// Problems for paged decode attention.
//   S sequences   H query heads   K key/value heads   D head size   P positions in a kv_block
#pragma once

#include <gtest/gtest.h>

#include <algorithm>

#include "kernel_testing.h"
#include "kernels/paged_attention.h"

namespace kintsugi::kernels {

// Sequences of the given lengths in a cache whose blocks are handed out in shuffled order; unused slots hold NaN.
struct PagedProblem {
  PagedProblem(std::vector<int32_t> context_lens, int64_t heads, int64_t kv_heads, int64_t head_size, int64_t P,
               DType type, std::mt19937& rng, int64_t q_gap = 3)
      : lens(std::move(context_lens)), dtype(type) {
    const int64_t S = static_cast<int64_t>(lens.size());
    const int64_t longest = *std::max_element(lens.begin(), lens.end());
    const int64_t width = (longest + P - 1) / P + 1, num_blocks = S * width + 2;
    shape = {S,
             heads,
             kv_heads,
             head_size,
             P,
             width,
             heads * head_size + q_gap,
             heads * head_size + 1,
             1.0f / std::sqrt(static_cast<float>(head_size))};
    tables.resize(static_cast<size_t>(S * width));
    std::vector<int32_t> blocks(static_cast<size_t>(num_blocks));
    for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = static_cast<int32_t>(i);
    std::shuffle(blocks.begin(), blocks.end(), rng);
    std::copy_n(blocks.begin(), tables.size(), tables.begin());
    q = Array::normal(dtype, S * shape.q_stride, rng);
    k_cache = Array(dtype, num_blocks * P * kv_heads * head_size);
    v_cache = Array(dtype, k_cache.size());
    std::normal_distribution<float> normal;
    for (int64_t s = 0; s < S; ++s) {
      for (int64_t u = 0; u < lens[static_cast<size_t>(s)]; ++u) {
        for (int64_t i = 0; i < kv_heads * head_size; ++i) {
          const int64_t at = slot(s, u) * kv_heads * head_size + i;
          k_cache.set(at, normal(rng));
          v_cache.set(at, normal(rng));
        }
      }
    }
  }
  int64_t slot(int64_t s, int64_t u) const {
    const int64_t P = shape.kv_block_tokens;
    return tables[static_cast<size_t>(s * shape.block_table_width + u / P)] * P + u % P;
  }
  Array decode(const PagedAttentionKernels& kernels) const {
    Array o(dtype, shape.S * shape.o_stride);
    std::vector<char> workspace(static_cast<size_t>(kernels.decode_workspace_bytes(shape, dtype)));
    EXPECT_EQ(kernels.decode(o.data(), q.data(), k_cache.data(), v_cache.data(), tables.data(), lens.data(), shape,
                             dtype, workspace.data(), nullptr),
              kKernelOk);
    for (int64_t s = 0; s < shape.S; ++s) o.set((s + 1) * shape.o_stride - 1, 0.0f);  // the gap between rows
    return o;
  }
  // As in attention_test.cc: errors of scores, doubled, and a chain of length roundings, times max |v| (about 5 here).
  double tolerance() const {
    const double longest = *std::max_element(lens.begin(), lens.end());
    const double D = static_cast<double>(shape.D);
    return 5.0 * kF32Round * (2 * (D + 6) * (1 + 3 * std::sqrt(D)) + longest + 8);
  }

  std::vector<int32_t> lens, tables;
  DType dtype;
  PagedShape shape{};
  Array q{DType::kF32, 0}, k_cache{DType::kF32, 0}, v_cache{DType::kF32, 0};
};

}  // namespace kintsugi::kernels
