#include "comm/host/shared_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "comm/host/memory_limit.h"
#include "comm/peer/layout.h"

namespace kintsugi::comm {

namespace {

constexpr int64_t kPage = 4096;
constexpr char kMagic[8] = {'K', 'T', 'G', 'S', 'E', 'G', '0', '2'};

int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// The first page.
struct Header {
  char magic[8];
  int64_t segment_bytes;
  int64_t heap_offset;
  int64_t heap_bytes;
  int64_t control_bytes;  // of the build that made it
  int32_t rank;
  int32_t world_size;
  int32_t num_channels;
};

constexpr int64_t kControlOffset = kPage;
constexpr int64_t kControlBytes = (static_cast<int64_t>(sizeof(ControlBlock)) + kPage - 1) / kPage * kPage;
constexpr int64_t heap_offset(int num_channels) { return kControlOffset + num_channels * kControlBytes; }

const Header& header_of(const uint8_t* base) { return *reinterpret_cast<const Header*>(base); }

// ftruncate beyond this limit raises SIGXFSZ instead of failing.
Status check_file_size_limit(int64_t size_bytes, const std::string& what) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return ok_status();
  if (static_cast<uint64_t>(size_bytes) <= limit.rlim_cur) return ok_status();
  return resource_exhausted(what + " needs " + std::to_string(size_bytes) +
                            " bytes, the limit on file sizes (ulimit -f) is " + std::to_string(limit.rlim_cur));
}

// Reserves the pages piece by piece, looking at the limits before each: ranks that start together see each other's
// pieces, and reserving beyond a control group's limit would wake the OOM killer instead of failing.
Status reserve_pages(int fd, int64_t size_bytes, int world_size, bool only_look, const std::string& what) {
  constexpr int64_t kPiece = 4 << 20;
  const int64_t margin = kPiece * std::min(world_size, 16);
  for (int64_t at = 0; at < size_bytes; at += kPiece) {
    KTG_ASSIGN_OR_RETURN(const MemoryHeadroom room, memory_headroom(""));
    // All ranks of this machine need as much; the first piece tells early when that can never be.
    const int64_t job_bytes = size_bytes * world_size;
    const int64_t rest = size_bytes - at;
    if (rest + margin > room.free_bytes || job_bytes > room.limit_bytes) {
      return resource_exhausted(what + " needs " + std::to_string(size_bytes) + " bytes (" + std::to_string(job_bytes) +
                                " for " + std::to_string(world_size) + " ranks), but " + room.limit_name + " is " +
                                std::to_string(room.limit_bytes) + " bytes and leaves " +
                                std::to_string(room.free_bytes) + " free");
    }
    if (only_look) return ok_status();
    int error = 0;
    do {
      error = ::fallocate(fd, 0, at, std::min(kPiece, rest)) == 0 ? 0 : errno;
    } while (error == EINTR);
    if (error != 0) return status_from_errno(error, what + ": reserving " + std::to_string(size_bytes) + " bytes");
  }
  return ok_status();
}

}  // namespace

int64_t SharedSegment::segment_bytes(int64_t heap_bytes, int world_size, int num_channels) {
  KTG_CHECK(heap_bytes >= 0 && world_size >= 1 && num_channels >= 1) << heap_bytes << " " << world_size;
  return heap_offset(num_channels) + round_up(heap_bytes, kPage);
}

Result<int> SharedSegment::create_fd(int64_t heap_bytes, int world_size, int rank, bool reserve, int num_channels) {
  if (heap_bytes < 0 || world_size < 1 || world_size > kMaxWorldSize || rank < 0 || rank >= world_size) {
    return invalid_argument("shared segment of " + std::to_string(heap_bytes) + " bytes for rank " +
                            std::to_string(rank) + " of " + std::to_string(world_size) + " (at most " +
                            std::to_string(kMaxWorldSize) + " ranks)");
  }
  if (num_channels < 1 || num_channels > kMaxChannels) {
    return invalid_argument("a shared segment of " + std::to_string(num_channels) + " channels: must be 1 to " +
                            std::to_string(kMaxChannels));
  }
  const std::string what = "the shared segment of rank " + std::to_string(rank);
  const int64_t size_bytes = segment_bytes(heap_bytes, world_size, num_channels);
  KTG_RETURN_IF_ERROR(check_file_size_limit(size_bytes, what));
  const std::string name = "kintsugi-rank-" + std::to_string(rank);
  const int fd = ::memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return status_from_errno(errno, what + ": memfd_create");
  const Status made = [&]() -> Status {
    if (::ftruncate(fd, size_bytes) != 0) return status_from_errno(errno, what + ": ftruncate");
    KTG_RETURN_IF_ERROR(reserve_pages(fd, size_bytes, world_size, !reserve, what));
    const Header header{
        .magic = {kMagic[0], kMagic[1], kMagic[2], kMagic[3], kMagic[4], kMagic[5], kMagic[6], kMagic[7]},
        .segment_bytes = size_bytes,
        .heap_offset = heap_offset(num_channels),
        .heap_bytes = heap_bytes,
        .control_bytes = sizeof(ControlBlock),
        .rank = rank,
        .world_size = world_size,
        .num_channels = num_channels};
    if (::pwrite(fd, &header, sizeof(header), 0) != sizeof(header)) return status_from_errno(errno, what + ": header");
    if (::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
      return status_from_errno(errno, what + ": seals");
    }
    return ok_status();
  }();
  if (!made.ok()) {
    ::close(fd);
    return made;
  }
  return fd;
}

