// A file system without locks (NFS, Lustre), by taking the C library's place: flock() of this program and of all its
// libraries fails with ENOLCK. A file of its own, since <fcntl.h> names a struct flock.
#pragma once

namespace kintsugi::checkpoint {
// Calls so far.
int flock_calls();
}  // namespace kintsugi::checkpoint
