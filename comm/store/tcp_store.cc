// The client. Each call has a connection to itself while it runs, so that a get that waits holds up nobody; connections
// are kept for later calls, and a call that ends in an error closes its own, which cancels it at the server.
#include <poll.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "comm/store/socket.h"
#include "comm/store/store.h"
#include "comm/store/wire.h"

namespace kintsugi::comm {

namespace {

Result<Socket> open_connection(const std::string& host, int port, Deadline deadline) {
  KTG_ASSIGN_OR_RETURN(Socket socket, connect_once(host, port, deadline));
  KTG_RETURN_IF_ERROR(send_all(socket, kStoreHello, deadline));
  KTG_ASSIGN_OR_RETURN(const std::string hello, receive_exactly(socket, kStoreHello.size(), deadline));
  if (hello == kStoreHello) return socket;
  return failed_precondition(host + ":" + std::to_string(port) + " is not a store of this program");
}

class TcpStore final : public Store {
 public:
  TcpStore(std::string host, int port, Socket first) : host_(std::move(host)), port_(port) {
    idle_.push_back(std::move(first));
  }

  Status set(std::string_view key, std::string_view value, Deadline deadline) override {
    auto answer = call({.op = StoreOp::kSet, .key = std::string(key), .value = std::string(value)}, deadline);
    return answer.ok() ? ok_status() : answer.status();
  }
  Result<std::string> get(std::string_view key, Deadline deadline) override {
    while (true) {  // the server's patience ends after an hour at the latest
      auto answer = call({.op = StoreOp::kGet, .key = std::string(key), .value = {}}, deadline);
      if (answer.status().code() != StatusCode::kDeadlineExceeded || deadline.passed()) return answer;
    }
  }
  Result<int64_t> add(std::string_view key, int64_t delta, Deadline deadline) override {
    KTG_ASSIGN_OR_RETURN(const std::string answer,
                         call({.op = StoreOp::kAdd, .key = std::string(key), .value = encode_count(delta)}, deadline));
    return decode_count(answer);
  }
  Result<std::string> set_if_absent(std::string_view key, std::string_view value, Deadline deadline) override {
    return call({.op = StoreOp::kSetIfAbsent, .key = std::string(key), .value = std::string(value)}, deadline);
  }

 private:
  Result<std::string> call(StoreRequest request, Deadline deadline) {
    KTG_RETURN_IF_ERROR(check_limits(request.key, request.value));
    request.timeout_ms = static_cast<uint32_t>(deadline.remaining_ms());
    KTG_ASSIGN_OR_RETURN(Socket socket, take_connection(deadline));
    KTG_RETURN_IF_ERROR(send_all(socket, encode_request(request), deadline));
    KTG_ASSIGN_OR_RETURN(const std::string head, receive_exactly(socket, 4, deadline));
    const int64_t size = body_length(head).value_or(0);
    if (size < 1 || size > kMaxBodyBytes) {
      return internal_error("store answer of " + std::to_string(size) + " bytes: at most " +
                            std::to_string(kMaxBodyBytes));
    }
    KTG_ASSIGN_OR_RETURN(std::string body, receive_exactly(socket, static_cast<size_t>(size), deadline));
    {
      std::lock_guard lock(mutex_);
      idle_.push_back(std::move(socket));
    }
    const auto code = static_cast<StatusCode>(body[0]);
    body.erase(0, 1);
    if (code != StatusCode::kOk) return Status(code, std::move(body));
    return body;
  }

  Result<Socket> take_connection(Deadline deadline) {
    {
      std::lock_guard lock(mutex_);
      while (!idle_.empty()) {
        Socket socket = std::move(idle_.back());
        idle_.pop_back();
        if (is_idle(socket)) return socket;  // else the server has closed it since
      }
    }
    return open_connection(host_, port_, deadline);
  }

  const std::string host_;
  const int port_;
  std::mutex mutex_;
  std::vector<Socket> idle_;
};

}  // namespace

Result<std::unique_ptr<Store>> connect_store(const std::string& host, int port, Deadline deadline) {
  constexpr int kRetryMs = 10;
  while (true) {
    auto socket = open_connection(host, port, deadline);
    if (socket.ok()) return std::unique_ptr<Store>(new TcpStore(host, port, std::move(socket).value()));
    if (socket.status().code() != StatusCode::kUnavailable) return socket.status();
    if (deadline.passed()) return deadline_exceeded(socket.status().message());
    ::poll(nullptr, 0, std::min(kRetryMs, deadline.remaining_ms()));
  }
}

}  // namespace kintsugi::comm
