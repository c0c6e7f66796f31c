// The formula of ReduceKernels::digest: a 64-bit fingerprint of the bits of an fp32 array that does not depend on the
// order in which it is taken, so that threads, devices and shards may share the work.
//
// Word j of the array holds the bits of element 2 j in its low half and of element 2 j + 1 (0 beyond the end) in its
// high half. digest = sum over j of digest_word(word j, digest_key(seed, j)), modulo 2^64. The digest of a piece that
// begins at the even element e, taken with seed + e/2 * kDigestStep, is the piece's share of the whole's digest.
//
// The mixer is two rounds of 32 x 32 -> 64 bit products, which every instruction set has: a word that changes in one
// half always changes its summand, any other change goes unseen once in about 2^64. It is no defence against an
// adversary. Constants: odd; the step is 2^64 / golden ratio, the factors are those of xxHash and MurmurHash3.
#pragma once

#include <cstdint>

namespace kintsugi::kernels {

inline constexpr uint64_t kDigestStep = 0x9e3779b97f4a7c15u;
// Of the first and the second round, for a word's low and high half.
inline constexpr uint64_t kDigestLow1 = 0x9e3779b1u, kDigestHigh1 = 0x85ebca77u;
inline constexpr uint64_t kDigestLow2 = 0xc2b2ae3du, kDigestHigh2 = 0xcc9e2d51u;

[[gnu::always_inline]] constexpr uint64_t digest_key(uint64_t seed, int64_t j) {
  return seed + (static_cast<uint64_t>(j) + 1) * kDigestStep;
}

[[gnu::always_inline]] constexpr uint64_t digest_round(uint64_t z, uint64_t low_factor, uint64_t high_factor) {
  const uint64_t low = (z & 0xffffffffu) * low_factor;
  const uint64_t high = (z >> 32) * high_factor;
  return low ^ (high << 32 | high >> 32);
}

[[gnu::always_inline]] constexpr uint64_t digest_word(uint64_t word, uint64_t key) {
  const uint64_t y = digest_round(word ^ key, kDigestLow1, kDigestHigh1);
  return digest_round(y ^ y >> 29, kDigestLow2, kDigestHigh2);
}

}  // namespace kintsugi::kernels
