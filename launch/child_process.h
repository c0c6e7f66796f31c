// A child of the agent: this same program, executed anew in another role.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "launch/channel.h"
#include "launch/unique_fd.h"
#include "runtime/base/status.h"

namespace kintsugi::launch {

// Where a child finds its channel.
inline constexpr int kChildChannelFd = 3;

class ChildProcess {
 public:
  // Forks and executes /proc/self/exe with `arguments` (argv[1] on). The child has the channel as descriptor
  // kChildChannelFd and no other beyond 0-2, an empty signal mask, a session of its own (launchers signal their
  // children's process groups), and dies with the calling thread: call it from the agent's main thread only.
  static Result<ChildProcess> spawn(const std::vector<std::string>& arguments, Channel channel);
  ChildProcess(ChildProcess&& other) noexcept;
  ChildProcess& operator=(ChildProcess&& other) noexcept;
  // Kills and reaps.
  ~ChildProcess();

  pid_t pid() const { return pid_; }
  int pid_fd() const { return pid_fd_.get(); }  // readable once it has ended
  void kill();
  // The wait status, once it has ended. Does not wait.
  std::optional<int> try_reap();
  // Waits. After kill() that is as long as the kernel needs to free its memory.
  int reap();
  bool reaped() const { return status_.has_value(); }

 private:
  ChildProcess(pid_t pid, UniqueFd pid_fd) : pid_(pid), pid_fd_(std::move(pid_fd)) {}
  pid_t pid_ = -1;
  UniqueFd pid_fd_;
  std::optional<int> status_;
};

// "signal 9 (Killed)", "exit code 1".
std::string describe_wait_status(int status);

}  // namespace kintsugi::launch
