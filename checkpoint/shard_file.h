// One rank's HDF5 file of a checkpoint, for reading. The head (all of HDF5's structures and the table of block
// checksums) is verified against the manifest before it is parsed; payload is read by position, each block
// verified before its bytes are handed out. The descriptor stays open, so the file remains readable when rotation
// removes its name meanwhile. Not thread safe.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/shard_layout.h"

namespace kintsugi::checkpoint {

// A file open for reading at positions.
class PositionedFile {
 public:
  // kNotFound when there is no such file.
  static Result<PositionedFile> open(const std::string& path);
  PositionedFile(PositionedFile&& other) noexcept;
  PositionedFile& operator=(PositionedFile&& other) noexcept;
  ~PositionedFile();
  Result<int64_t> size() const;
  // All of out; kDataLoss when the file ends before or the device cannot read it.
  Status read(int64_t offset, std::span<char> out) const;
  const std::string& path() const { return path_; }

 private:
  PositionedFile(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
  int fd_ = -1;
  std::string path_;
};

class ShardFile {
 public:
  // kDataLoss naming the file when its size or head is not what the manifest says; kNotFound when it is gone.
  static Result<ShardFile> open(const std::string& path, const ShardRecord& record);
  const std::vector<Piece>& pieces() const { return pieces_; }
  // Elements [begin, begin + count) of the piece's tensor (a part of the piece) to `out`.
  // kDataLoss naming file, dataset and block when a checksum differs.
  Status read(const Piece& piece, int64_t begin, int64_t count, float* out);
  // Reads the whole file: every block checksum and the file's own.
  Status verify();

 private:
  ShardFile(PositionedFile file, ShardRecord record, std::string head)
      : file_(std::move(file)), record_(std::move(record)), head_(std::move(head)) {}
  Status parse();
  Status check_block(const Piece& piece, int64_t block, std::span<const char> bytes) const;

  PositionedFile file_;
  ShardRecord record_;
  std::string head_;
  std::vector<Piece> pieces_;  // by file offset
  std::vector<uint64_t> block_checksums_;
  std::vector<char> scratch_;
};

}  // namespace kintsugi::checkpoint
