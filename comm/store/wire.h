// Frames of PROTOCOL.md as bytes: pure functions, so that garbage is tested without sockets.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "runtime/base/status.h"

namespace kintsugi::comm {

inline constexpr std::string_view kStoreHello = "KTGSTOR1";
inline constexpr int64_t kMaxKeyBytes = 1024;
inline constexpr int64_t kMaxValueBytes = 1 << 20;
inline constexpr int64_t kRequestHeadBytes = 7;  // op, timeout, key length
inline constexpr int64_t kMaxBodyBytes = kMaxValueBytes + kMaxKeyBytes + kRequestHeadBytes;

enum class StoreOp : uint8_t { kSet = 1, kGet = 2, kAdd = 3, kSetIfAbsent = 4 };

struct StoreRequest {
  StoreOp op{};
  uint32_t timeout_ms = 0;
  std::string key;
  std::string value;
};

// kInvalidArgument unless the key has 1 to 1024 bytes and the value at most 1 MiB.
Status check_limits(std::string_view key, std::string_view value);

// Whole frames, length included.
std::string encode_request(const StoreRequest& request);
std::string encode_answer(StatusCode code, std::string_view value);

// The length of the body whose frame starts `bytes`; nothing while its four bytes have not all come.
std::optional<int64_t> body_length(std::string_view bytes);
// A body without its length. kInvalidArgument when it is no request.
Result<StoreRequest> decode_request(std::string_view body);

std::string encode_count(int64_t count);
Result<int64_t> decode_count(std::string_view value);

}  // namespace kintsugi::comm
