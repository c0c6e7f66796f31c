#include "runtime/base/file_system.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <string_view>
#include <system_error>

namespace kintsugi {
namespace {

// Closes on scope exit; close(2) errors matter only to writers, which call sync first.
class UniqueFd {
 public:
  explicit UniqueFd(int fd) : fd_(fd) {}
  ~UniqueFd() {
    if (fd_ >= 0) ::close(fd_);
  }
  UniqueFd(const UniqueFd&) = delete;
  UniqueFd& operator=(const UniqueFd&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

Status error_at(const std::string& path) { return status_from_errno(errno, path); }

Status write_all(const std::string& path, int flags, std::string_view contents) {
  const UniqueFd fd(::open(path.c_str(), flags | O_WRONLY | O_CREAT | O_CLOEXEC, 0644));
  if (fd.get() < 0) return error_at(path);
  while (!contents.empty()) {
    const ssize_t n = ::write(fd.get(), contents.data(), contents.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return error_at(path);
    contents.remove_prefix(static_cast<size_t>(n));
  }
  return ok_status();
}

Status sync_path(const std::string& path, int flags) {
  const UniqueFd fd(::open(path.c_str(), flags | O_CLOEXEC));
  if (fd.get() < 0) return error_at(path);
  if (::fsync(fd.get()) != 0) return error_at(path);
  return ok_status();
}

class PosixFileSystem final : public FileSystem {
 public:
  Result<std::string> read_file(const std::string& path) override {
    const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (fd.get() < 0) return error_at(path);
    std::string out;
    char chunk[1 << 16];
    for (;;) {
      const ssize_t n = ::read(fd.get(), chunk, sizeof chunk);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return error_at(path);
      if (n == 0) return out;
      out.append(chunk, static_cast<size_t>(n));
    }
  }
  Status write_file(const std::string& path, std::string_view contents) override {
    return write_all(path, O_TRUNC, contents);
  }
  Status append_file(const std::string& path, std::string_view contents) override {
    return write_all(path, O_APPEND, contents);
  }
  Status truncate_file(const std::string& path, int64_t size_bytes) override {
    return ::truncate(path.c_str(), size_bytes) == 0 ? ok_status() : error_at(path);
  }
  Status sync_file(const std::string& path) override { return sync_path(path, O_RDONLY); }
  Status sync_dir(const std::string& path) override { return sync_path(path, O_RDONLY | O_DIRECTORY); }
  Status rename(const std::string& from, const std::string& to) override {
    return ::rename(from.c_str(), to.c_str()) == 0 ? ok_status() : error_at(from + " -> " + to);
  }
  Status remove_file(const std::string& path) override { return ::unlink(path.c_str()) == 0 ? ok_status() : error_at(path); }
  Status remove_tree(const std::string& path) override {
    std::error_code ec;
    std::filesystem::remove_all(path, ec);
    return ec ? status_from_errno(ec.value(), path) : ok_status();
  }
  Status create_dirs(const std::string& path) override {
    std::error_code ec;
    std::filesystem::create_directories(path, ec);
    return ec ? status_from_errno(ec.value(), path) : ok_status();
  }
  Result<std::vector<std::string>> list_dir(const std::string& path) override {
    std::error_code ec;
    std::filesystem::directory_iterator it(path, ec);
    if (ec) return status_from_errno(ec.value(), path);
    std::vector<std::string> names;
    for (const std::filesystem::directory_iterator end; it != end; it.increment(ec)) {
      if (ec) return status_from_errno(ec.value(), path);
      names.push_back(it->path().filename().string());
    }
    std::sort(names.begin(), names.end());
    return names;
  }
  bool exists(const std::string& path) override {
    struct stat st{};
    return ::stat(path.c_str(), &st) == 0;
  }
  Result<int64_t> file_size(const std::string& path) override {
    struct stat st{};
    if (::stat(path.c_str(), &st) != 0) return error_at(path);
    return static_cast<int64_t>(st.st_size);
  }
  Result<int64_t> free_bytes(const std::string& path) override {
    struct statvfs st{};
    if (::statvfs(path.c_str(), &st) != 0) return error_at(path);
    return static_cast<int64_t>(st.f_bavail) * static_cast<int64_t>(st.f_frsize);
  }
};

}  // namespace

FileSystem& FileSystem::posix() {
  static PosixFileSystem fs;
  return fs;
}

Result<MappedFile> MappedFile::open(const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (fd.get() < 0) return error_at(path);
  struct stat st{};
  if (::fstat(fd.get(), &st) != 0) return error_at(path);
  if (S_ISDIR(st.st_mode)) return status_from_errno(EISDIR, path);
  if (st.st_size == 0) return MappedFile(nullptr, 0);
  void* data = ::mmap(nullptr, static_cast<size_t>(st.st_size), PROT_READ, MAP_SHARED, fd.get(), 0);
  if (data == MAP_FAILED) return error_at(path);
  return MappedFile(static_cast<const uint8_t*>(data), static_cast<int64_t>(st.st_size));
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<uint8_t*>(data_), static_cast<size_t>(size_));
}

std::string join_path(std::string_view a, std::string_view b) {
  if (a.empty() || (!b.empty() && b.front() == '/')) return std::string(b);
  std::string out(a);
  if (out.back() != '/') out += '/';
  return out.append(b);
}

}  // namespace kintsugi
