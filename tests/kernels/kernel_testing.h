// What the tests of fast kernels share: arrays that start at odd addresses, hold NaN until written and notice writes
// beyond their ends; and the list of variants to run.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/bfloat16.h"
#include "kernels/cpu/isa.h"
#include "kernels/types.h"

namespace kintsugi::kernels {

constexpr uint32_t kSeed = 20240917;

// Unit roundoffs: a result rounded to the nearest differs from its value by at most this, relatively.
constexpr double kF32Round = 0x1p-24;
constexpr double kBF16Round = 0x1p-8;
constexpr double unit_roundoff(DType dtype) { return dtype == DType::kF32 ? kF32Round : kBF16Round; }

// A dense array of `n` elements, one element off any vector alignment, with guards on both sides.
class Array {
 public:
  Array(DType dtype, int64_t n) : dtype_(dtype), n_(n), bytes_(static_cast<size_t>((n + 2 * kGuard) * size_of(dtype))) {
    std::memset(bytes_.data(), 0xff, bytes_.size());  // NaN in both types
  }
  static Array normal(DType dtype, int64_t n, std::mt19937& rng, float scale = 1.0f) {
    std::normal_distribution<float> distribution(0.0f, scale);
    Array a(dtype, n);
    for (int64_t i = 0; i < n; ++i) a.set(i, distribution(rng));
    return a;
  }

  DType dtype() const { return dtype_; }
  int64_t size() const { return n_; }
  void* data() { return bytes_.data() + kGuard * size_of(dtype_); }
  const void* data() const { return bytes_.data() + kGuard * size_of(dtype_); }
  float* f32() { return static_cast<float*>(data()); }
  const float* f32() const { return static_cast<const float*>(data()); }
  // Element i on, as an untyped pointer.
  void* at(int64_t i) { return static_cast<unsigned char*>(data()) + i * size_of(dtype_); }
  const void* at(int64_t i) const { return static_cast<const unsigned char*>(data()) + i * size_of(dtype_); }

  float get(int64_t i) const {
    if (dtype_ == DType::kF32) return f32()[i];
    return to_float(static_cast<const BFloat16*>(data())[i]);
  }
  void set(int64_t i, float x) {
    if (dtype_ == DType::kF32) {
      f32()[i] = x;
    } else {
      static_cast<BFloat16*>(data())[i] = to_bfloat16(x);
    }
  }
  float max_abs() const {
    float m = 0;
    for (int64_t i = 0; i < n_; ++i) m = std::fmax(m, std::fabs(get(i)));
    return m;
  }
  // Nothing was written outside [0, n).
  bool guards_intact() const {
    const size_t guard = static_cast<size_t>(kGuard * size_of(dtype_));
    for (size_t i = 0; i < guard; ++i) {
      if (bytes_[i] != 0xff || bytes_[bytes_.size() - 1 - i] != 0xff) return false;
    }
    return true;
  }
  bool same_bits(const Array& other) const { return bytes_ == other.bytes_; }

 private:
  static constexpr int64_t kGuard = 33;
  DType dtype_;
  int64_t n_;
  std::vector<unsigned char> bytes_;
};

// |actual - expected| <= absolute + relative |expected| for every element, none NaN, and the guards untouched.
inline void expect_close(const Array& actual, const Array& expected, double absolute, double relative,
                         const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  EXPECT_TRUE(actual.guards_intact()) << what << ": written outside its bounds";
  for (int64_t i = 0; i < actual.size(); ++i) {
    const double a = actual.get(i), e = expected.get(i);
    ASSERT_TRUE(std::fabs(a - e) <= absolute + relative * std::fabs(e))
        << what << " element " << i << " of " << actual.size() << ": " << a << ", reference " << e << ", tolerance "
        << absolute << " + " << relative << " relative";
  }
}

// Every instruction set this machine can run, with each storage type.
struct VariantCase {
  const cpu::IsaVariant* variant;
  DType dtype;
};

inline std::vector<VariantCase> all_variant_cases() {
  std::vector<VariantCase> cases;
  for (const cpu::IsaVariant& variant : cpu::isa_variants()) {
    if (!variant.usable) continue;
    cases.push_back({&variant, DType::kF32});
    cases.push_back({&variant, DType::kBF16});
  }
  return cases;
}

inline std::string case_name(const ::testing::TestParamInfo<VariantCase>& info) {
  std::string name = std::string(info.param.variant->name) + "_" + name_of(info.param.dtype);
  std::erase(name, '-');
  return name;
}

class VariantTest : public ::testing::TestWithParam<VariantCase> {
 protected:
  ~VariantTest() override { cpu::set_num_threads(threads_); }
  DType dtype() const { return GetParam().dtype; }
  const KernelTable& fast() const { return *GetParam().variant->families; }
  std::mt19937 rng_{kSeed};

 private:
  int threads_ = cpu::num_threads();
};

// Calls f(threads) with 1, 2 and 3 threads set.
template <class F>
void for_thread_counts(F f) {
  for (const int threads : {1, 2, 3}) {
    cpu::set_num_threads(threads);
    f(threads);
  }
}

}  // namespace kintsugi::kernels