Result<std::unique_ptr<SharedSegment>> SharedSegment::map(int fd) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) return status_from_errno(errno, "shared segment: fstat");
  Header header{};
  const ssize_t got = ::pread(fd, &header, sizeof(header), 0);
  const bool ours = got == sizeof(header) && std::memcmp(header.magic, kMagic, sizeof(kMagic)) == 0;
  if (!ours)
    return failed_precondition("descriptor " + std::to_string(fd) + " is not a shared segment of this program");
  const bool whole = header.segment_bytes == info.st_size && header.control_bytes == sizeof(ControlBlock) &&
                     header.num_channels >= 1 && header.num_channels <= kMaxChannels &&
                     header.heap_offset == heap_offset(header.num_channels) && header.heap_bytes >= 0 &&
                     header.heap_bytes <= header.segment_bytes - header.heap_offset;
  if (!whole) {
    return failed_precondition("the shared segment in descriptor " + std::to_string(fd) +
                               " is of another build: " + std::to_string(header.segment_bytes) + " bytes said, " +
                               std::to_string(info.st_size) + " there");
  }
  void* base = ::mmap(nullptr, static_cast<size_t>(info.st_size), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) {
    return status_from_errno(errno, "mapping a shared segment of " + std::to_string(info.st_size) + " bytes");
  }
  // Large pages where the machine grants them to shared memory; a hint.
  ::madvise(base, static_cast<size_t>(info.st_size), MADV_HUGEPAGE);
  return std::unique_ptr<SharedSegment>(new SharedSegment(static_cast<uint8_t*>(base), info.st_size));
}

SharedSegment::~SharedSegment() { ::munmap(base_, static_cast<size_t>(size_bytes_)); }

int SharedSegment::rank() const { return header_of(base_).rank; }
int SharedSegment::world_size() const { return header_of(base_).world_size; }
int SharedSegment::num_channels() const { return header_of(base_).num_channels; }
uint8_t* SharedSegment::data() const { return base_ + header_of(base_).heap_offset; }
int64_t SharedSegment::capacity_bytes() const { return header_of(base_).heap_bytes; }
int64_t SharedSegment::used_bytes() const { return heap_used_; }

ControlBlock& SharedSegment::control(int channel) const {
  KTG_CHECK(channel >= 0 && channel < num_channels()) << channel << " of " << num_channels();
  return *reinterpret_cast<ControlBlock*>(base_ + kControlOffset + channel * kControlBytes);
}

Result<void*> SharedSegment::allocate(int64_t size_bytes, std::string_view what) {
  const int64_t left = capacity_bytes() - heap_used_;
  if (size_bytes < 0 || round_up(size_bytes, 64) > left) {
    return resource_exhausted(std::string(what) + ": " + std::to_string(size_bytes) + " bytes, " +
                              std::to_string(left) + " of " + std::to_string(capacity_bytes()) +
                              " are left in the heap of rank " + std::to_string(rank()));
  }
  void* p = data() + heap_used_;
  heap_used_ += round_up(size_bytes, 64);
  return p;
}

bool SharedSegment::contains(const void* p, int64_t size_bytes) const {
  const auto* byte = static_cast<const uint8_t*>(p);
  return byte >= data() && byte + size_bytes <= data() + capacity_bytes();
}

void* SharedSegment::translate(const void* own, const SharedSegment& peer) const {
  return peer.data() + (static_cast<const uint8_t*>(own) - data());
}

}  // namespace kintsugi::comm
