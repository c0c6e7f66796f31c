// Counter-based random numbers: every number is a pure function of (seed, purpose, index), so it does not
// depend on ranks, threads, the order of calls, or on how much was drawn before. Nothing here has state.
//   Philox 4x32-10: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
// Integers and uniforms have the same bits on every machine.
#pragma once

#include <array>
#include <cstdint>

namespace kintsugi::runtime {

// Streams of one seed that never share a number. Append only: the values are part of what a seed means.
enum class RandomPurpose : uint32_t {
  kInit = 1,       // initial weights, index = element of the flat parameter space / 4
  kDataOrder = 2,  // order of samples
  kSampling = 3,   // tokens drawn by the sampler
  kTest = 4,       // test data
};

using PhiloxCounter = std::array<uint32_t, 4>;
using PhiloxKey = std::array<uint32_t, 2>;

inline constexpr uint32_t kPhiloxMul0 = 0xD2511F53u, kPhiloxMul1 = 0xCD9E8D57u;
inline constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9u, kPhiloxWeyl1 = 0xBB67AE85u;

// Ten rounds of Philox on a counter: four independent, uniform 32-bit words.
constexpr PhiloxCounter philox4x32(PhiloxCounter c, PhiloxKey k) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(kPhiloxMul0) * c[0];
    const uint64_t p1 = static_cast<uint64_t>(kPhiloxMul1) * c[2];
    c = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k[0], static_cast<uint32_t>(p1),
         static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k[1], static_cast<uint32_t>(p0)};
    k[0] += kPhiloxWeyl0;
    k[1] += kPhiloxWeyl1;
  }
  return c;
}

constexpr PhiloxKey philox_key(uint64_t seed) {
  return {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
}

// The counter of number `index` of a purpose. `substream` tells users of one purpose apart (a layer, an epoch, a
// request).
constexpr PhiloxCounter philox_counter(RandomPurpose purpose, uint64_t index, uint32_t substream = 0) {
  return {static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), static_cast<uint32_t>(purpose), substream};
}

// Four 32-bit words of (seed, purpose, index, substream).
constexpr PhiloxCounter random_words(uint64_t seed, RandomPurpose purpose, uint64_t index, uint32_t substream = 0) {
  return philox4x32(philox_counter(purpose, index, substream), philox_key(seed));
}

// 64 random bits.
constexpr uint64_t random_u64(uint64_t seed, RandomPurpose purpose, uint64_t index, uint32_t substream = 0) {
  const PhiloxCounter w = random_words(seed, purpose, index, substream);
  return (static_cast<uint64_t>(w[1]) << 32) | w[0];
}

// Uniform in [0, 1): 53 bits, a multiple of 2^-53.
constexpr double random_uniform(uint64_t seed, RandomPurpose purpose, uint64_t index, uint32_t substream = 0) {
  return static_cast<double>(random_u64(seed, purpose, index, substream) >> 11) * 0x1.0p-53;
}

// Uniform integer in [0, bound), bound in [1, 2^32]: the high part of a 64 x 64 bit product, so the bias is below
// 2^-32.
constexpr uint64_t random_below(uint64_t bound, uint64_t seed, RandomPurpose purpose, uint64_t index,
                                uint32_t substream = 0) {
  const uint64_t r = random_u64(seed, purpose, index, substream);
  const uint64_t high = (r >> 32) * bound, low = (r & 0xFFFFFFFFu) * bound;
  return (high + (low >> 32)) >> 32;
}

}  // namespace kintsugi::runtime
