// Data of the communicators' suites: small integers, so that sums are exact and every element is compared with ==.
#pragma once

#include <bit>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tests/comm/communicator_suite.h"

namespace kintsugi::comm {

inline constexpr int64_t kCounts[] = {0, 1, 7, 4097, 140'003};
inline constexpr int64_t kMost = 140'003;

inline float value(int rank, int64_t i) { return static_cast<float>((i * 7 + rank * 13) % 101 - 50); }
inline float sum_of_values(int world_size, int64_t i) {
  float sum = 0;
  for (int r = 0; r < world_size; ++r) sum += value(r, i);
  return sum;
}

inline std::vector<float> values(int rank, int64_t count, int64_t shift = 0) {
  std::vector<float> out(count);
  for (int64_t i = 0; i < count; ++i) out[i] = value(rank, i + shift);
  return out;
}

// Says how many elements are wrong, and shows the first few.
inline void expect_equal(const std::vector<float>& got, const std::function<float(int64_t)>& want,
                         const std::string& what) {
  int64_t wrong = 0;
  std::string shown;
  for (int64_t i = 0; i < static_cast<int64_t>(got.size()); ++i) {
    if (std::bit_cast<uint32_t>(got[i]) == std::bit_cast<uint32_t>(want(i)) || got[i] == want(i)) continue;
    if (++wrong <= 3) {
      shown += " [" + std::to_string(i) + "] got " + std::to_string(got[i]) + " want " + std::to_string(want(i)) + ";";
    }
  }
  EXPECT_EQ(wrong, 0) << what << ": of " << got.size() << " elements:" << shown;
}

inline std::string at(const Seat& seat, int64_t count) {
  return "rank " + std::to_string(seat.rank()) + " count " + std::to_string(count);
}

}  // namespace kintsugi::comm
