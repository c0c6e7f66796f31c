// Forms of the decode kernels to be compared, and stamps of when their blocks begin, may go on and end. For
// experiments/decode_gpu alone: all off otherwise. Internal to kernels/cuda.
#pragma once

#include <cstdint>
#include <vector>

namespace kintsugi::kernels::cuda {

// One range, or two of the same length, of weights that a later launch will read.
struct ReadAhead {
  const void* first = nullptr;
  const void* second = nullptr;
  int64_t bytes = 0;
};

struct DecodeProbe {
  bool half_tiles = false;          // 8 rows of w a block where 16 leave half of the multiprocessors without any
  int distance = 0;                 // launches ahead whose weights are brought to the second-level cache
  int64_t period = 0;               // launches of a step
  int64_t most_bytes = 0;           // brought ahead by a launch
  std::vector<ReadAhead> launches;  // so far
  static constexpr int kStampBlocks = 160, kStamps = 4, kStampLaunches = 1024;
  unsigned long long* stamps = nullptr;  // (kStampLaunches, kStampBlocks, kStamps) on the device

  // Adds a launch that reads `own`; what it shall bring ahead.
  ReadAhead next(const ReadAhead& own) {
    launches.push_back(own);
    const int64_t at = static_cast<int64_t>(launches.size()) - 1 + distance - period;
    if (distance == 0 || period == 0 || at < 0) return {};
    ReadAhead ahead = launches[static_cast<size_t>(at)];
    const int64_t most = ahead.second != nullptr ? most_bytes / 2 : most_bytes;
    if (ahead.bytes > most) ahead.bytes = most / 16 * 16;
    return ahead;
  }
  unsigned long long* stamps_of_last() const {
    if (stamps == nullptr) return nullptr;
    return stamps + static_cast<int64_t>((launches.size() - 1) % kStampLaunches) * kStampBlocks * kStamps;
  }
};
inline DecodeProbe& decode_probe() {
  static DecodeProbe probe;
  return probe;
}

}  // namespace kintsugi::kernels::cuda
