#include "comm/store/wire.h"

namespace kintsugi::comm {

namespace {

template <class T>
void put(std::string& out, T value) {
  for (size_t i = 0; i < sizeof(T); ++i) out.push_back(static_cast<char>(static_cast<uint64_t>(value) >> (8 * i)));
}

template <class T>
T take(std::string_view& in) {
  uint64_t value = 0;
  for (size_t i = 0; i < sizeof(T); ++i) value |= static_cast<uint64_t>(static_cast<uint8_t>(in[i])) << (8 * i);
  in.remove_prefix(sizeof(T));
  return static_cast<T>(value);
}

}  // namespace

Status check_limits(std::string_view key, std::string_view value) {
  if (key.empty() || static_cast<int64_t>(key.size()) > kMaxKeyBytes) {
    return invalid_argument("store key of " + std::to_string(key.size()) + " bytes: allowed are 1 to " +
                            std::to_string(kMaxKeyBytes));
  }
  if (static_cast<int64_t>(value.size()) > kMaxValueBytes) {
    return invalid_argument("store value of " + std::to_string(value.size()) + " bytes for key \"" + std::string(key) +
                            "\": at most " + std::to_string(kMaxValueBytes));
  }
  return ok_status();
}

std::string encode_request(const StoreRequest& request) {
  std::string out;
  put<uint32_t>(out, static_cast<uint32_t>(kRequestHeadBytes + request.key.size() + request.value.size()));
  put<uint8_t>(out, static_cast<uint8_t>(request.op));
  put<uint32_t>(out, request.timeout_ms);
  put<uint16_t>(out, static_cast<uint16_t>(request.key.size()));
  return out.append(request.key).append(request.value);
}

std::string encode_answer(StatusCode code, std::string_view value) {
  std::string out;
  put<uint32_t>(out, static_cast<uint32_t>(1 + value.size()));
  put<uint8_t>(out, static_cast<uint8_t>(code));
  return out.append(value);
}

std::optional<int64_t> body_length(std::string_view bytes) {
  if (bytes.size() < sizeof(uint32_t)) return std::nullopt;
  return take<uint32_t>(bytes);
}

Result<StoreRequest> decode_request(std::string_view body) {
  const size_t body_bytes = body.size();
  if (static_cast<int64_t>(body_bytes) < kRequestHeadBytes) {
    return invalid_argument("store request of " + std::to_string(body_bytes) + " bytes: want at least " +
                            std::to_string(kRequestHeadBytes));
  }
  StoreRequest request;
  const auto op = take<uint8_t>(body);
  if (op < 1 || op > 4) return invalid_argument("store operation " + std::to_string(op) + " is unknown");
  request.op = static_cast<StoreOp>(op);
  request.timeout_ms = take<uint32_t>(body);
  const auto key_bytes = take<uint16_t>(body);
  if (key_bytes > body.size()) {
    return invalid_argument("store request: want a key of " + std::to_string(key_bytes) + " bytes, got " +
                            std::to_string(body.size()));
  }
  request.key = body.substr(0, key_bytes);
  request.value = body.substr(key_bytes);
  return request;
}

std::string encode_count(int64_t count) {
  std::string out;
  put<int64_t>(out, count);
  return out;
}

Result<int64_t> decode_count(std::string_view value) {
  if (value.size() != sizeof(int64_t)) {
    return invalid_argument("store counter: want 8 bytes, got " + std::to_string(value.size()));
  }
  return take<int64_t>(value);
}

}  // namespace kintsugi::comm
