#include "checkpoint/shard_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "checkpoint/hdf5_image.h"
#include "checkpoint/xxh3.h"

namespace kintsugi::checkpoint {
namespace {

Result<int64_t> get_number(hid_t object, const char* name) {
  const Hid attribute(H5Aopen(object, name, H5P_DEFAULT), H5Aclose);
  const Hid space(attribute.ok() ? H5Aget_space(attribute.get()) : -1, H5Sclose);
  int64_t value = 0;
  if (!space.ok() || H5Sget_simple_extent_npoints(space.get()) != 1 ||
      H5Aread(attribute.get(), H5T_NATIVE_INT64, &value) < 0) {
    return data_loss(std::string("no attribute ") + name);
  }
  return value;
}

Result<std::vector<int64_t>> get_numbers(hid_t object, const char* name) {
  const Hid attribute(H5Aopen(object, name, H5P_DEFAULT), H5Aclose);
  const Hid space(attribute.ok() ? H5Aget_space(attribute.get()) : -1, H5Sclose);
  const hssize_t size = space.ok() ? H5Sget_simple_extent_npoints(space.get()) : -1;
  if (size < 1 || size > 32) return data_loss(std::string("no attribute ") + name);
  std::vector<int64_t> values(static_cast<size_t>(size));
  if (H5Aread(attribute.get(), H5T_NATIVE_INT64, values.data()) < 0) {
    return data_loss(std::string("no attribute ") + name);
  }
  return values;
}

// `head_bytes`: of the file's head, which holds the table.
Result<std::vector<uint64_t>> get_block_table(hid_t file, int64_t head_bytes) {
  if (H5Lexists(file, "block_xxh3", H5P_DEFAULT) <= 0) return std::vector<uint64_t>{};
  const Hid data(H5Dopen2(file, "block_xxh3", H5P_DEFAULT), H5Dclose);
  const Hid space(data.ok() ? H5Dget_space(data.get()) : -1, H5Sclose);
  const hssize_t size = space.ok() ? H5Sget_simple_extent_npoints(space.get()) : -1;
  if (size < 0 || size > head_bytes / 8) return data_loss("no block checksums");
  KTG_ASSIGN_OR_RETURN(const int64_t block_bytes, get_number(data.get(), "block_bytes"));
  if (block_bytes != kBlockBytes) return data_loss("blocks of " + std::to_string(block_bytes) + " bytes");
  std::vector<uint64_t> sums(static_cast<size_t>(size));
  if (H5Dread(data.get(), H5T_NATIVE_UINT64, H5S_ALL, H5S_ALL, H5P_DEFAULT, sums.data()) < 0) {
    return data_loss("block checksums cannot be read");
  }
  return sums;
}

Result<Piece> get_piece(hid_t group, int part, const std::string& name) {
  Piece piece;
  piece.part = part;
  piece.tensor = name;
  const Hid data(H5Dopen2(group, name.c_str(), H5P_DEFAULT), H5Dclose);
  const Hid space(data.ok() ? H5Dget_space(data.get()) : -1, H5Sclose);
  const Hid type(data.ok() ? H5Dget_type(data.get()) : -1, H5Tclose);
  if (!space.ok() || !type.ok() || H5Tequal(type.get(), H5T_IEEE_F32LE) <= 0) return data_loss("no fp32 dataset");
  piece.count = H5Sget_simple_extent_npoints(space.get());
  KTG_ASSIGN_OR_RETURN(piece.shape, get_numbers(data.get(), "global_shape"));
  KTG_ASSIGN_OR_RETURN(piece.begin, get_number(data.get(), "begin"));
  KTG_ASSIGN_OR_RETURN(piece.first_block, get_number(data.get(), "first_block"));
  const haddr_t offset = H5Dget_offset(data.get());
  if (offset == HADDR_UNDEF) return data_loss("no payload");
  piece.file_offset = static_cast<int64_t>(offset);
  return piece;
}

Status check_bounds(const Piece& piece, const ShardRecord& record, size_t num_sums) {
  int64_t numel = 1;
  for (const int64_t n : piece.shape) {
    if (n < 1 || numel > INT64_MAX / 4 / n) return data_loss("impossible shape");
    numel *= n;
  }
  const bool inside = piece.count >= 1 && piece.begin >= 0 && piece.begin <= numel - piece.count &&
                      piece.file_offset >= record.head_bytes &&
                      piece.file_offset <= record.size_bytes - piece.size_bytes() && piece.first_block >= 0 &&
                      piece.first_block <= static_cast<int64_t>(num_sums) - piece.num_blocks();
  return inside ? ok_status() : data_loss("lies outside the file or its tensor");
}

Status get_group(hid_t file, int part, const ShardRecord& record, size_t num_sums, std::vector<Piece>& pieces) {
  const Hid group(H5Gopen2(file, kPartNames[part], H5P_DEFAULT), H5Gclose);
  H5G_info_t info{};
  if (!group.ok() || H5Gget_info(group.get(), &info) < 0) return data_loss(std::string("no group ") + kPartNames[part]);
  for (hsize_t i = 0; i < info.nlinks; ++i) {
    const auto link_name = [&](char* out, size_t size) {
      return H5Lget_name_by_idx(group.get(), ".", H5_INDEX_NAME, H5_ITER_INC, i, out, size, H5P_DEFAULT);
    };
    const ssize_t size = link_name(nullptr, 0);
    if (size <= 0) return data_loss(std::string("group ") + kPartNames[part] + " cannot be listed");
    std::string name(static_cast<size_t>(size), '\0');
    if (link_name(name.data(), name.size() + 1) < 0) {
      return data_loss(std::string("group ") + kPartNames[part] + " cannot be listed");
    }
    auto piece = get_piece(group.get(), part, name);
    const Status status = piece.ok() ? check_bounds(*piece, record, num_sums) : piece.status();
    if (!status.ok()) return status.with_context(std::string("/") + kPartNames[part] + "/" + name);
    pieces.push_back(std::move(piece).value());
  }
  return ok_status();
}

}  // namespace

Result<PositionedFile> PositionedFile::open(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return status_from_errno(errno, path);
  return PositionedFile(fd, path);
}

PositionedFile::PositionedFile(PositionedFile&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), path_(std::move(other.path_)) {}

PositionedFile& PositionedFile::operator=(PositionedFile&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(path_, other.path_);
  return *this;
}

PositionedFile::~PositionedFile() {
  if (fd_ >= 0) ::close(fd_);
}

Result<int64_t> PositionedFile::size() const {
  struct stat st {};
  if (::fstat(fd_, &st) != 0) return status_from_errno(errno, path_);
  return static_cast<int64_t>(st.st_size);
}

Status PositionedFile::read(int64_t offset, std::span<char> out) const {
  size_t done = 0;
  while (done < out.size()) {
    const ssize_t n =
        ::pread(fd_, out.data() + done, out.size() - done, static_cast<off_t>(offset) + static_cast<off_t>(done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return data_loss(status_from_errno(errno, path_).message());
    if (n == 0) return data_loss(path_ + ": ends at byte " + std::to_string(offset + static_cast<int64_t>(done)));
    done += static_cast<size_t>(n);
  }
  return ok_status();
}

Result<ShardFile> ShardFile::open(const std::string& path, const ShardRecord& record) {
  KTG_ASSIGN_OR_RETURN(PositionedFile file, PositionedFile::open(path));
  KTG_ASSIGN_OR_RETURN(const int64_t size, file.size());
  if (size != record.size_bytes) {
    return data_loss(path + ": " + std::to_string(size) + " bytes, the manifest says " +
                     std::to_string(record.size_bytes));
  }
  if (record.head_bytes < 1 || record.head_bytes > size)
    return data_loss(path + ": impossible head size in the manifest");
  std::string head(static_cast<size_t>(record.head_bytes), '\0');
  KTG_RETURN_IF_ERROR(file.read(0, head));
  if (xxh3_128(head) != record.head_xxh3) return data_loss(path + ": HDF5 head: checksum differs from the manifest's");
  ShardFile shard(std::move(file), record, std::move(head));
  KTG_RETURN_IF_ERROR(shard.parse().with_context(path));
  return shard;
}

Status ShardFile::parse() {
  quiet_hdf5();
  Hdf5Image image(head_, record_.size_bytes);
  auto file = open_hdf5(image);
  if (!file.ok()) return data_loss(file.status().message());
  KTG_ASSIGN_OR_RETURN(block_checksums_, get_block_table(file->get(), record_.head_bytes));
  for (int part = 0; part < kNumParts; ++part) {
    KTG_RETURN_IF_ERROR(get_group(file->get(), part, record_, block_checksums_.size(), pieces_));
  }
  std::sort(pieces_.begin(), pieces_.end(),
            [](const Piece& a, const Piece& b) { return a.file_offset < b.file_offset; });
  return ok_status();
}

Status ShardFile::check_block(const Piece& piece, int64_t block, std::span<const char> bytes) const {
  const uint64_t want = block_checksums_[static_cast<size_t>(piece.first_block + block)];
  if (XXH3_64bits(bytes.data(), bytes.size()) == want) return ok_status();
  return data_loss(file_.path() + ": " + piece.path() + ": block " + std::to_string(block) + " (bytes " +
                   std::to_string(piece.file_offset + block * kBlockBytes) + " to " +
                   std::to_string(piece.file_offset + block * kBlockBytes + static_cast<int64_t>(bytes.size())) +
                   "): checksum differs");
}

Status ShardFile::read(const Piece& piece, int64_t begin, int64_t count, float* out) {
  KTG_CHECK(begin >= piece.begin && begin + count <= piece.begin + piece.count) << piece.path();
  const int64_t first = begin - piece.begin;  // element of the piece
  for (int64_t block = first / kBlockElements; block * kBlockElements < first + count; ++block) {
    const int64_t block_begin = block * kBlockElements;
    const int64_t block_count = std::min(kBlockElements, piece.count - block_begin);
    const int64_t take_begin = std::max(first, block_begin);
    const int64_t take_end = std::min(first + count, block_begin + block_count);
    const bool whole = take_end - take_begin == block_count;
    if (!whole) scratch_.resize(static_cast<size_t>(kBlockBytes));
    char* to = whole ? reinterpret_cast<char*>(out + (take_begin - first)) : scratch_.data();
    const std::span<char> bytes(to, static_cast<size_t>(block_count) * sizeof(float));
    KTG_RETURN_IF_ERROR(file_.read(piece.file_offset + block_begin * 4, bytes).with_context(piece.path()));
    KTG_RETURN_IF_ERROR(check_block(piece, block, bytes));
    if (!whole) {
      const char* from = scratch_.data() + (take_begin - block_begin) * 4;
      std::copy(from, from + (take_end - take_begin) * 4, reinterpret_cast<char*>(out + (take_begin - first)));
    }
  }
  return ok_status();
}

Status ShardFile::verify() {
  Xxh3Stream hash;
  hash.add(head_);
  int64_t at = record_.head_bytes;
  scratch_.resize(static_cast<size_t>(kBlockBytes));
  const auto skip_to = [&](int64_t end) -> Status {  // padding: only the file's checksum covers it
    while (at < end) {
      const std::span<char> bytes(scratch_.data(), static_cast<size_t>(std::min(kBlockBytes, end - at)));
      KTG_RETURN_IF_ERROR(file_.read(at, bytes));
      hash.add({bytes.data(), bytes.size()});
      at += static_cast<int64_t>(bytes.size());
    }
    return ok_status();
  };
  for (const Piece& piece : pieces_) {
    KTG_RETURN_IF_ERROR(skip_to(piece.file_offset));
    for (int64_t block = 0; block < piece.num_blocks(); ++block) {
      const std::span<char> bytes(scratch_.data(),
                                  static_cast<size_t>(std::min(kBlockBytes, piece.size_bytes() - block * kBlockBytes)));
      KTG_RETURN_IF_ERROR(file_.read(at, bytes));
      KTG_RETURN_IF_ERROR(check_block(piece, block, bytes));
      hash.add({bytes.data(), bytes.size()});
      at += static_cast<int64_t>(bytes.size());
    }
  }
  KTG_RETURN_IF_ERROR(skip_to(record_.size_bytes));
  if (hash.hex() != record_.xxh3) return data_loss(file_.path() + ": checksum of the file differs from the manifest's");
  return ok_status();
}

}  // namespace kintsugi::checkpoint
