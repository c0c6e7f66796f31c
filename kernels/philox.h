// Counter-based random numbers for host and device code: Philox 4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel Random
// Numbers: As Easy as 1, 2, 3", SC 2011). The same numbers as runtime/base/philox.h, which stands alone as this folder
// does; tests/runtime/base/philox_test.cc holds the two together.
#pragma once

#include <cstdint>

namespace kintsugi::kernels {

inline constexpr int kPhiloxRounds = 10;
inline constexpr uint64_t kPhiloxMultiplier0 = 0xD2511F53, kPhiloxMultiplier1 = 0xCD9E8D57;
inline constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9, kPhiloxWeyl1 = 0xBB67AE85;

struct PhiloxBlock {
  uint32_t word[4];
};

// One block: 128 random bits of the counter under the key. constexpr: device code calls it, too.
[[gnu::always_inline]] constexpr PhiloxBlock philox4x32(PhiloxBlock counter, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t product0 = kPhiloxMultiplier0 * counter.word[0];
    const uint64_t product1 = kPhiloxMultiplier1 * counter.word[2];
    counter = {{static_cast<uint32_t>(product1 >> 32) ^ counter.word[1] ^ key0, static_cast<uint32_t>(product1),
                static_cast<uint32_t>(product0 >> 32) ^ counter.word[3] ^ key1, static_cast<uint32_t>(product0)}};
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  return counter;
}

// RandomPurpose::kSampling of runtime/base/philox.h.
inline constexpr uint32_t kSamplingPurpose = 3;

// Uniform in [0, 1) with 53 random bits, a pure function of (seed, purpose, stream, index).
constexpr double philox_uniform(uint64_t seed, uint32_t purpose, uint32_t stream, uint64_t index) {
  const PhiloxBlock bits =
      philox4x32({{static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), stream, purpose}},
                 static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
  const uint64_t word = (static_cast<uint64_t>(bits.word[1]) << 32) | bits.word[0];
  return static_cast<double>(word >> 11) * 0x1.0p-53;
}

}  // namespace kintsugi::kernels
