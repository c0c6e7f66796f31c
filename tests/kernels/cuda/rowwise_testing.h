// What the tests of the device's memory-bound kernels share: fresh random inputs, and calls on device copies.
#pragma once

#include <iostream>
#include <random>

#include "kernels/kernel_table.h"
#include "tests/kernels/cuda/device_array.h"

namespace kintsugi::kernels {

// Fresh inputs in each run; the seed is printed, and set here to repeat a run.
inline uint32_t run_seed() {
  static const uint32_t kRunSeed = [] {
    const uint32_t seed = std::random_device{}();
    std::cout << "inputs from seed " << seed << std::endl;
    return seed;
  }();
  return kRunSeed;
}

// A sum of `terms` products of normal numbers: every rounding errs by at most an ulp of a partial sum (tensor cores cut
// off where others round), which stays below 8 sqrt(terms) here (8 standard deviations).
inline double sum_error(int64_t terms) {
  const double n = static_cast<double>(terms) + 4;
  return n * 2 * kF32Round * 8 * std::sqrt(n);
}

// Once with each storage type.
class CudaRowwiseTest : public ::testing::TestWithParam<DType> {
 protected:
  DType dtype() const { return GetParam(); }
  Array normal(int64_t n, float scale = 1.0f) { return Array::normal(dtype(), n, rng_, scale); }
  Array normal_f32(int64_t n, float scale = 1.0f) { return Array::normal(DType::kF32, n, rng_, scale); }
  DeviceMemory space(int64_t n) const { return DeviceMemory(n * size_of(dtype())); }
  static DeviceMemory space_f32(int64_t n) { return DeviceMemory(n * 4); }
  std::vector<int32_t> integers(int64_t n, int64_t bound) {
    std::vector<int32_t> values(static_cast<size_t>(n));
    for (auto& v : values) v = static_cast<int32_t>(rng_() % static_cast<uint32_t>(bound));
    return values;
  }
  std::mt19937 rng_{run_seed()};
};

inline std::string dtype_name(const ::testing::TestParamInfo<DType>& info) { return name_of(info.param); }

#define KTG_FOR_BOTH_TYPES(suite) \
  INSTANTIATE_TEST_SUITE_P(Cuda, suite, ::testing::Values(DType::kF32, DType::kBF16), dtype_name)

inline void expect_same_bits(const Array& a, const Array& b, const std::string& what) {
  int shown = 0;
  for (int64_t i = 0; i < a.size() && shown < 4; ++i) {
    if (std::memcmp(a.at(i), b.at(i), static_cast<size_t>(size_of(a.dtype()))) == 0) continue;
    ADD_FAILURE() << what << " element " << i << " of " << a.size() << ": " << a.get(i) << " and " << b.get(i);
    ++shown;
  }
}

}  // namespace kintsugi::kernels
