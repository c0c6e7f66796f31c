#include "launch/meeting.h"

#include <fmt/format.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <random>

#include "comm/store/store.h"
#include "launch/mpi_exchange.h"
#include "runtime/base/file_system.h"

namespace kintsugi::launch {
namespace {

// What rank 0 tells the others: lines of text.
struct Invitation {
  std::string socket_name, token, host;

  std::string to_text() const { return socket_name + "\n" + token + "\n" + host + "\n"; }
  static Result<Invitation> parse(const std::string& text) {
    Invitation i;
    size_t begin = 0;
    for (std::string* field : {&i.socket_name, &i.token, &i.host}) {
      const size_t end = text.find('\n', begin);
      if (end == std::string::npos) return internal_error("rank 0's invitation is cut off");
      *field = text.substr(begin, end - begin);
      begin = end + 1;
    }
    return i;
  }
};

std::string random_hex() {
  std::random_device device;
  std::string out;
  for (int i = 0; i < 4; ++i) out += fmt::format("{:08x}", device());
  return out;
}

socklen_t fill_address(sockaddr_un* address, const std::string& name) {
  *address = {};
  address->sun_family = AF_UNIX;
  KTG_CHECK(name.size() + 1 < sizeof address->sun_path) << name;
  name.copy(address->sun_path + 1, name.size());  // the leading zero byte makes it abstract
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

Result<UniqueFd> listen_on(const std::string& name) {
  UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return status_from_errno(errno, "socket");
  sockaddr_un address;
  const socklen_t size = fill_address(&address, name);
  if (::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), size) != 0) {
    if (errno == EADDRINUSE) {
      return failed_precondition("another job with the same key (" + name +
                                 ") is starting on this host: give each its own MASTER_PORT or TORCHELASTIC_RUN_ID");
    }
    return status_from_errno(errno, "bind of the abstract socket " + name);
  }
  if (::listen(fd.get(), 256) != 0) return status_from_errno(errno, "listen");
  return fd;
}

// Abstract names have no owner, so the user is part of it; long keys are cut to what a socket name holds.
std::string derived_name(const RankFacts& facts) {
  const std::string full = fmt::format("kintsugi-{}-{}", ::getuid(), facts.job_key);
  if (full.size() <= 80) return full;
  return fmt::format("{}-{:016x}", full.substr(0, 60), std::hash<std::string>()(full));
}

Result<MeetingPoint> meet_by_derived_name(const RankFacts& facts) {
  MeetingPoint point;
  point.socket_name = derived_name(facts);
  point.token = facts.job_key.substr(0, 60);
  if (facts.rank == 0) {
    KTG_ASSIGN_OR_RETURN(point.listener, listen_on(point.socket_name));
  }
  return point;
}

Result<int> master_port(const Environment& environment) {
  const char* text = environment("MASTER_PORT");
  int port = 0;
  if (text == nullptr) {
    return invalid_argument("MASTER_ADDR and MASTER_PORT are needed beside RANK and WORLD_SIZE, as torchrun sets them");
  }
  const std::string_view digits(text);
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), port);
  if (error != std::errc() || end != digits.data() + digits.size() || port < 1 || port > 65535) {
    return invalid_argument(fmt::format("MASTER_PORT = \"{}\": must be a port number", text));
  }
  return port;
}

// Rank 0 writes, everybody reads what it wrote.
Result<std::string> share_by_store(const RankFacts& facts, const std::string& text, const Environment& environment,
                                   MeetingPoint& point, Deadline deadline) {
  KTG_ASSIGN_OR_RETURN(const int port, master_port(environment));
  const std::string host = environment("MASTER_ADDR") != nullptr ? environment("MASTER_ADDR") : "127.0.0.1";
  if (facts.rank == 0) {
    KTG_ASSIGN_OR_RETURN(std::unique_ptr<comm::StoreServer> server, comm::StoreServer::start(host, port));
    point.keeps_alive = std::shared_ptr<void>(std::move(server));
  }
  KTG_ASSIGN_OR_RETURN(const std::unique_ptr<comm::Store> store, comm::connect_store(host, port, deadline));
  const std::string key = "kintsugi/" + facts.job_key + "/meeting";
  if (facts.rank == 0) {
    KTG_RETURN_IF_ERROR(store->set(key, text, deadline));
    return text;
  }
  return store->get(key, deadline);
}

bool is_set(const Environment& environment, const char* name) {
  const char* value = environment(name);
  return value != nullptr && std::string_view(value) == "True";
}

}  // namespace

std::string host_identity() {
  const Result<std::string> boot = FileSystem::posix().read_file("/proc/sys/kernel/random/boot_id");
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  return std::string(name.data()) + "/" + (boot.ok() ? boot->substr(0, 36) : "");
}

Result<MeetingPoint> agree_on_meeting_point(RankFacts& facts, const Environment& environment, Deadline deadline) {
  MeetingPoint point;
  if (facts.world_size == 1) return point;
  if (facts.launcher == Launcher::kSlurm) return meet_by_derived_name(facts);
  const bool by_store = facts.launcher == Launcher::kTorchrun || facts.launcher == Launcher::kFlags;
  if (by_store && is_set(environment, "TORCHELASTIC_USE_AGENT_STORE")) return meet_by_derived_name(facts);

  Invitation invitation;
  const bool may_be_zero = facts.rank == 0;
  if (may_be_zero) {
    invitation = {.socket_name = "kintsugi-" + random_hex(), .token = random_hex(), .host = host_identity()};
    KTG_ASSIGN_OR_RETURN(point.listener, listen_on(invitation.socket_name));
  }
  std::string text = may_be_zero ? invitation.to_text() : "";
  if (by_store) {
    KTG_ASSIGN_OR_RETURN(text, share_by_store(facts, text, environment, point, deadline));
  } else {
    KTG_ASSIGN_OR_RETURN(text, share_by_mpi(facts, text));
  }
  KTG_ASSIGN_OR_RETURN(invitation, Invitation::parse(text));
  if (invitation.host != host_identity()) {
    return failed_precondition(fmt::format("rank 0 is on {}, rank {} on {}: this version runs on one host",
                                           invitation.host, facts.rank, host_identity()));
  }
  point.socket_name = invitation.socket_name;
  point.token = invitation.token;
  return point;
}

Result<Channel> try_to_join(const MeetingPoint& point) {
  UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return status_from_errno(errno, "socket");
  sockaddr_un address;
  const socklen_t size = fill_address(&address, point.socket_name);
  if (::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), size) != 0) {
    if (errno == ECONNREFUSED || errno == EAGAIN || errno == EINTR) return unavailable("rank 0 is not there yet");
    return status_from_errno(errno, "connect to rank 0");
  }
  return Channel(std::move(fd));
}

Result<Channel> accept_one(const MeetingPoint& point) {
  UniqueFd fd(::accept4(point.listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!fd.valid()) return Channel();
  ucred peer{};
  socklen_t size = sizeof peer;
  if (::getsockopt(fd.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 || peer.uid != ::geteuid()) {
    return failed_precondition("a process of another user tried to join");
  }
  return Channel(std::move(fd));
}

}  // namespace kintsugi::launch
