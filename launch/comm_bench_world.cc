#include "launch/comm_bench_world.h"

#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>

#include "comm/host/host_communicator.h"

namespace kintsugi::launch {

struct HarnessPage {
  std::atomic<int64_t> stop_word;  // a generation below it is over
  std::atomic<int64_t> arrivals;   // of ranks at the gates between generations
};

namespace {

constexpr int64_t kStopAll = int64_t{1} << 40;

Status send_fds(int socket, const std::vector<int>& fds) {
  char byte = 'K';
  iovec data{.iov_base = &byte, .iov_len = 1};
  std::vector<char> control(CMSG_SPACE(fds.size() * sizeof(int)));
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* head = CMSG_FIRSTHDR(&message);
  head->cmsg_level = SOL_SOCKET;
  head->cmsg_type = SCM_RIGHTS;
  head->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
  std::memcpy(CMSG_DATA(head), fds.data(), fds.size() * sizeof(int));
  if (::sendmsg(socket, &message, MSG_NOSIGNAL) != 1) return status_from_errno(errno, "sending descriptors");
  return ok_status();
}

Result<std::vector<int>> receive_fds(int socket, size_t count) {
  char byte = 0;
  iovec data{.iov_base = &byte, .iov_len = 1};
  std::vector<char> control(CMSG_SPACE(count * sizeof(int)));
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  if (::recvmsg(socket, &message, MSG_CMSG_CLOEXEC) != 1) return status_from_errno(errno, "receiving descriptors");
  const cmsghdr* head = CMSG_FIRSTHDR(&message);
  if (head == nullptr || head->cmsg_type != SCM_RIGHTS || head->cmsg_len != CMSG_LEN(count * sizeof(int))) {
    return failed_precondition("rank 0 sent no descriptors");
  }
  std::vector<int> fds(count);
  std::memcpy(fds.data(), CMSG_DATA(head), count * sizeof(int));
  return fds;
}

struct Address {
  sockaddr_un address{};
  socklen_t size = 0;
};

// An abstract name: no file, gone with its socket.
Address address_of(const std::string& job) {
  Address a;
  a.address.sun_family = AF_UNIX;
  const std::string name = "kintsugi-comm-bench-" + std::to_string(::geteuid()) + "-" + job;
  const size_t length = std::min(name.size(), sizeof(a.address.sun_path) - 1);
  std::memcpy(a.address.sun_path + 1, name.data(), length);
  a.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
  return a;
}

Status serve_fds(int listener, int clients, const std::vector<int>& fds, Deadline deadline) {
  for (int served = 0; served < clients;) {
    pollfd p{.fd = listener, .events = POLLIN, .revents = 0};
    if (::poll(&p, 1, deadline.remaining_ms()) == 0) {
      return deadline_exceeded("only " + std::to_string(served + 1) + " of " + std::to_string(clients + 1) +
                               " ranks came");
    }
    const int client = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    if (client < 0) continue;
    ucred who{};
    socklen_t size = sizeof(who);
    const bool same_user = ::getsockopt(client, SOL_SOCKET, SO_PEERCRED, &who, &size) == 0 && who.uid == ::geteuid();
    const Status sent = same_user ? send_fds(client, fds) : failed_precondition("a stranger");
    served += sent.ok() ? 1 : 0;
    ::close(client);
  }
  return ok_status();
}

// As mpirun does with few ranks: rank r keeps to the r-th core that this process may use. With more ranks than cores
// the scheduler places them.
void bind_to_core(int rank, int world_size) {
  cpu_set_t usable;
  if (::sched_getaffinity(0, sizeof(usable), &usable) != 0 || CPU_COUNT(&usable) < world_size) return;
  for (int cpu = 0, seen = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &usable) || seen++ != rank) continue;
    cpu_set_t own;
    CPU_ZERO(&own);
    CPU_SET(cpu, &own);
    ::sched_setaffinity(0, sizeof(own), &own);
    return;
  }
}

}  // namespace

Result<std::vector<int>> create_bench_fds(int world_size, int64_t heap_bytes) {
  std::vector<int> fds;
  Status status = ok_status();
  for (int r = 0; r < world_size && status.ok(); ++r) {
    auto fd = comm::SharedSegment::create_fd(heap_bytes, world_size, r);
    status = fd.status();
    if (fd.ok()) fds.push_back(*fd);
  }
  if (status.ok()) {
    const int page = ::memfd_create("kintsugi-comm-bench", MFD_CLOEXEC);
    if (page >= 0) fds.push_back(page);
    if (page < 0 || ::ftruncate(page, sizeof(HarnessPage)) != 0) status = status_from_errno(errno, "harness page");
  }
  if (status.ok()) return fds;
  for (int fd : fds) ::close(fd);
  return status;
}

