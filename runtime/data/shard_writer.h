// Writes a folder of token shards (FORMAT.md). Nothing is at the folder's name until everything is durable: the shards
// grow in a hidden folder beside it, which one rename makes the result; an error or a crash leaves the name free.
// One caller at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "runtime/base/file_system.h"
#include "runtime/base/status.h"
#include "runtime/data/shard_index.h"
#include "runtime/data/token_file.h"

namespace kintsugi::runtime {

class ShardWriter {
 public:
  struct Options {
    int64_t vocab_size = 256;
    std::string tokenizer = "bytes";          // Tokenizer::serialized(), kept with the shards
    int64_t shard_bytes = int64_t{64} << 20;  // of ids in one file; held in memory until it is full
  };
  // `out` must not exist, or be an empty folder (kFailedPrecondition); its parents are made. `fs` outlives the writer.
  static Result<std::unique_ptr<ShardWriter>> create(const std::string& out, const Options& options, FileSystem& fs);
  // Removes what finish() has not published.
  ~ShardWriter();
  ShardWriter(const ShardWriter&) = delete;
  ShardWriter& operator=(const ShardWriter&) = delete;

  // Ids must be < vocab_size.
  Status append(std::span<const int32_t> ids);
  // What was appended since the last call came from this text of so many bytes.
  void end_source(const std::string& path, int64_t num_bytes);
  // Makes everything durable and gives it its name. The last call. kInvalidArgument when there are no tokens.
  Result<ShardIndex> finish();

 private:
  ShardWriter(std::string out, std::string scratch, const Options& options, FileSystem& fs);
  Status write_shard();

  const std::string out_, scratch_;
  const Options options_;
  FileSystem& fs_;
  const TokenWidth width_;
  std::string payload_;  // of the shard that is growing
  ShardIndex index_;
  int64_t counted_tokens_ = 0;  // by sources
  bool published_ = false;
};

}  // namespace kintsugi::runtime
