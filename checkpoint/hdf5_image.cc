#include "checkpoint/hdf5_image.h"

#if H5_VERSION_GE(1, 13, 2)
#include <H5FDdevelop.h>
#endif

#include <algorithm>
#include <cstring>
#include <memory>

namespace kintsugi::checkpoint {
namespace {

// The library's view of an open image: its public part first, as every driver does.
struct ImageHandle {
  H5FD_t base;
  Hdf5Image* image;
  haddr_t allocated_end;
};

struct DriverInfo {
  Hdf5Image* image;
};

ImageHandle* handle_of(H5FD_t* file) { return reinterpret_cast<ImageHandle*>(file); }
const ImageHandle* handle_of(const H5FD_t* file) { return reinterpret_cast<const ImageHandle*>(file); }

H5FD_t* driver_open(const char*, unsigned, hid_t fapl, haddr_t) {
  const auto* info = static_cast<const DriverInfo*>(H5Pget_driver_info(fapl));
  if (info == nullptr) return nullptr;
  auto handle = std::make_unique<ImageHandle>();  // value-initialised; the library fills `base`
  handle->image = info->image;
  return reinterpret_cast<H5FD_t*>(handle.release());
}

herr_t driver_close(H5FD_t* file) {
  delete handle_of(file);
  return 0;
}

herr_t driver_query(const H5FD_t*, unsigned long* flags) {
  if (flags != nullptr) *flags = H5FD_FEAT_AGGREGATE_METADATA | H5FD_FEAT_ACCUMULATE_METADATA;
  return 0;
}

haddr_t driver_get_eoa(const H5FD_t* file, H5FD_mem_t) { return handle_of(file)->allocated_end; }

herr_t driver_set_eoa(H5FD_t* file, H5FD_mem_t, haddr_t end) {
  handle_of(file)->allocated_end = end;
  return 0;
}

haddr_t driver_get_eof(const H5FD_t* file, H5FD_mem_t) {
  return static_cast<haddr_t>(handle_of(file)->image->file_end());
}

herr_t driver_read(H5FD_t* file, H5FD_mem_t, hid_t, haddr_t offset, size_t size, void* out) {
  return handle_of(file)->image->read(static_cast<int64_t>(offset), static_cast<int64_t>(size), out) ? 0 : -1;
}

herr_t driver_write(H5FD_t* file, H5FD_mem_t, hid_t, haddr_t offset, size_t size, const void* data) {
  handle_of(file)->image->write(static_cast<int64_t>(offset), static_cast<int64_t>(size), data);
  return 0;
}

// The library's last word on how long the file is.
herr_t driver_truncate(H5FD_t* file, hid_t, hbool_t) {
  handle_of(file)->image->set_file_end(static_cast<int64_t>(handle_of(file)->allocated_end));
  return 0;
}

hid_t image_driver() {
  static const hid_t id = [] {
    static H5FD_class_t cls{};
#if H5_VERSION_GE(1, 13, 2)
    cls.version = H5FD_CLASS_VERSION;
    cls.value = static_cast<H5FD_class_value_t>(H5_VFD_RESERVED + 67);
#endif
    cls.name = "kintsugi_image";
    cls.maxaddr = static_cast<haddr_t>(INT64_MAX);
    cls.fc_degree = H5F_CLOSE_STRONG;
    cls.fapl_size = sizeof(DriverInfo);
    cls.open = driver_open;
    cls.close = driver_close;
    cls.query = driver_query;
    cls.get_eoa = driver_get_eoa;
    cls.set_eoa = driver_set_eoa;
    cls.get_eof = driver_get_eof;
    cls.read = driver_read;
    cls.write = driver_write;
    cls.truncate = driver_truncate;
    const H5FD_mem_t free_list_map[H5FD_MEM_NTYPES] = H5FD_FLMAP_DICHOTOMY;
    std::copy(std::begin(free_list_map), std::end(free_list_map), std::begin(cls.fl_map));
    return H5FDregister(&cls);
  }();
  return id;
}

Result<Hid> access_list(Hdf5Image& image) {
  Hid fapl(H5Pcreate(H5P_FILE_ACCESS), H5Pclose);
  const DriverInfo info{&image};
  if (!fapl.ok() || image_driver() < 0 || H5Pset_driver(fapl.get(), image_driver(), &info) < 0) {
    return hdf5_error("HDF5 file driver");
  }
  return fapl;
}

extern "C" herr_t keep_deepest_message(unsigned, const H5E_error2_t* error, void* out) {
  if (error->desc != nullptr) *static_cast<std::string*>(out) = error->desc;
  return 0;
}

}  // namespace

Hdf5Image::Hdf5Image(std::string_view head, int64_t size_bytes)
    : file_end_(size_bytes), readable_end_(static_cast<int64_t>(head.size())) {
  write(0, readable_end_, head.data());
}

bool Hdf5Image::read(int64_t offset, int64_t size, void* out) const {
  if (offset < 0 || size < 0 || offset > readable_end_ - size) return false;
  char* to = static_cast<char*>(out);
  while (size > 0) {
    const int64_t within = offset % kPageBytes;
    const int64_t n = std::min(size, kPageBytes - within);
    const auto page = pages_.find(offset / kPageBytes);
    if (page == pages_.end()) {
      std::memset(to, 0, static_cast<size_t>(n));
    } else {
      std::memcpy(to, page->second.data() + within, static_cast<size_t>(n));
    }
    to += n;
    offset += n;
    size -= n;
  }
  return true;
}

void Hdf5Image::write(int64_t offset, int64_t size, const void* data) {
  const char* from = static_cast<const char*>(data);
  written_end_ = std::max(written_end_, offset + size);
  while (size > 0) {
    const int64_t within = offset % kPageBytes;
    const int64_t n = std::min(size, kPageBytes - within);
    auto& page = pages_.try_emplace(offset / kPageBytes).first->second;
    std::memcpy(page.data() + within, from, static_cast<size_t>(n));
    from += n;
    offset += n;
    size -= n;
  }
}

std::string Hdf5Image::bytes(int64_t end) const {
  std::string out(static_cast<size_t>(end), '\0');
  KTG_CHECK(read(0, end, out.data()));
  return out;
}

void quiet_hdf5() {
  H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
  H5Eclear2(H5E_DEFAULT);
}

Status hdf5_error(std::string_view what) {
  std::string detail = "no detail";
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_DOWNWARD, keep_deepest_message, &detail);
  return internal_error(std::string(what) + ": HDF5: " + detail);
}

Result<Hid> create_hdf5(Hdf5Image& image, int64_t metadata_block_bytes) {
  KTG_ASSIGN_OR_RETURN(Hid fapl, access_list(image));
  if (H5Pset_meta_block_size(fapl.get(), static_cast<hsize_t>(metadata_block_bytes)) < 0) {
    return hdf5_error("HDF5 file layout");
  }
  Hid file(H5Fcreate("shard", H5F_ACC_TRUNC, H5P_DEFAULT, fapl.get()), H5Fclose);
  if (!file.ok()) return hdf5_error("H5Fcreate");
  return file;
}

Result<Hid> open_hdf5(Hdf5Image& image) {
  KTG_ASSIGN_OR_RETURN(Hid fapl, access_list(image));
  Hid file(H5Fopen("shard", H5F_ACC_RDONLY, fapl.get()), H5Fclose);
  if (!file.ok()) return hdf5_error("H5Fopen");
  return file;
}

}  // namespace kintsugi::checkpoint
