// Counter-based random numbers: Philox 4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel Random Numbers: As Easy
// as 1, 2, 3", SC 2011). A number is a pure function of (seed, purpose, stream, index): there is no hidden
// state, so ranks, threads and restarts that ask for the same number get the same bits. Thread safe.
#pragma once

#include <array>
#include <cstdint>

namespace kintsugi {

// Keeps numbers drawn for different ends apart although they share the run's seed. Values are part of what a
// seed means: never renumber them.
enum class RandomPurpose : uint32_t {
  kInitialWeights = 1,
  kDataOrder = 2,
  kSampling = 3,
  kMomentRounding = 4,
  kTest = 1000
};

// One Philox block: 128 random bits of `counter` under `key`.
inline std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  constexpr uint64_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
  constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = kMultiplier0 * counter[0];
    const uint64_t product1 = kMultiplier1 * counter[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(product0)};
    key[0] += kWeyl0;
    key[1] += kWeyl1;
  }
  return counter;
}

// 128 bits for `index` of `stream` (which sequence, epoch, ...) under all 64 bits of `seed`.
inline std::array<uint32_t, 4> random_bits(uint64_t seed, RandomPurpose purpose, uint32_t stream, uint64_t index) {
  return philox4x32(
      {static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), stream, static_cast<uint32_t>(purpose)},
      {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
}

// Uniform in [0, 1) with 53 random bits: the first two words of the block.
inline double random_uniform(uint64_t seed, RandomPurpose purpose, uint32_t stream, uint64_t index) {
  const std::array<uint32_t, 4> bits = random_bits(seed, purpose, stream, index);
  const uint64_t word = (static_cast<uint64_t>(bits[1]) << 32) | bits[0];
  return static_cast<double>(word >> 11) * 0x1.0p-53;
}

}  // namespace kintsugi
