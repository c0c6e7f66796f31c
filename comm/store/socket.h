// Owners and waits for TCP sockets. All descriptors are close-on-exec and non-blocking; nothing raises SIGPIPE.
#pragma once

#include <string>
#include <string_view>

#include "runtime/base/deadline.h"
#include "runtime/base/status.h"

namespace kintsugi::comm {

class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(other.release()) {}
  Socket& operator=(Socket&& other) noexcept;
  ~Socket();
  int fd() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int release();

 private:
  int fd_ = -1;
};

// Listens on host:port; port 0 takes any free one. kUnavailable when the port is taken.
Result<Socket> listen_on(const std::string& host, int port);
Result<int> port_of(const Socket& socket);
// One attempt. kUnavailable when nobody listens, kInvalidArgument when the host's name means nothing.
Result<Socket> connect_once(const std::string& host, int port, Deadline deadline);

// All of `bytes`. kUnavailable when the peer is gone.
Status send_all(const Socket& socket, std::string_view bytes, Deadline deadline);
// Exactly size_bytes. kUnavailable when the peer is gone.
Result<std::string> receive_exactly(const Socket& socket, size_t size_bytes, Deadline deadline);
// True while an idle connection stands and nothing unexpected has come over it.
bool is_idle(const Socket& socket);

}  // namespace kintsugi::comm
