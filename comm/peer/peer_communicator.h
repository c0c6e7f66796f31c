// The Communicator of ranks whose memory this process addresses: what the `local` and the `host` backends are.
// Calls are queued, posted in order, carried out step by step in poll(), wait() and later calls, and complete in order.
//
// A generation's communicator may be made over memory that a dead generation left in any state. What it does need:
// every rank of the old generation has stopped or died, since a rank that still runs may write into its peers' buffers.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "comm/peer/operation.h"
#include "comm/peer/peer_set.h"
#include "comm/tuning.h"

namespace kintsugi::comm {

// All that ranks show each other: memory[channel][rank of the generation]. `keep_alive` owns it, where nothing else
// does.
struct PeerWorld {
  Membership membership;
  std::vector<std::vector<PeerMemory>> memory;
  std::shared_ptr<void> keep_alive;
};

class PeerCommunicator final : public Communicator {
 public:
  // One for each of `groups`, which share a PeerSet.
  static Result<std::vector<std::unique_ptr<Communicator>>> create(const PeerWorld& world,
                                                                   std::span<const Group> groups,
                                                                   const CommConfig& config, StopToken stop);
  // The same for the group of all ranks on channel 0.
  static Result<std::unique_ptr<Communicator>> create(const PeerWorld& world, const CommConfig& config, StopToken stop);
  ~PeerCommunicator() override;

  const Membership& membership() const override { return group_.membership; }
  Result<WorkPtr> all_reduce(float* x, int64_t count, Stream& stream) override;
  Result<WorkPtr> all_reduce_fixed(float* out, std::span<float* const> parts, int64_t num_leaves, int64_t count,
                                   Stream& stream) override;
  Result<WorkPtr> reduce_scatter(float* out, const float* in, int64_t count, Stream& stream) override;
  Result<WorkPtr> all_gather(void* out, const void* in, int64_t size_bytes, Stream& stream) override;
  Result<WorkPtr> all_to_all(void* out, const void* in, int64_t size_bytes, Stream& stream) override;
  Result<WorkPtr> broadcast(void* x, int64_t size_bytes, int root, Stream& stream) override;
  Result<WorkPtr> fetch(void* x, int64_t size_bytes, int source, bool receive, Stream& stream) override;
  Status barrier(Deadline deadline) override;
  void abort(Status why) override;
  Status status() const override;

  // For Work.
  Result<bool> poll(const Operation& operation);
  Status wait(const Operation& operation, Deadline deadline);

  // For PeerSet.
  const PeerGroup& group() const { return group_; }
  bool idle() const { return queue_.empty(); }
  // What the first call in the queue waits for.
  const Missing& missing() const;
  // Carries every queued call as far as it goes now; true when anything moved.
  Result<bool> progress();

 private:
  PeerCommunicator(PeerGroup group, const CommConfig& config, TuningTable tuning, std::shared_ptr<PeerSet> set,
                   std::shared_ptr<void> keep_alive);
  Result<std::shared_ptr<Operation>> enqueue(Request request);
  Result<WorkPtr> submit(Request request);
  bool may_post(const Operation& operation);
  // Keeps the first error and tells the peers: its code, and that it began with this rank.
  Status fail(Status why);

  PeerGroup group_;
  const CommConfig config_;
  const TuningTable tuning_;  // one row when the configuration names an algorithm
  const std::shared_ptr<PeerSet> set_;
  const std::shared_ptr<void> keep_alive_;
  std::shared_ptr<PeerCommunicator*> self_;  // shared with Work, which may outlive the communicator; null afterwards

  std::deque<std::shared_ptr<Operation>> queue_;
  int64_t last_number_ = 0;
  int64_t slot_ticks_[kMaxInFlight] = {};
  int64_t all_completed_ = 0;  // every peer was seen to have completed so many calls
  Missing post_missing_;       // what keeps the first unposted call from being posted
};

}  // namespace kintsugi::comm
