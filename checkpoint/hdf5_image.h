// HDF5 without the disk: a file driver whose bytes live in memory, sparsely. The writer lets the library lay out a
// whole file (superblock, groups, attributes, and datasets whose space is allocated but never written), takes the
// bytes that the library wrote (the "head") and puts head and payload on disk itself. The reader checks the head's
// checksum first and only then shows it to the library. So HDF5 makes no system call on our files: its file locking
// (flock), its behaviour on a full disk and its trust in what it parses are out of the picture (the last but for heads
// forged together with their checksum: HDF5 1.10 may read past its buffers then, so trust who made the file).
//
// Thread safe as the library is: distinct images from distinct threads.
#pragma once

#include <hdf5.h>

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "runtime/base/status.h"

namespace kintsugi::checkpoint {

// Owner of one HDF5 identifier; closes it on scope exit.
class Hid {
 public:
  using Closer = herr_t (*)(hid_t);
  Hid() = default;
  Hid(hid_t id, Closer closer) : id_(id), closer_(closer) {}
  Hid(Hid&& other) noexcept : id_(std::exchange(other.id_, -1)), closer_(other.closer_) {}
  Hid& operator=(Hid&& other) noexcept {
    std::swap(id_, other.id_);
    std::swap(closer_, other.closer_);
    return *this;
  }
  ~Hid() { static_cast<void>(close()); }
  bool ok() const { return id_ >= 0; }
  hid_t get() const { return id_; }
  // Closes now; false when the library reports a failure.
  bool close() {
    const hid_t id = std::exchange(id_, -1);
    return id < 0 || closer_(id) >= 0;
  }

 private:
  hid_t id_ = -1;
  Closer closer_ = nullptr;
};

// What the library wrote, by pages; bytes never written read as zero.
class Hdf5Image {
 public:
  Hdf5Image() = default;
  // For reading: a file of `size_bytes` of which only the first head.size() bytes are here; a read past them fails.
  Hdf5Image(std::string_view head, int64_t size_bytes);

  bool read(int64_t offset, int64_t size, void* out) const;
  void write(int64_t offset, int64_t size, const void* data);
  // One past the last byte written, and the bytes before `end`.
  int64_t written_end() const { return written_end_; }
  std::string bytes(int64_t end) const;
  int64_t file_end() const { return file_end_; }
  void set_file_end(int64_t end) { file_end_ = end; }

 private:
  static constexpr int64_t kPageBytes = 4096;
  std::map<int64_t, std::array<char, kPageBytes>> pages_;
  int64_t written_end_ = 0;
  int64_t file_end_ = 0;
  int64_t readable_end_ = INT64_MAX;
};

// Silences the library's printing on this thread and forgets its earlier errors. Call before using it.
void quiet_hdf5();
// kInternal with `what` and the library's own deepest message on this thread.
Status hdf5_error(std::string_view what);

// A new file in `image`; `metadata_block_bytes`: the library keeps its structures within blocks of that size, so a
// large enough value puts all of them before the first dataset. The image must outlive the returned handle.
Result<Hid> create_hdf5(Hdf5Image& image, int64_t metadata_block_bytes);
Result<Hid> open_hdf5(Hdf5Image& image);

}  // namespace kintsugi::checkpoint
