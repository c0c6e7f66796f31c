#include "tests/comm/fake_nccl/fake_nccl.h"

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <thread>
#include <vector>

struct ncclComm {
  std::atomic<int> inside{0};     // threads
  std::atomic<bool> over{false};  // aborted or destroyed
  std::atomic<int> polls_left{0};
};

namespace kintsugi::comm {

void Door::close() {
  const std::lock_guard lock(mutex_);
  open_ = false;
}
void Door::open() {
  {
    const std::lock_guard lock(mutex_);
    open_ = true;
  }
  changed_.notify_all();
}
void Door::pass() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return open_; });
}

FakeNccl& fake_nccl() {
  static FakeNccl& fake = *new FakeNccl;
  return fake;
}

namespace {

// A call on a communicator. What has gone stays allocated, so that a call that comes too late is found.
class Inside {
 public:
  explicit Inside(ncclComm_t comm) : comm_(comm) {
    if (comm_->inside.fetch_add(1) != 0 || comm_->over) ++fake_nccl().broken_rules;
    std::this_thread::yield();
  }
  ~Inside() { comm_->inside.fetch_sub(1); }

 private:
  ncclComm_t comm_;
};

thread_local int group_depth = 0;
thread_local int aborts_in_group = 0;

}  // namespace
}  // namespace kintsugi::comm

using kintsugi::comm::fake_nccl;
using kintsugi::comm::Inside;

extern "C" {

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  *id = {};
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int, ncclUniqueId, int, ncclConfig_t*) {
  *comm = new ncclComm;
  (*comm)->polls_left = fake_nccl().polls_until_ready.load();
  ++fake_nccl().begun;
  return ncclInProgress;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* result) {
  const Inside inside(comm);
  *result = comm->polls_left-- > 0 ? ncclInProgress : ncclSuccess;
  return ncclSuccess;
}
ncclResult_t ncclGroupStart() {
  ++kintsugi::comm::group_depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (--kintsugi::comm::group_depth < 0) ++fake_nccl().broken_rules;
  if (kintsugi::comm::aborts_in_group == 0) return ncclSuccess;
  fake_nccl().gone.pass();
  fake_nccl().aborted += std::exchange(kintsugi::comm::aborts_in_group, 0);
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  const Inside inside(comm);
  comm->over = true;
  if (kintsugi::comm::group_depth == 0) ++fake_nccl().broken_rules;
  ++kintsugi::comm::aborts_in_group;
  fake_nccl().told.pass();
  return ncclSuccess;
}
ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  const Inside inside(comm);
  return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  const Inside inside(comm);
  comm->over = true;
  ++fake_nccl().destroyed;
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t) { return "an error"; }
const char* ncclGetLastError(ncclComm_t) { return ""; }

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return "an error"; }
const char* cudaGetErrorString(cudaError_t) { return "an error"; }

}  // extern "C"
