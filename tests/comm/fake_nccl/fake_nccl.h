// NCCL without a GPU, as far as NcclHandle and NcclRegistry call it: each function of NCCL's that they need, with
// NCCL's rules checked (one thread at a time in a communicator, none once it is being aborted or has gone), and doors
// at which a test can hold an abort.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>

namespace kintsugi::comm {

// What waits here goes on once the door is open. Open at first.
class Door {
 public:
  void close();
  void open();
  void pass();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = true;
};

struct FakeNccl {
  Door told;  // inside ncclCommAbort, behind the flags: a launch that is under way ends
  Door gone;  // inside ncclGroupEnd: NCCL's threads look at the flags
  std::atomic<int> polls_until_ready{3};
  std::atomic<int> broken_rules{0};
  std::atomic<int> begun{0}, aborted{0}, destroyed{0};
};
FakeNccl& fake_nccl();

}  // namespace kintsugi::comm
