// index.json of a folder of token shards: what `prepare` wrote and in which order. The format is in FORMAT.md.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/base/status.h"

namespace kintsugi::runtime {

inline constexpr char kShardIndexName[] = "index.json";

struct ShardIndex {
  struct Shard {
    std::string file;  // beside index.json
    int64_t num_tokens = 0;
  };
  struct Source {
    std::string path;  // as it was given
    int64_t num_bytes = 0;
    int64_t num_tokens = 0;
  };
  int64_t vocab_size = 0;
  int64_t width_bits = 0;
  int64_t num_tokens = 0;
  std::string tokenizer;  // "bytes", or the name of the tokenizer.json beside index.json
  std::vector<Shard> shards;
  std::vector<Source> sources;

  std::string to_json() const;
  // kInvalidArgument with `origin` and the key. Counts are checked against one another, names against leaving the
  // folder.
  static Result<ShardIndex> parse(std::string_view json, const std::string& origin);
};

}  // namespace kintsugi::runtime
