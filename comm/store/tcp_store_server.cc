// The server: one thread, one poll loop, no lock. A get for a key that does not exist is parked at its connection.
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <list>
#include <thread>
#include <vector>

#include "comm/store/socket.h"
#include "comm/store/store.h"
#include "comm/store/store_table.h"
#include "comm/store/wire.h"
#include "runtime/base/log.h"

namespace kintsugi::comm {

namespace {

constexpr size_t kMaxConnections = 4096;
constexpr size_t kMaxUnsentBytes = 8 << 20;  // of a client that sends requests but reads no answers

struct Connection {
  Socket socket;
  bool greeted = false;
  std::string in;
  std::string out;
  // A parked get; requests behind it stay in `in`.
  bool waits = false;
  std::string key;
  Deadline deadline = Deadline::never();
  bool broken = false;
};

class TcpStoreServer final : public StoreServer {
 public:
  TcpStoreServer(Socket listener, Socket wake, int port)
      : listener_(std::move(listener)), wake_(std::move(wake)), port_(port), thread_([this] { serve(); }) {}
  ~TcpStoreServer() override {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t ignored = ::write(wake_.fd(), &one, sizeof(one));
    thread_.join();
  }
  int port() const override { return port_; }

 private:
  void serve() {
    while (true) {
      std::vector<pollfd> fds = {{.fd = wake_.fd(), .events = POLLIN, .revents = 0},
                                 {.fd = listener_.fd(), .events = listening_events(), .revents = 0}};
      Deadline next = Deadline::after(std::chrono::hours(1));
      if (!accept_pause_.passed()) next = accept_pause_;
      for (const Connection& c : connections_) {
        // Input beyond one whole frame waits in the kernel while a get is parked; the end of the connection shows
        // anyway.
        const bool reads = c.in.size() < static_cast<size_t>(kMaxBodyBytes) + 4;
        const auto events = static_cast<short>((reads ? POLLIN : 0) | (c.out.empty() ? 0 : POLLOUT) | POLLRDHUP);
        fds.push_back({.fd = c.socket.fd(), .events = events, .revents = 0});
        if (c.waits && c.deadline.when() < next.when()) next = c.deadline;
      }
      if (::poll(fds.data(), fds.size(), next.remaining_ms()) < 0 && errno != EINTR) {
        log().error("store server: poll fails with errno {}", errno);
        return;
      }
      if (fds[0].revents != 0) return;
      size_t i = 2;
      for (Connection& c : connections_) handle(c, fds[i++].revents);
      if (fds[1].revents != 0) accept_all();
      expire_waits();
      answer_waits();
      connections_.remove_if([](const Connection& c) { return c.broken; });
    }
  }

  short listening_events() const {
    return connections_.size() < kMaxConnections && accept_pause_.passed() ? POLLIN : 0;
  }

  void accept_all() {
    while (connections_.size() < kMaxConnections) {
      Socket socket(::accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!socket.valid()) {
        // Without a free descriptor the listener stays readable: look again a little later instead of at once.
        const bool waits = errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR || errno == ECONNABORTED;
        if (!waits) accept_pause_ = Deadline::after(std::chrono::milliseconds(100));
        return;
      }
      Connection c;
      c.socket = std::move(socket);
      c.out = kStoreHello;
      flush(c);
      connections_.push_back(std::move(c));
    }
  }

  void handle(Connection& c, short events) {
    if ((events & (POLLIN | POLLHUP | POLLERR | POLLRDHUP)) != 0) receive(c);
    if ((events & (POLLHUP | POLLERR | POLLRDHUP)) != 0 && c.waits) c.broken = true;  // nobody waits any more
    while (!c.broken && !c.waits && take_frame(c)) {
    }
    if (!c.broken) flush(c);
  }

  void receive(Connection& c) {
    char buffer[64 << 10];
    while (c.in.size() < static_cast<size_t>(kMaxBodyBytes) + 4) {
      const ssize_t got = ::recv(c.socket.fd(), buffer, sizeof(buffer), 0);
      if (got > 0) {
        c.in.append(buffer, static_cast<size_t>(got));
        continue;
      }
      c.broken = got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
      return;
    }
  }

