// Files behind an interface, so that tests can lose unsynced writes, fill the disk, or crash
// between two calls. Paths are UTF-8. Thread safe.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "runtime/base/status.h"

namespace kintsugi {

class FileSystem {
 public:
  virtual ~FileSystem() = default;

  virtual Result<std::string> read_file(const std::string& path) = 0;
  // Creates or truncates; the bytes are in the page cache, not durable, when it returns.
  virtual Status write_file(const std::string& path, std::string_view contents) = 0;
  virtual Status append_file(const std::string& path, std::string_view contents) = 0;
  virtual Status truncate_file(const std::string& path, int64_t size_bytes) = 0;
  // fsync(2) of a file, and of a directory (a rename is durable only after the latter).
  virtual Status sync_file(const std::string& path) = 0;
  virtual Status sync_dir(const std::string& path) = 0;
  // Atomic within one file system; replaces an existing file (not a non-empty directory).
  virtual Status rename(const std::string& from, const std::string& to) = 0;
  virtual Status remove_file(const std::string& path) = 0;
  virtual Status remove_tree(const std::string& path) = 0;
  // mkdir -p.
  virtual Status create_dirs(const std::string& path) = 0;
  // Names (not paths), sorted bytewise, without "." and "..".
  virtual Result<std::vector<std::string>> list_dir(const std::string& path) = 0;
  virtual bool exists(const std::string& path) = 0;
  virtual Result<int64_t> file_size(const std::string& path) = 0;
  virtual Result<int64_t> free_bytes(const std::string& path) = 0;

  // The real one, for the whole process.
  static FileSystem& posix();
};

// A file mapped read-only; the mapping lives as long as the object. Empty files map to an empty span.
class MappedFile {
 public:
  static Result<MappedFile> open(const std::string& path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();
  std::span<const uint8_t> bytes() const { return {data_, static_cast<size_t>(size_)}; }

 private:
  MappedFile(const uint8_t* data, int64_t size) : data_(data), size_(size) {}
  const uint8_t* data_ = nullptr;
  int64_t size_ = 0;
};

// "a" + "/" + "b"; an absolute b wins.
std::string join_path(std::string_view a, std::string_view b);

}  // namespace kintsugi
