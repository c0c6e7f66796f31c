#include "launch/child_process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <cerrno>
#include <cstring>

namespace kintsugi::launch {
namespace {

// Between fork and exec of a process with threads: only async-signal-safe calls.
[[noreturn]] void become(pid_t parent, int channel_fd, char* const* argv, char* const* environment) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(127);  // the parent died before the line above
  ::setpgid(0, 0);
  sigset_t none;
  sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  if (channel_fd == kChildChannelFd) {
    ::fcntl(channel_fd, F_SETFD, 0);
  } else if (::dup2(channel_fd, kChildChannelFd) < 0) {
    ::_exit(127);
  }
  ::syscall(SYS_close_range, kChildChannelFd + 1, ~0U, 0);  // what a launcher left open; Linux 5.9
  ::execve("/proc/self/exe", argv, environment);
  ::_exit(127);
}

}  // namespace

Result<ChildProcess> ChildProcess::spawn(const std::vector<std::string>& arguments, Channel channel) {
  std::vector<char*> argv;
  argv.push_back(program_invocation_name);
  for (const std::string& a : arguments) argv.push_back(const_cast<char*>(a.c_str()));
  argv.push_back(nullptr);
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) return status_from_errno(errno, "fork");
  if (pid == 0) become(parent, channel.fd(), argv.data(), environ);
  const int pid_fd = static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));  // close-on-exec always
  if (pid_fd < 0) {
    const int error = errno;
    ::kill(pid, SIGKILL);  // our own child, not yet reaped: the number cannot mean another process
    ::waitpid(pid, nullptr, 0);
    return status_from_errno(error, "pidfd_open (Linux 5.3 or newer is needed)");
  }
  return ChildProcess(pid, UniqueFd(pid_fd));
}

ChildProcess::ChildProcess(ChildProcess&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)), pid_fd_(std::move(other.pid_fd_)), status_(other.status_) {}

ChildProcess& ChildProcess::operator=(ChildProcess&& other) noexcept {
  std::swap(pid_, other.pid_);
  std::swap(pid_fd_, other.pid_fd_);
  std::swap(status_, other.status_);
  return *this;
}

ChildProcess::~ChildProcess() {
  if (pid_ < 0 || reaped()) return;
  kill();
  reap();
}

void ChildProcess::kill() {
  if (pid_ >= 0 && !reaped()) ::syscall(SYS_pidfd_send_signal, pid_fd_.get(), SIGKILL, nullptr, 0);
}

std::optional<int> ChildProcess::try_reap() {
  if (!status_.has_value()) {
    int status = 0;
    if (::waitpid(pid_, &status, WNOHANG) == pid_) status_ = status;
  }
  return status_;
}

int ChildProcess::reap() {
  while (!status_.has_value()) {
    int status = 0;
    if (::waitpid(pid_, &status, 0) == pid_)
      status_ = status;
    else if (errno != EINTR)
      status_ = 0;
  }
  return *status_;
}

std::string describe_wait_status(int status) {
  if (WIFSIGNALED(status)) {
    return "signal " + std::to_string(WTERMSIG(status)) + " (" + ::strsignal(WTERMSIG(status)) + ")";
  }
  return "exit code " + std::to_string(WEXITSTATUS(status));
}

}  // namespace kintsugi::launch