  // Handles one whole frame at the front of `in`, if there is one.
  bool take_frame(Connection& c) {
    if (!c.greeted) {
      const size_t have = std::min(c.in.size(), kStoreHello.size());
      c.broken = c.in.compare(0, have, kStoreHello, 0, have) != 0;
      if (c.broken || c.in.size() < kStoreHello.size()) return false;
      c.in.erase(0, kStoreHello.size());
      c.greeted = true;
    }
    const auto size = body_length(c.in);
    if (!size) return false;
    if (*size > kMaxBodyBytes || *size < kRequestHeadBytes) {
      c.broken = true;
      return false;
    }
    const size_t frame = 4 + static_cast<size_t>(*size);
    if (c.in.size() < frame) return false;
    auto request = decode_request(std::string_view(c.in).substr(4, static_cast<size_t>(*size)));
    c.in.erase(0, frame);
    if (!request.ok()) {
      c.broken = true;
      return false;
    }
    carry_out(c, *request);
    c.broken |= c.out.size() > kMaxUnsentBytes;
    return !c.broken;
  }

  void carry_out(Connection& c, const StoreRequest& request) {
    const Status allowed = check_limits(request.key, request.value);
    if (!allowed.ok()) return answer(c, allowed, "");
    switch (request.op) {
      case StoreOp::kSet:
        return answer(c, table_.set(request.key, request.value), "");
      case StoreOp::kSetIfAbsent:
        return answer(c, table_.set_if_absent(request.key, request.value));
      case StoreOp::kAdd: {
        auto delta = decode_count(request.value);
        if (!delta.ok()) return answer(c, delta.status(), "");
        auto count = table_.add(request.key, *delta);
        return answer(c, count.status(), count.ok() ? encode_count(*count) : "");
      }
      case StoreOp::kGet:
        c.waits = true;  // answer_waits() looks at once
        c.key = request.key;
        c.deadline = Deadline::after(std::chrono::milliseconds(request.timeout_ms));
        answer_wait(c);
        return;
    }
  }

  static void answer(Connection& c, const Result<std::string>& result) {
    answer(c, result.status(), result.ok() ? result.value() : "");
  }
  static void answer(Connection& c, const Status& status, std::string_view value) {
    c.out += encode_answer(status.code(), status.ok() ? value : status.message());
  }

  void answer_wait(Connection& c) {
    const std::string* value = table_.find(c.key);
    if (value == nullptr) return;
    c.waits = false;
    answer(c, ok_status(), *value);
  }

  // Any request of this round may have set a key that others wait for; what lay behind a parked get comes next.
  void answer_waits() {
    for (bool again = true; again;) {
      again = false;
      for (Connection& c : connections_) {
        if (!c.waits || c.broken) continue;
        answer_wait(c);
        if (c.waits) continue;
        while (!c.broken && !c.waits && take_frame(c)) again = true;
        if (!c.broken) flush(c);
      }
    }
  }

  void expire_waits() {
    for (Connection& c : connections_) {
      if (!c.waits || c.broken || !c.deadline.passed()) continue;
      answer_wait(c);
      if (c.waits) answer(c, deadline_exceeded("store key \"" + c.key + "\" did not appear in time"), "");
      c.waits = false;
      while (!c.broken && !c.waits && take_frame(c)) {
      }
      if (!c.broken) flush(c);
    }
  }

  static void flush(Connection& c) {
    while (!c.out.empty()) {
      const ssize_t sent = ::send(c.socket.fd(), c.out.data(), c.out.size(), MSG_NOSIGNAL);
      if (sent < 0) {
        c.broken = errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR;
        return;
      }
      c.out.erase(0, static_cast<size_t>(sent));
    }
  }

  Socket listener_;
  Socket wake_;
  const int port_;
  StoreTable table_;
  std::list<Connection> connections_;
  Deadline accept_pause_ = Deadline::at({});  // no new connections until then
  std::thread thread_;
};

}  // namespace

Result<std::unique_ptr<StoreServer>> StoreServer::start(const std::string& host, int port) {
  KTG_ASSIGN_OR_RETURN(Socket listener, listen_on(host, port));
  KTG_ASSIGN_OR_RETURN(const int bound, port_of(listener));
  Socket wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake.valid()) return status_from_errno(errno, "store server: eventfd");
  return std::unique_ptr<StoreServer>(new TcpStoreServer(std::move(listener), std::move(wake), bound));
}

}  // namespace kintsugi::comm
