#include "runtime/trace/event_file.h"

#include <isa-l/crc.h>

#include <bit>
#include <cstring>

namespace kintsugi::trace {
namespace {

static_assert(std::endian::native == std::endian::little, "records are little endian");

constexpr size_t kFrameBytes = 16;  // length, its CRC, the event's CRC

template <class T>
void put_raw(std::string& out, T value) {
  char bytes[sizeof value];
  std::memcpy(bytes, &value, sizeof value);
  out.append(bytes, sizeof value);
}

template <class T>
T get_raw(std::string_view bytes) {
  T value;
  std::memcpy(&value, bytes.data(), sizeof value);
  return value;
}

// Protobuf: a field is a key (number << 3 | wire type) and a value; integers are base-128 varints.
enum WireType : uint64_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

void put_varint(std::string& out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out += static_cast<char>(value | 0x80);
  out += static_cast<char>(value);
}
void put_key(std::string& out, uint64_t field, WireType type) { put_varint(out, field << 3 | type); }
void put_varint_field(std::string& out, uint64_t field, uint64_t value) {
  put_key(out, field, kVarint);
  put_varint(out, value);
}
void put_bytes_field(std::string& out, uint64_t field, std::string_view bytes) {
  put_key(out, field, kBytes);
  put_varint(out, bytes.size());
  out.append(bytes);
}

std::string event_head(double wall_time_s, int64_t step) {
  std::string event;
  put_key(event, 1, kFixed64);
  put_raw(event, wall_time_s);
  put_varint_field(event, 2, static_cast<uint64_t>(step));
  return event;
}

}  // namespace

uint32_t masked_crc32c(std::string_view bytes) {
  // The library takes no const and returns the remainder without its final inversion.
  auto* data = reinterpret_cast<unsigned char*>(const_cast<char*>(bytes.data()));
  const uint32_t crc = ~crc32_iscsi(data, static_cast<int>(bytes.size()), 0xffffffffu);
  return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
}

int64_t whole_records_end(std::string_view file) {
  size_t at = 0;
  while (file.size() - at >= kFrameBytes) {
    const std::string_view record = file.substr(at);
    const auto length = get_raw<uint64_t>(record);
    if (get_raw<uint32_t>(record.substr(8)) != masked_crc32c(record.substr(0, 8))) break;
    if (length > record.size() - kFrameBytes) break;
    const std::string_view event = record.substr(12, length);
    if (get_raw<uint32_t>(record.substr(12 + length)) != masked_crc32c(event)) break;
    at += kFrameBytes + length;
  }
  return static_cast<int64_t>(at);
}

Result<EventFile> EventFile::open(FileSystem& fs, const std::string& dir) {
  KTG_RETURN_IF_ERROR(fs.create_dirs(dir));
  EventFile file(fs, join_path(dir, "events.out.tfevents.kintsugi"));
  int64_t whole = 0;
  if (fs.exists(file.path_)) {
    KTG_ASSIGN_OR_RETURN(const std::string bytes, fs.read_file(file.path_));
    whole = whole_records_end(bytes);
    if (whole < static_cast<int64_t>(bytes.size())) KTG_RETURN_IF_ERROR(fs.truncate_file(file.path_, whole));
  }
  if (whole == 0) {
    std::string event = event_head(0, 0);
    put_bytes_field(event, 3, "brain.Event:2");
    KTG_RETURN_IF_ERROR(file.write_record(event));
  }
  return file;
}

Status EventFile::add(int64_t step, double wall_time_s, std::span<const Scalar> scalars) {
  std::string summary;
  for (const Scalar& scalar : scalars) {
    std::string value;
    put_bytes_field(value, 1, scalar.tag);
    put_key(value, 2, kFixed32);
    put_raw(value, static_cast<float>(scalar.value));
    put_bytes_field(summary, 1, value);
  }
  std::string event = event_head(wall_time_s, step);
  put_bytes_field(event, 5, summary);
  return write_record(event);
}

Status EventFile::start_session(int64_t next_step, double wall_time_s) {
  std::string session;
  put_varint_field(session, 1, 1);
  std::string event = event_head(wall_time_s, next_step);
  put_bytes_field(event, 7, session);
  return write_record(event);
}

Status EventFile::write_record(std::string_view event) {
  std::string record;
  put_raw(record, static_cast<uint64_t>(event.size()));
  put_raw(record, masked_crc32c(record));
  record.append(event);
  put_raw(record, masked_crc32c(event));
  return fs_->append_file(path_, record);
}

}  // namespace kintsugi::trace
