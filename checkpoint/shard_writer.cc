// write_shard: the HDF5 library lays the file out in memory (hdf5_image.h), and the bytes go to disk in one pass
// from front to back: head, then payload straight from the state, hashed on the way.
#include <algorithm>
#include <array>
#include <bit>

#include "checkpoint/hdf5_image.h"
#include "checkpoint/shard_file.h"
#include "checkpoint/shard_layout.h"
#include "checkpoint/xxh3.h"
#include "kernels/bfloat16.h"

namespace kintsugi::checkpoint {
namespace {

static_assert(std::endian::native == std::endian::little, "payload is written as it lies in memory");

std::string_view bytes_of(const float* values, int64_t count) {
  return {reinterpret_cast<const char*>(values), static_cast<size_t>(count) * sizeof(float)};
}

// The piece's elements as the file holds them: body(bytes), in one go where they lie so in the caller's memory,
// otherwise block by block.
template <class Body>
Status visit_payload(const ShardView& shard, const Piece& piece, Body&& body) {
  if (piece.part == 0 || shard.moments_dtype == kernels::DType::kF32) {
    const void* const part = std::array<const void*, kNumParts>{shard.weights, shard.m, shard.v}[piece.part];
    return body(bytes_of(static_cast<const float*>(part) + piece.local_begin, piece.count));
  }
  const auto* const moments = static_cast<const kernels::BFloat16*>(piece.part == 1 ? shard.m : shard.v);
  std::vector<float> block(static_cast<size_t>(std::min(piece.count, kBlockElements)));
  for (int64_t at = 0; at < piece.count; at += kBlockElements) {
    const int64_t count = std::min(piece.count - at, kBlockElements);
    runtime::widen(block.data(), moments + piece.local_begin + at, shard.moments_dtype, count);
    KTG_RETURN_IF_ERROR(body(bytes_of(block.data(), count)));
  }
  return ok_status();
}

Result<std::vector<uint64_t>> block_checksums(const ShardView& shard, const std::vector<Piece>& pieces) {
  std::vector<uint64_t> sums;
  for (const Piece& piece : pieces) {
    KTG_RETURN_IF_ERROR(visit_payload(shard, piece, [&](std::string_view rest) {
      while (!rest.empty()) {
        const std::string_view block = rest.substr(0, static_cast<size_t>(kBlockBytes));
        sums.push_back(XXH3_64bits(block.data(), block.size()));
        rest.remove_prefix(block.size());
      }
      return ok_status();
    }));
  }
  return sums;
}

Status put_attribute(hid_t object, const char* name, std::span<const int64_t> values, bool scalar) {
  const hsize_t size = values.size();
  const Hid space(scalar ? H5Screate(H5S_SCALAR) : H5Screate_simple(1, &size, nullptr), H5Sclose);
  const Hid attribute(H5Acreate2(object, name, H5T_STD_I64LE, space.get(), H5P_DEFAULT, H5P_DEFAULT), H5Aclose);
  if (!attribute.ok() || H5Awrite(attribute.get(), H5T_NATIVE_INT64, values.data()) < 0) return hdf5_error(name);
  return ok_status();
}

Status put_attribute(hid_t object, const char* name, int64_t value) {
  return put_attribute(object, name, std::span(&value, 1), true);
}

Status put_attribute(hid_t object, const char* name, const std::string& text) {
  const Hid type(H5Tcopy(H5T_C_S1), H5Tclose);
  if (H5Tset_size(type.get(), text.size() + 1) < 0 || H5Tset_cset(type.get(), H5T_CSET_UTF8) < 0) {
    return hdf5_error(name);
  }
  const Hid space(H5Screate(H5S_SCALAR), H5Sclose);
  const Hid attribute(H5Acreate2(object, name, type.get(), space.get(), H5P_DEFAULT, H5P_DEFAULT), H5Aclose);
  if (!attribute.ok() || H5Awrite(attribute.get(), type.get(), text.c_str()) < 0) return hdf5_error(name);
  return ok_status();
}

// Contiguous, space allocated at creation, never filled: the payload's place without its bytes. No times: the same
// state gives the same bytes.
Result<Hid> payload_property_list() {
  Hid list(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
  if (!list.ok() || H5Pset_layout(list.get(), H5D_CONTIGUOUS) < 0 ||
      H5Pset_alloc_time(list.get(), H5D_ALLOC_TIME_EARLY) < 0 ||
      H5Pset_fill_time(list.get(), H5D_FILL_TIME_NEVER) < 0 || H5Pset_obj_track_times(list.get(), false) < 0) {
    return hdf5_error("dataset properties");
  }
  return list;
}

Status put_block_table(hid_t file, hid_t properties, const std::vector<uint64_t>& sums) {
  if (sums.empty()) return ok_status();  // a rank may own nothing
  const hsize_t size = sums.size();
  const Hid space(H5Screate_simple(1, &size, nullptr), H5Sclose);
  const Hid data(H5Dcreate2(file, "block_xxh3", H5T_STD_U64LE, space.get(), H5P_DEFAULT, properties, H5P_DEFAULT),
                 H5Dclose);
  if (!data.ok() || H5Dwrite(data.get(), H5T_NATIVE_UINT64, H5S_ALL, H5S_ALL, H5P_DEFAULT, sums.data()) < 0) {
    return hdf5_error("block_xxh3");
  }
  return put_attribute(data.get(), "block_bytes", kBlockBytes);
}

Status put_dataset(hid_t group, hid_t properties, Piece& piece) {
  // A whole tensor keeps its shape; a part is a run of elements.
  int64_t numel = 1;
  for (const int64_t n : piece.shape) numel *= n;
  std::vector<hsize_t> dims;
  if (piece.count == numel) {
    dims.assign(piece.shape.begin(), piece.shape.end());
  } else {
    dims = {static_cast<hsize_t>(piece.count)};
  }
  const Hid space(H5Screate_simple(static_cast<int>(dims.size()), dims.data(), nullptr), H5Sclose);
  const Hid data(
      H5Dcreate2(group, piece.tensor.c_str(), H5T_IEEE_F32LE, space.get(), H5P_DEFAULT, properties, H5P_DEFAULT),
      H5Dclose);
  if (!data.ok()) return hdf5_error(piece.path());
  KTG_RETURN_IF_ERROR(put_attribute(data.get(), "global_shape", piece.shape, false));
  KTG_RETURN_IF_ERROR(put_attribute(data.get(), "begin", piece.begin));
  KTG_RETURN_IF_ERROR(put_attribute(data.get(), "first_block", piece.first_block));
  const haddr_t offset = H5Dget_offset(data.get());
  if (offset == HADDR_UNDEF) return hdf5_error(piece.path());
  piece.file_offset = static_cast<int64_t>(offset);
  return ok_status();
}

struct Head {
  std::string bytes;
  int64_t file_end = 0;
};

// Lays the file out; fills in the pieces' offsets. `fits` is false when structures landed behind payload, for want of
// a larger metadata block.
Result<Head> lay_out(std::vector<Piece>& pieces, const std::vector<uint64_t>& sums, const CheckpointMeta& meta,
                     int rank, const std::vector<ShardRange>& ranges, int64_t metadata_block_bytes, bool& fits) {
  Hdf5Image image;
  KTG_ASSIGN_OR_RETURN(Hid file, create_hdf5(image, metadata_block_bytes));
  KTG_ASSIGN_OR_RETURN(const Hid properties, payload_property_list());
  {
    const Hid root(H5Gopen2(file.get(), "/", H5P_DEFAULT), H5Gclose);
    if (!root.ok()) return hdf5_error("/");
    KTG_RETURN_IF_ERROR(put_attribute(root.get(), "format", std::string("kintsugi-shard")));
    KTG_RETURN_IF_ERROR(put_attribute(root.get(), "run_id", meta.run_id));
    const std::pair<const char*, int64_t> numbers[] = {
        {"version", 2}, {"step", meta.step}, {"rank", rank}, {"world_size", meta.world_size}};
    for (const auto& [name, value] : numbers) KTG_RETURN_IF_ERROR(put_attribute(root.get(), name, value));
    std::vector<int64_t> flat;
    for (const ShardRange& range : ranges) flat.insert(flat.end(), {range.begin, range.count});
    if (!flat.empty()) KTG_RETURN_IF_ERROR(put_attribute(root.get(), "ranges", flat, false));
  }
  KTG_RETURN_IF_ERROR(put_block_table(file.get(), properties.get(), sums));
  for (int part = 0; part < kNumParts; ++part) {
    const Hid group(H5Gcreate2(file.get(), kPartNames[part], H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT), H5Gclose);
    if (!group.ok()) return hdf5_error(kPartNames[part]);
    for (Piece& piece : pieces) {
      if (piece.part == part) KTG_RETURN_IF_ERROR(put_dataset(group.get(), properties.get(), piece));
    }
  }
  if (!file.close()) return hdf5_error("H5Fclose");
  const int64_t written_end = image.written_end();
  fits = true;
  for (const Piece& piece : pieces) fits = fits && piece.file_offset >= written_end;
  return Head{fits ? image.bytes(written_end) : std::string(), image.file_end()};
}

// Appends to one file in large strokes and hashes what passes.
class HashedAppender {
 public:
  HashedAppender(FileSystem& fs, std::string path) : fs_(fs), path_(std::move(path)) {}
  int64_t size() const { return size_; }
  std::string hex() const { return hash_.hex(); }

  Status add(std::string_view bytes) {
    hash_.add(bytes);
    size_ += static_cast<int64_t>(bytes.size());
    if (bytes.size() < kStroke) {
      pending_.append(bytes);
      return pending_.size() < kStroke ? ok_status() : flush();
    }
    KTG_RETURN_IF_ERROR(flush());
    return fs_.append_file(path_, bytes);
  }
  Status add_zeros(int64_t count) {
    return count <= 0 ? ok_status() : add(std::string(static_cast<size_t>(count), '\0'));
  }
  Status flush() {
    if (pending_.empty()) return ok_status();
    KTG_RETURN_IF_ERROR(fs_.append_file(path_, pending_));
    pending_.clear();
    return ok_status();
  }

 private:
  static constexpr size_t kStroke = 4 << 20;
  FileSystem& fs_;
  std::string path_;
  std::string pending_;
  Xxh3Stream hash_;
  int64_t size_ = 0;
};

Status write_file(FileSystem& fs, const std::string& path, const Head& head, const std::vector<Piece>& pieces,
                  const ShardView& shard, ShardRecord& record) {
  std::vector<const Piece*> by_offset;  // the library's allocator owes us no order
  for (const Piece& piece : pieces) by_offset.push_back(&piece);
  std::sort(by_offset.begin(), by_offset.end(),
            [](const Piece* a, const Piece* b) { return a->file_offset < b->file_offset; });
  KTG_RETURN_IF_ERROR(fs.write_file(path, ""));
  HashedAppender out(fs, path);
  KTG_RETURN_IF_ERROR(out.add(head.bytes));
  for (const Piece* piece : by_offset) {
    KTG_CHECK(piece->file_offset >= out.size()) << piece->path() << " overlaps what lies before it";
    KTG_RETURN_IF_ERROR(out.add_zeros(piece->file_offset - out.size()));
    KTG_RETURN_IF_ERROR(visit_payload(shard, *piece, [&](std::string_view bytes) { return out.add(bytes); }));
  }
  KTG_RETURN_IF_ERROR(out.add_zeros(head.file_end - out.size()));
  KTG_RETURN_IF_ERROR(out.flush());
  record.size_bytes = out.size();
  record.xxh3 = out.hex();
  return fs.sync_file(path);
}

}  // namespace

Result<ShardRecord> write_shard(FileSystem& fs, const std::string& partial_dir, const runtime::ParamTable& table,
                                const ShardView& shard, const CheckpointMeta& meta, int rank) {
  quiet_hdf5();
  ShardRecord record;
  record.file = "rank-" + std::to_string(rank) + ".h5";
  for (const runtime::StateRange& range : shard.ranges) {
    if (range.count > 0) record.ranges.push_back({range.begin, range.count});
  }
  const std::string path = join_path(partial_dir, record.file);

  KTG_ASSIGN_OR_RETURN(std::vector<Piece> pieces, cut_into_pieces(table, shard.ranges));
  KTG_ASSIGN_OR_RETURN(const std::vector<uint64_t> sums, block_checksums(shard, pieces));
  // Measured with 36 to 333 datasets: 490 to 600 bytes each, everything included. A second try doubles.
  int64_t metadata_block_bytes =
      8192 + 640 * static_cast<int64_t>(pieces.size()) + 16 * static_cast<int64_t>(record.ranges.size());
  bool fits = false;
  Head head;
  for (int tries = 0; !fits; ++tries, metadata_block_bytes *= 2) {
    if (tries == 8) return internal_error(path + ": HDF5's structures do not fit before the payload");
    auto laid_out = lay_out(pieces, sums, meta, rank, record.ranges, metadata_block_bytes, fits);
    if (!laid_out.ok()) return laid_out.status().with_context(path);
    head = std::move(laid_out).value();
  }
  record.head_bytes = static_cast<int64_t>(head.bytes.size());
  record.head_xxh3 = xxh3_128(head.bytes);

  Status status = write_file(fs, path, head, pieces, shard, record);
  if (status.ok()) {
    // Read back: catches what a page cache can show of short writes, bad memory and a state that moved meanwhile.
    auto written = ShardFile::open(path, record);
    status = written.ok() ? written->verify() : written.status();
  }
  if (!status.ok()) {
    // A full disk should get its space back. What went wrong first is what the caller needs to hear.
    static_cast<void>(fs.remove_file(path));
    return status;
  }
  return record;
}

}  // namespace kintsugi::checkpoint
