// A flat gradient of which some rows may never have been written.
#pragma once

#include <cstdint>

namespace kintsugi::kernels {

// Elements [table_begin, table_begin + rows * width) are the rows of an embedding's table. Where used[row] is 0 no
// token named the row: its elements count as zeros, and whatever lies there is not read as a number. The device reads
// 16 bytes at a time: table_begin and width are multiples of 4.
struct Gradient {
  [[gnu::always_inline]] Gradient(const float* data_) : data(data_) {}  // implicit: every element has been written

  const float* data;
  const int32_t* used = nullptr;  // (rows); null: every element has been written
  int64_t table_begin = 0;        // counted from `data`; negative when that lies within or behind the table
  int64_t width = 1, rows = 0;

  // As seen from element i on.
  [[gnu::always_inline]] Gradient from(int64_t i) const {
    Gradient g = *this;
    g.data += i;
    g.table_begin -= i;
    return g;
  }
  [[gnu::always_inline]] bool has_table(int64_t begin, int64_t end) const {
    return used != nullptr && begin < table_begin + rows * width && end > table_begin;
  }
  // Calls body(begin, end, written) for the parts of [begin, end) in ascending order.
  template <class Body>
  void for_parts(int64_t begin, int64_t end, Body&& body) const {
    while (begin < end) {
      const bool inside = has_table(begin, begin + 1);
      const int64_t row = inside ? (begin - table_begin) / width : 0;
      int64_t part_end = inside ? table_begin + (row + 1) * width : end;
      if (!inside && used != nullptr && begin < table_begin && table_begin < end) part_end = table_begin;
      if (part_end > end) part_end = end;
      body(begin, part_end, !inside || used[row] != 0);
      begin = part_end;
    }
  }
};

}  // namespace kintsugi::kernels