Result<std::unique_ptr<BenchWorld>> BenchWorld::map(std::vector<int> fds, int rank) {
  std::unique_ptr<BenchWorld> world(new BenchWorld());
  world->rank_ = rank;
  const Status mapped = [&]() -> Status {
    for (size_t r = 0; r + 1 < fds.size(); ++r) {
      KTG_ASSIGN_OR_RETURN(auto segment, comm::SharedSegment::map(fds[r]));
      world->segments_.push_back(std::move(segment));
    }
    void* page = ::mmap(nullptr, sizeof(HarnessPage), PROT_READ | PROT_WRITE, MAP_SHARED, fds.back(), 0);
    if (page == MAP_FAILED) return status_from_errno(errno, "mapping the harness page");
    world->page_ = static_cast<HarnessPage*>(page);
    return ok_status();
  }();
  for (int fd : fds) ::close(fd);
  if (!mapped.ok()) return mapped;
  return world;
}

BenchWorld::~BenchWorld() {
  if (page_ != nullptr) ::munmap(page_, sizeof(HarnessPage));
}

Result<std::unique_ptr<comm::Communicator>> BenchWorld::next(const comm::CommConfig& config) {
  page_->arrivals.fetch_add(1);
  const Deadline deadline = Deadline::after(std::chrono::seconds(60));
  const int64_t all = (generation_ + 1) * world_size();
  while (page_->arrivals.load() < all) {
    if (page_->stop_word.load() > generation_) return aborted("another rank ended");
    if (deadline.passed()) return deadline_exceeded("a rank does not come to the next measurement");
    ::sched_yield();
  }
  ++generation_;
  std::vector<comm::SharedSegment*> segments;
  for (auto& s : segments_) segments.push_back(s.get());
  const comm::Membership membership{.generation = generation_, .rank = rank_, .world_size = world_size()};
  return comm::create_host_communicator(membership, segments, config, stop_token());
}

StopToken BenchWorld::stop_token() const { return {&page_->stop_word, generation_}; }

void BenchWorld::stop() { page_->stop_word = kStopAll; }

int run_forked(int world_size, std::vector<int> fds, bool bound, const std::function<int(BenchWorld&)>& body) {
  std::vector<pid_t> pids;
  const pid_t parent = ::getpid();
  std::fflush(nullptr);
  for (int r = 0; r < world_size; ++r) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (::getppid() != parent) ::_exit(1);
      if (bound) bind_to_core(r, world_size);
      auto world = BenchWorld::map(std::move(fds), r);
      const int code = world.ok() ? body(**world) : 1;
      if (!world.ok()) std::fprintf(stderr, "rank %d: %s\n", r, world.status().to_string().c_str());
      std::fflush(nullptr);
      ::_exit(code);
    }
    if (pid > 0) pids.push_back(pid);
  }
  auto own = BenchWorld::map(std::move(fds), 0);
  int first_failure = static_cast<int>(pids.size()) == world_size && own.ok() ? 0 : 1;
  if (first_failure != 0 && own.ok()) (*own)->stop();
  for (size_t left = pids.size(); left > 0;) {
    int status = 0;
    const pid_t ended = ::waitpid(-1, &status, 0);
    if (ended < 0 && errno == EINTR) continue;
    if (ended < 0) break;
    --left;
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    if (code == 0) continue;
    if (first_failure == 0) first_failure = code;
    if (own.ok()) (*own)->stop();
  }
  return first_failure;
}

Result<std::unique_ptr<BenchWorld>> join_launched(int rank, int world_size, const std::string& job, int64_t heap_bytes,
                                                  Deadline deadline) {
  const Address where = address_of(job);
  const auto* address = reinterpret_cast<const sockaddr*>(&where.address);
  const int socket = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (socket < 0) return status_from_errno(errno, "rendezvous socket");
  std::vector<int> fds;
  const Status met = [&]() -> Status {
    if (rank == 0) {
      KTG_ASSIGN_OR_RETURN(fds, create_bench_fds(world_size, heap_bytes));
      if (::bind(socket, address, where.size) != 0 || ::listen(socket, 128) != 0) {
        return status_from_errno(errno, "rendezvous of job " + job);
      }
      return serve_fds(socket, world_size - 1, fds, deadline);
    }
    while (::connect(socket, address, where.size) != 0) {  // until rank 0 listens
      if (deadline.passed()) return deadline_exceeded("rank 0 does not answer");
      ::poll(nullptr, 0, 5);
    }
    KTG_ASSIGN_OR_RETURN(fds, receive_fds(socket, static_cast<size_t>(world_size) + 1));
    return ok_status();
  }();
  ::close(socket);
  if (!met.ok()) {
    for (int fd : fds) ::close(fd);
    return met;
  }
  return BenchWorld::map(std::move(fds), rank);
}

}  // namespace kintsugi::launch
