#include "launch/channel.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>

namespace kintsugi::launch {
namespace {

constexpr size_t kMaxFds = 4;

struct Head {
  uint32_t type;
  int32_t rank;
  int64_t incarnation, generation, step, value;
};

Status wait_for(int fd, short events, Deadline deadline, const char* what) {
  while (true) {
    pollfd p{fd, events, 0};
    const int n = ::poll(&p, 1, deadline.remaining_ms());
    if (n > 0) return ok_status();
    if (n < 0 && errno != EINTR) return status_from_errno(errno, "poll");
    if (deadline.passed()) return deadline_exceeded(std::string(what) + ": the other process did not answer in time");
  }
}

}  // namespace

Result<std::pair<Channel, Channel>> Channel::create_pair() {
  int fds[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) != 0) return status_from_errno(errno, "socketpair");
  return std::pair(Channel(UniqueFd(fds[0])), Channel(UniqueFd(fds[1])));
}

Channel::Channel(UniqueFd fd) : fd_(std::move(fd)) {
  ::fcntl(fd_.get(), F_SETFL, ::fcntl(fd_.get(), F_GETFL) | O_NONBLOCK);
}

void Channel::close() {
  fd_.reset();
  queue_.clear();
}

void Channel::close_for_sending() { ::shutdown(fd_.get(), SHUT_WR); }

Channel::Sent Channel::try_send(const Message& message) {
  KTG_CHECK(message.body.size() <= kMaxBody && message.fds.size() <= kMaxFds)
      << message.body.size() << " bytes, " << message.fds.size() << " descriptors";
  Head head{static_cast<uint32_t>(message.type),
            message.rank,
            message.incarnation,
            message.generation,
            message.step,
            message.value};
  std::array<iovec, 2> parts{iovec{&head, sizeof head},
                             iovec{const_cast<char*>(message.body.data()), message.body.size()}};
  msghdr m{};
  m.msg_iov = parts.data();
  m.msg_iovlen = parts.size();
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxFds * sizeof(int))> control{};
  if (!message.fds.empty()) {
    std::array<int, kMaxFds> fds{};
    std::transform(message.fds.begin(), message.fds.end(), fds.begin(), [](const UniqueFd& f) { return f.get(); });
    const size_t size = message.fds.size() * sizeof(int);
    m.msg_control = control.data();
    m.msg_controllen = CMSG_SPACE(size);
    cmsghdr* c = CMSG_FIRSTHDR(&m);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(size);
    std::memcpy(CMSG_DATA(c), fds.data(), size);
  }
  while (true) {
    if (::sendmsg(fd_.get(), &m, MSG_NOSIGNAL) >= 0) return Sent::kYes;
    if (errno == EINTR) continue;
    return errno == EAGAIN || errno == ENOBUFS || errno == ETOOMANYREFS ? Sent::kFull : Sent::kLost;
  }
}

void Channel::post(Message message) {
  if (!open()) return;
  queue_.push_back(std::move(message));
  flush();
}

void Channel::flush() {
  while (!queue_.empty()) {
    const Sent sent = try_send(queue_.front());
    if (sent == Sent::kFull) return;
    if (sent == Sent::kLost) return queue_.clear();
    queue_.pop_front();
  }
}

Status Channel::send(const Message& message, Deadline deadline) {
  while (true) {
    if (!open()) return unavailable("the channel is closed");
    const Sent sent = try_send(message);
    if (sent == Sent::kYes) return ok_status();
    if (sent == Sent::kLost) return unavailable("the process at the other end is gone");
    KTG_RETURN_IF_ERROR(wait_for(fd_.get(), POLLOUT, deadline, "send"));
  }
}

Result<std::optional<Message>> Channel::try_receive() {
  if (!open()) return unavailable("the channel is closed");
  // One process-wide buffer a thread: messages are small, and their size is only known after the read.
  static thread_local std::string buffer(kMaxBody, '\0');
  Head head{};
  std::array<iovec, 2> parts{iovec{&head, sizeof head}, iovec{buffer.data(), buffer.size()}};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxFds * sizeof(int))> control{};
  msghdr m{};
  m.msg_iov = parts.data();
  m.msg_iovlen = parts.size();
  m.msg_control = control.data();
  m.msg_controllen = control.size();
  ssize_t n;
  do {
    n = ::recvmsg(fd_.get(), &m, MSG_CMSG_CLOEXEC);
  } while (n < 0 && errno == EINTR);
  if (n < 0 && errno == EAGAIN) return std::optional<Message>();
  if (n <= 0) return unavailable("the process at the other end is gone");

  Message message;
  for (cmsghdr* c = CMSG_FIRSTHDR(&m); c != nullptr; c = CMSG_NXTHDR(&m, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    for (size_t i = 0; i < (c->cmsg_len - CMSG_LEN(0)) / sizeof(int); ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof fd);
      message.fds.emplace_back(fd);
    }
  }
  if (n < static_cast<ssize_t>(sizeof head) || (m.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0) {
    return internal_error("a message was cut off: " + std::to_string(n) + " bytes");
  }
  message.type = static_cast<MessageType>(head.type);
  message.rank = head.rank;
  message.incarnation = head.incarnation;
  message.generation = head.generation;
  message.step = head.step;
  message.value = head.value;
  message.body.assign(buffer.data(), static_cast<size_t>(n) - sizeof head);
  return std::optional<Message>(std::move(message));
}

Result<Message> Channel::receive(Deadline deadline) {
  while (true) {
    KTG_ASSIGN_OR_RETURN(std::optional<Message> message, try_receive());
    if (message.has_value()) return std::move(*message);
    KTG_RETURN_IF_ERROR(wait_for(fd_.get(), POLLIN, deadline, "receive"));
  }
}

}  // namespace kintsugi::launch
