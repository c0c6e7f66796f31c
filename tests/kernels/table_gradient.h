// A gradient with a table, of which some rows were never written and hold NaN; and the same with zeros there.
#pragma once

#include "kernels/gradient.h"
#include "tests/kernels/kernel_testing.h"

namespace kintsugi::kernels {

struct TableGradient {
  Array data, dense;
  std::vector<int32_t> used;
  int64_t begin, width;

  // The table begins at `begin_` of n elements. Its first half has about one row in `rarity` that is used, its second
  // half almost none.
  TableGradient(int64_t n, int64_t begin_, int64_t width_, int64_t rows, uint32_t rarity, std::mt19937& rng)
      : data(Array::normal(DType::kF32, n, rng)),
        dense(data),
        used(static_cast<size_t>(rows)),
        begin(begin_),
        width(width_) {
    for (int64_t row = 0; row < rows; ++row) {
      int32_t& mark = used[static_cast<size_t>(row)];
      mark = rng() % (row < rows / 2 ? rarity : 20 * rarity) == 0 ? 3 : 0;
      for (int64_t i = begin + row * width; mark == 0 && i < begin + (row + 1) * width; ++i) {
        data.set(i, std::numeric_limits<float>::quiet_NaN());
        dense.set(i, 0.0f);
      }
    }
  }

  // Over copies of `data` and `used` where the kernel reads them.
  Gradient at(const float* data_there, const int32_t* used_there) const {
    Gradient g(data_there);
    g.used = used_there;
    g.table_begin = begin;
    g.width = width;
    g.rows = static_cast<int64_t>(used.size());
    return g;
  }
};

}  // namespace kintsugi::kernels
