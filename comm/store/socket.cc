#include "comm/store/socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

namespace kintsugi::comm {

namespace {

struct AddressDeleter {
  void operator()(addrinfo* a) const { ::freeaddrinfo(a); }
};
using AddressList = std::unique_ptr<addrinfo, AddressDeleter>;

std::string where(const std::string& host, int port) { return host + ":" + std::to_string(port); }

Result<AddressList> resolve(const std::string& host, int port, bool passive) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = (passive ? AI_PASSIVE : 0) | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(host.empty() ? nullptr : host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error == EAI_AGAIN) return unavailable("looking up " + host + ": " + ::gai_strerror(error));
  if (error != 0) return invalid_argument("looking up " + where(host, port) + ": " + ::gai_strerror(error));
  return AddressList(found);
}

Socket open_socket(const addrinfo& address) {
  return Socket(::socket(address.ai_family, address.ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, address.ai_protocol));
}

// Waits until the socket can be read or written (or has failed, which the next call then says).
Status wait_for(const Socket& socket, short events, Deadline deadline) {
  while (true) {
    pollfd p{.fd = socket.fd(), .events = events, .revents = 0};
    const int ready = ::poll(&p, 1, deadline.remaining_ms());
    if (ready > 0) return ok_status();
    if (ready < 0 && errno != EINTR) return status_from_errno(errno, "poll on a store connection");
    if (deadline.passed()) return deadline_exceeded("the store did not answer in time");
  }
}

Status gone(int error) {
  return unavailable(std::string("the store's connection is lost: ") +
                     (error == 0 ? "closed by the other side" : std::strerror(error)));
}

}  // namespace

Socket& Socket::operator=(Socket&& other) noexcept {
  if (this != &other) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = other.release();
  }
  return *this;
}
Socket::~Socket() {
  if (fd_ >= 0) ::close(fd_);
}
int Socket::release() { return std::exchange(fd_, -1); }

Result<Socket> listen_on(const std::string& host, int port) {
  KTG_ASSIGN_OR_RETURN(const AddressList addresses, resolve(host, port, /*passive=*/true));
  int error = EADDRNOTAVAIL;
  for (const addrinfo* a = addresses.get(); a != nullptr; a = a->ai_next) {
    Socket socket = open_socket(*a);
    if (!socket.valid()) {
      error = errno;
      continue;
    }
    const int on = 1;
    ::setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (::bind(socket.fd(), a->ai_addr, a->ai_addrlen) == 0 && ::listen(socket.fd(), SOMAXCONN) == 0) return socket;
    error = errno;
  }
  if (error == EADDRINUSE) return unavailable("store port " + where(host, port) + " is taken");
  return status_from_errno(error, "store cannot listen on " + where(host, port));
}

Result<int> port_of(const Socket& socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (::getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    return status_from_errno(errno, "getsockname");
  }
  if (address.ss_family == AF_INET6) return ntohs(reinterpret_cast<sockaddr_in6&>(address).sin6_port);
  return ntohs(reinterpret_cast<sockaddr_in&>(address).sin_port);
}

Result<Socket> connect_once(const std::string& host, int port, Deadline deadline) {
  KTG_ASSIGN_OR_RETURN(const AddressList addresses, resolve(host, port, /*passive=*/false));
  int error = ECONNREFUSED;
  for (const addrinfo* a = addresses.get(); a != nullptr; a = a->ai_next) {
    Socket socket = open_socket(*a);
    if (!socket.valid()) return status_from_errno(errno, "store socket");
    error = ::connect(socket.fd(), a->ai_addr, a->ai_addrlen) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
      KTG_RETURN_IF_ERROR(wait_for(socket, POLLOUT, deadline));
      socklen_t size = sizeof(error);
      ::getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &size);
    }
    if (error != 0) continue;
    const int on = 1;
    ::setsockopt(socket.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    ::setsockopt(socket.fd(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
    return socket;
  }
  return unavailable("no store answers at " + where(host, port) + ": " + std::strerror(error));
}

Status send_all(const Socket& socket, std::string_view bytes, Deadline deadline) {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(socket.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent >= 0) {
      bytes.remove_prefix(static_cast<size_t>(sent));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      KTG_RETURN_IF_ERROR(wait_for(socket, POLLOUT, deadline));
    } else if (errno != EINTR) {
      return gone(errno);
    }
  }
  return ok_status();
}

Result<std::string> receive_exactly(const Socket& socket, size_t size_bytes, Deadline deadline) {
  std::string out(size_bytes, '\0');
  for (size_t have = 0; have < size_bytes;) {
    const ssize_t got = ::recv(socket.fd(), out.data() + have, size_bytes - have, 0);
    if (got > 0) {
      have += static_cast<size_t>(got);
    } else if (got == 0) {
      return gone(0);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      KTG_RETURN_IF_ERROR(wait_for(socket, POLLIN, deadline));
    } else if (errno != EINTR) {
      return gone(errno);
    }
  }
  return out;
}

bool is_idle(const Socket& socket) {
  char byte = 0;
  return ::recv(socket.fd(), &byte, 1, MSG_PEEK) < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
}

}  // namespace kintsugi::comm
