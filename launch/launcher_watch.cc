#include "launch/launcher_watch.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <thread>

#include "launch/exit_code.h"

namespace kintsugi::launch {

// Not PR_SET_PDEATHSIG: that tells of the end of the thread that forked, and mpirun may start ranks from threads that
// end after the start.
Status end_with_parent() {
  const int parent = static_cast<int>(::syscall(SYS_pidfd_open, ::getppid(), 0));
  if (parent < 0) return status_from_errno(errno, "pidfd_open of the launcher (Linux 5.3 or newer is needed)");
  std::thread([parent] {
    pollfd ended{.fd = parent, .events = POLLIN, .revents = 0};
    while (::poll(&ended, 1, -1) < 0 && errno == EINTR) {
    }
    ::_exit(kExitFailure);  // whatever the main thread waits for; the kernel ends the children
  }).detach();
  return ok_status();
}

}  // namespace kintsugi::launch
