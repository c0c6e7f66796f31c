// A seeded permutation of 0 .. n-1 with random access: no table, so it costs nothing at any size and every rank
// computes the same one. A Feistel network over the next power of two, its round function Philox
// (runtime/base/philox.h), followed by cycle walking (Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
// CT-RSA 2002): values outside 0 .. n-1 are permuted again until one falls inside. Fewer than two passes are expected.
// Pure functions, any thread.
#pragma once

#include <cstdint>

namespace kintsugi::runtime {

class Permutation {
 public:
  // n >= 1. Another seed or epoch is another permutation.
  Permutation(int64_t n, uint64_t seed, uint32_t epoch);

  int64_t size() const { return n_; }
  // Where position i (0 <= i < n) goes.
  int64_t operator()(int64_t i) const;

 private:
  uint64_t encrypt(uint64_t x) const;

  int64_t n_;
  uint64_t seed_;
  uint32_t epoch_;
  int low_bits_;  // the domain is 2^(low_bits_ + high_bits_) >= n
  int high_bits_;
};

}  // namespace kintsugi::runtime
