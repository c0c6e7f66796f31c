// The Communicator of ranks whose memory this process addresses: what the `local` and the `host` backends are.
// Calls are queued, posted in order, carried out step by step in poll(), wait() and later calls, and complete in order.
//
// A generation's communicator may be made over memory that a dead generation left in any state. What it does need:
// every rank of the old generation has stopped or died, since a rank that still runs may write into its peers' buffers.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "comm/communicator.h"
#include "comm/peer/operation.h"
#include "comm/peer/wait.h"
#include "comm/tuning.h"

namespace kintsugi::comm {

class PeerCommunicator final : public Communicator {
 public:
  // `keep_alive` owns the memory behind `peers`, where nothing else does.
  static Result<std::unique_ptr<Communicator>> create(const Membership& membership, std::vector<PeerMemory> peers,
                                                      const CommConfig& config, StopToken stop,
                                                      std::shared_ptr<void> keep_alive);
  ~PeerCommunicator() override;

  const Membership& membership() const override { return group_.membership; }
  Result<WorkPtr> all_reduce(float* x, int64_t count, Stream& stream) override;
  Result<WorkPtr> all_reduce_fixed(float* out, std::span<float* const> parts, int64_t num_leaves, int64_t count,
                                   Stream& stream) override;
  Result<WorkPtr> reduce_scatter(float* out, const float* in, int64_t count, Stream& stream) override;
  Result<WorkPtr> all_gather(void* out, const void* in, int64_t size_bytes, Stream& stream) override;
  Result<WorkPtr> broadcast(void* x, int64_t size_bytes, int root, Stream& stream) override;
  Result<WorkPtr> fetch(void* x, int64_t size_bytes, int source, bool receive, Stream& stream) override;
  Status barrier(Deadline deadline) override;
  void abort(Status why) override;
  Status status() const override;

  // For Work.
  Result<bool> poll(const Operation& operation);
  Status wait(const Operation& operation, Deadline deadline);

 private:
  PeerCommunicator(PeerGroup group, const CommConfig& config, TuningTable tuning, StopToken stop,
                   std::shared_ptr<void> keep_alive);
  Result<std::shared_ptr<Operation>> enqueue(Request request);
  Result<WorkPtr> submit(Request request);
  bool may_post(const Operation& operation);
  // What the first call in the queue waits for.
  const Missing& missing() const;
  // Carries every queued call as far as it goes now; true when anything moved.
  Result<bool> progress();
  Status interrupted(bool slow, Deadline deadline, TimePoint began);
  // Keeps the first error and tells the peers: its code, and which rank it began with.
  Status fail(Status why);
  Status fail(Status why, StatusCode cause, int origin);

  PeerGroup group_;
  const CommConfig config_;
  const TuningTable tuning_;  // one row when the configuration names an algorithm
  const StopToken stop_;
  WaitPolicy policy_;
  const std::shared_ptr<void> keep_alive_;
  std::shared_ptr<PeerCommunicator*> self_;  // shared with Work, which may outlive the communicator; null afterwards

  std::deque<std::shared_ptr<Operation>> queue_;
  int64_t last_number_ = 0;
  int64_t slot_ticks_[kMaxInFlight] = {};
  int64_t all_completed_ = 0;  // every peer was seen to have completed so many calls
  Missing post_missing_;       // what keeps the first unposted call from being posted

  std::atomic<bool> failed_{false};
  mutable std::mutex status_mutex_;
  Status status_;
};

}  // namespace kintsugi::comm
