// One run of token ids where it lies: a mapped file (text as bytes, llm.c's .bin, headerless ids, a shard of `prepare`)
// or ids made in memory. The ids are never copied; they are widened when a sample is read.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "runtime/base/file_system.h"
#include "runtime/base/status.h"

namespace kintsugi::runtime {

enum class TokenWidth { k8 = 1, k16 = 2, k32 = 4 };  // bytes an id

class TokenFile {
 public:
  // Text taken as it lies: the ids are its bytes.
  static Result<TokenFile> open_bytes(const std::string& path);
  // Nothing but ids, little-endian.
  static Result<TokenFile> open_headerless(const std::string& path, TokenWidth width);
  // llm.c's format: 256 int32 words of header (magic, version, count, zeros), then the ids; magic 20240520 version 1
  // holds 16-bit ids, magic 20240801 version 7 holds 32-bit ids (llm.c dev/data/data_common.py).
  static Result<TokenFile> open_llmc(const std::string& path);
  // A shard written by `prepare` (FORMAT.md).
  static Result<TokenFile> open_shard(const std::string& path);
  // Ids already in memory; `origin` names them in messages.
  static TokenFile from_ids(std::string origin, std::vector<int32_t> ids);

  // What the first bytes of a file say that it is; kHeaderless when they say nothing.
  enum class Kind { kHeaderless, kLlmc, kShard };
  static Result<Kind> kind_of(const std::string& path);

  const std::string& path() const { return path_; }
  int64_t num_tokens() const { return num_tokens_; }
  TokenWidth width() const { return width_; }
  // The vocabulary that a shard's header names; 0 elsewhere.
  int64_t declared_vocab_size() const { return declared_vocab_size_; }

  // Copies ids [first, first + count) to `out`. Pure; any thread.
  void read(int64_t first, int64_t count, int32_t* out) const;
  // Every id < vocab_size (and < 2^31), or kInvalidArgument with file, byte offset, id and vocabulary. Reads the whole
  // file once, at memory speed; bytes against 256 or more need no look.
  Status check_ids(int64_t vocab_size) const;
  // 0 when there are none.
  uint32_t greatest_id() const;
  // Against the hash in a shard's header; ok for files without one.
  Status check_hash() const;

 private:
  TokenFile(std::string path, MappedFile file, int64_t header_bytes, TokenWidth width);
  TokenFile(std::string path, std::vector<int32_t> ids);

  std::string path_;
  std::optional<MappedFile> file_;
  std::vector<int32_t> ids_;
  const uint8_t* data_ = nullptr;  // into file_ or ids_; a move of either keeps its address
  int64_t header_bytes_ = 0;
  int64_t num_tokens_ = 0;
  int64_t declared_vocab_size_ = 0;
  std::optional<uint64_t> declared_hash_;
  TokenWidth width_ = TokenWidth::k8;
};

// The header of a shard, as it lies in the file: little-endian, 64 bytes.
struct ShardHeader {
  char magic[8];        // kShardMagic
  uint32_t version;     // kShardVersion
  uint32_t width_bits;  // 8, 16 or 32
  uint64_t vocab_size;
  uint64_t num_tokens;
  uint64_t payload_xxh3;  // XXH3-64 of the ids' bytes
  uint64_t reserved[3];   // zero
};
static_assert(sizeof(ShardHeader) == 64);
inline constexpr char kShardMagic[8] = {'K', 'T', 'G', 'T', 'O', 'K', 'S', '\0'};
inline constexpr uint32_t kShardVersion = 1;

// The narrowest width whose ids reach vocab_size - 1: 65,536 ids fit 16 bits, 65,537 need 32.
TokenWidth width_for_vocab(int64_t vocab_size);

}  // namespace kintsugi::runtime
