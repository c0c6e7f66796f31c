#include "runtime/data/permutation.h"

#include <bit>

#include "runtime/base/check.h"
#include "runtime/base/philox.h"

namespace kintsugi::runtime {
namespace {

// Four rounds make a pseudo-random permutation of large domains (Luby and Rackoff); small halves need some more.
constexpr uint32_t kFeistelRounds = 8;

constexpr uint64_t low_mask(int bits) { return (uint64_t{1} << bits) - 1; }

}  // namespace

Permutation::Permutation(int64_t n, uint64_t seed, uint32_t epoch) : n_(n), seed_(seed), epoch_(epoch) {
  KTG_CHECK(n >= 1) << "a permutation of " << n << " elements";
  const int bits = std::bit_width(static_cast<uint64_t>(n - 1));
  low_bits_ = bits / 2;
  high_bits_ = bits - low_bits_;
}

uint64_t Permutation::encrypt(uint64_t x) const {
  uint64_t low = x & low_mask(low_bits_);
  uint64_t high = x >> low_bits_;
  for (uint64_t round = 0; round < kFeistelRounds; ++round) {
    const uint64_t from = round % 2 == 0 ? low : high;
    // A half has at most 32 bits, so a round and its input share one index.
    const auto r = random_bits(seed_, RandomPurpose::kDataOrder, epoch_, (round << 32) | from);
    const uint64_t f = (uint64_t{r[1]} << 32) | r[0];
    if (round % 2 == 0) {
      high ^= f & low_mask(high_bits_);
    } else {
      low ^= f & low_mask(low_bits_);
    }
  }
  return (high << low_bits_) | low;
}

int64_t Permutation::operator()(int64_t i) const {
  KTG_CHECK(i >= 0 && i < n_) << "position " << i << " of a permutation of " << n_;
  uint64_t x = static_cast<uint64_t>(i);
  do {
    x = encrypt(x);
  } while (x >= static_cast<uint64_t>(n_));
  return static_cast<int64_t>(x);
}

}  // namespace kintsugi::runtime
