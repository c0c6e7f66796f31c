// XXH3 as checkpoints use it: 64 bits a block, 128 bits a file, written as xxhsum writes them.
#pragma once

#include <xxhash.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "runtime/base/check.h"

namespace kintsugi::checkpoint {

// 32 hexadecimal digits, high word first: what `xxh128sum` prints.
inline std::string to_hex(XXH128_hash_t hash) {
  std::string out;
  for (const uint64_t word : {hash.high64, hash.low64}) {
    for (int shift = 60; shift >= 0; shift -= 4) out += "0123456789abcdef"[(word >> shift) & 15];
  }
  return out;
}

inline std::string xxh3_128(std::string_view bytes) { return to_hex(XXH3_128bits(bytes.data(), bytes.size())); }

// Over a file's bytes in order, as they come.
class Xxh3Stream {
 public:
  Xxh3Stream() : state_(XXH3_createState()) {
    KTG_CHECK(state_ != nullptr && XXH3_128bits_reset(state_.get()) == XXH_OK);
  }
  void add(std::string_view bytes) {
    KTG_CHECK(XXH3_128bits_update(state_.get(), bytes.data(), bytes.size()) == XXH_OK);
  }
  std::string hex() const { return to_hex(XXH3_128bits_digest(state_.get())); }

 private:
  struct Deleter {
    void operator()(XXH3_state_t* state) const { XXH3_freeState(state); }
  };
  std::unique_ptr<XXH3_state_t, Deleter> state_;
};

}  // namespace kintsugi::checkpoint
