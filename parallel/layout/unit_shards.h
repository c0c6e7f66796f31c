// Which part of each unit a shard owns. Every unit is cut into kUnitBlocks blocks of equal length (the last ones may be
// short or empty), whatever the number of shards; a shard owns ceil(kUnitBlocks / S) blocks that follow each other.
// So no border of a shard ever cuts a block, and sums over blocks have the same bits in every layout (parallel/vote.h).
//
//   unit    |--------------------------- length ---------------------------|
//   shards  |-- chunk --|-- chunk --|-- chunk --|--- the last may be short --|..padding..|
//
// Collectives carry `chunk` elements a shard: S * chunk >= length, the rest is padding, which is zero in weights,
// moments and gradients, always. A shard's chunks of all units follow each other in its local space, at the same
// offsets on every rank.
// ZeRO: Rajbhandari et al., SC 2020; the flat buffer a unit is FSDP's: Zhao et al., VLDB 2023.
// Pure arithmetic. Lengths and offsets are in elements, multiples of kUnitAlignment.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/model/param_table.h"
#include "runtime/model/train_state.h"

namespace kintsugi::parallel {

// Divisible by 1 to 6, 8, 10, 12, 15, 20, 24, 30, 40, 60 and 120: these many shards are even.
inline constexpr int64_t kUnitBlocks = 120;

// Elements of one of a unit's blocks: its length over kUnitBlocks, rounded up to kUnitAlignment.
int64_t unit_block_length(int64_t unit_length);

struct UnitShard {
  int64_t chunk;        // elements a shard
  int64_t local_begin;  // of the chunk in the local space
  int64_t begin;        // first element of the flat space that lies in this shard's chunk
  int64_t count;        // so many elements of the flat space lie there; the rest of the chunk is padding
};

class UnitShards {
 public:
  UnitShards(const std::vector<runtime::UnitInfo>& units, int num_shards, int shard);
  int num_shards() const { return num_shards_; }
  int shard() const { return shard_; }
  const UnitShard& operator[](int unit) const { return units_[static_cast<size_t>(unit)]; }
  int num_units() const { return static_cast<int>(units_.size()); }
  int64_t local_length() const { return local_length_; }  // elements of the local space
  // Elements of a buffer that holds the whole unit, gathered: num_shards * chunk.
  int64_t gathered_length(int unit) const { return num_shards_ * (*this)[unit].chunk; }
  // What of the flat space lies in the local space, ascending; empty pieces left out, neighbours not joined.
  std::vector<runtime::StateRange> ranges() const;

 private:
  int num_shards_, shard_;
  int64_t local_length_ = 0;
  std::vector<UnitShard> units_;
};

}  // namespace kintsugi::parallel
