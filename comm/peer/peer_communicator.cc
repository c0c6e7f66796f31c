#include "comm/peer/peer_communicator.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <string>

#include "comm/reduction_tree.h"
#include "runtime/base/log.h"

namespace kintsugi::comm {

namespace {

class PeerWork final : public Work {
 public:
  PeerWork(std::shared_ptr<PeerCommunicator*> owner, std::shared_ptr<Operation> operation)
      : owner_(std::move(owner)), operation_(std::move(operation)) {}
  Result<bool> poll() override {
    if (operation_->complete) return true;
    if (*owner_ == nullptr) return gone();
    return (*owner_)->poll(*operation_);
  }
  Status wait(Deadline deadline) override {
    if (operation_->complete) return ok_status();
    if (*owner_ == nullptr) return gone();
    return (*owner_)->wait(*operation_, deadline);
  }

 private:
  static Status gone() { return aborted("the communicator ended before this collective was complete"); }
  std::shared_ptr<PeerCommunicator*> owner_;
  std::shared_ptr<Operation> operation_;
};

Status bad_size(const char* what, int64_t value) {
  return invalid_argument(std::string(what) + " = " + std::to_string(value) + ": must not be negative");
}

// From this size on the ranks' data together exceed the last cache, and what a sum writes is not read soon.
int64_t stream_from(int world_size) {
  constexpr int64_t kUsual = 32 << 20;
  const int64_t cache = ::sysconf(_SC_LEVEL3_CACHE_SIZE);
  return (cache > 0 ? cache : kUsual) / world_size;
}

// Fixed when the communicator is made: the order of a sum may depend on nothing that is timed during a run.
Result<TuningTable> choose_tuning(const CommConfig& config, int world_size) {
  KTG_ASSIGN_OR_RETURN(Algorithm algorithm, parse_algorithm(config.algorithm));
  if (algorithm == Algorithm::kAuto && !config.tuning_file.empty() && world_size > 1) {
    KTG_ASSIGN_OR_RETURN(TuningTable table, TuningTable::load_file(config.tuning_file));
    if (table.world_size == world_size) {
      for (TuningRow& row : table.rows) {
        if (config.chunk_bytes != 0) row.chunk_bytes = config.chunk_bytes;
      }
      return table;
    }
    log().warn("comm.tuning_file = \"{}\" was measured with {} ranks, this world has {}: the built-in rules are used",
               config.tuning_file, table.world_size, world_size);
  }
  // Direct is ahead at every size and world size measured in experiments/collectives.
  if (algorithm == Algorithm::kAuto || world_size == 1) algorithm = Algorithm::kDirect;
  return TuningTable{.world_size = world_size,
                     .rows = {{.max_bytes = std::numeric_limits<int64_t>::max(),
                               .algorithm = algorithm,
                               .chunk_bytes = config.chunk_bytes}}};
}

}  // namespace

Result<std::unique_ptr<Communicator>> PeerCommunicator::create(const Membership& membership,
                                                               std::vector<PeerMemory> peers, const CommConfig& config,
                                                               StopToken stop, std::shared_ptr<void> keep_alive) {
  KTG_RETURN_IF_ERROR(config.validate());
  const auto outside = [&](const char* what, int64_t value, int64_t lowest, int64_t highest) {
    return invalid_argument(std::string(what) + " " + std::to_string(value) + " is outside [" + std::to_string(lowest) +
                            ", " + std::to_string(highest) + "]");
  };
  if (membership.world_size < 1 || membership.world_size > kMaxWorldSize) {
    return outside("world_size", membership.world_size, 1, kMaxWorldSize);
  }
  if (membership.rank < 0 || membership.rank >= membership.world_size) {
    return outside("rank", membership.rank, 0, membership.world_size - 1);
  }
  if (membership.generation < 0 || membership.generation > kMaxGeneration) {
    return outside("generation", membership.generation, 0, kMaxGeneration);
  }
  if (static_cast<int>(peers.size()) != membership.world_size) {
    return invalid_argument("memory of " + std::to_string(peers.size()) + " ranks for a world of " +
                            std::to_string(membership.world_size));
  }
  PeerGroup group{.membership = membership,
                  .peers = std::move(peers),
                  .max_inline_bytes = kPayloadBytes,
                  .stream_bytes = stream_from(membership.world_size)};
  KTG_ASSIGN_OR_RETURN(TuningTable tuning, choose_tuning(config, membership.world_size));
  return std::unique_ptr<Communicator>(
      new PeerCommunicator(std::move(group), config, std::move(tuning), stop, std::move(keep_alive)));
}

PeerCommunicator::PeerCommunicator(PeerGroup group, const CommConfig& config, TuningTable tuning, StopToken stop,
                                   std::shared_ptr<void> keep_alive)
    : group_(std::move(group)),
      config_(config),
      tuning_(std::move(tuning)),
      stop_(stop),
      keep_alive_(std::move(keep_alive)),
      self_(std::make_shared<PeerCommunicator*>(this)) {
  publish_cpus(group_);
  policy_ = WaitPolicy::for_group(group_);
}

PeerCommunicator::~PeerCommunicator() {
  // Peers that wait for the rest of these calls need not wait for their deadline.
  if (!queue_.empty()) {
    [[maybe_unused]] Status ignored = fail(aborted("the communicator ended with calls in flight"));
  }
  *self_ = nullptr;
}

Result<std::shared_ptr<Operation>> PeerCommunicator::enqueue(Request request) {
  if (failed_.load(std::memory_order_acquire)) return status();
  auto operation = std::make_shared<Operation>(group_, std::move(request), ++last_number_);
  queue_.push_back(operation);
  auto moved = progress();
  if (!moved.ok()) return moved.status();
  return operation;
}

Result<WorkPtr> PeerCommunicator::submit(Request request) {
  KTG_ASSIGN_OR_RETURN(std::shared_ptr<Operation> operation, enqueue(std::move(request)));
  return WorkPtr(new PeerWork(self_, std::move(operation)));
}

Result<WorkPtr> PeerCommunicator::all_reduce(float* x, int64_t count, Stream&) {
  if (count < 0) return bad_size("all_reduce count", count);
  Request r;
  r.call = {.kind = OpKind::kAllReduce, .size_bytes = count * 4};
  const TuningRow& row = tuning_.choose(count * 4);
  r.call.algorithm = row.algorithm;
  r.call.chunk_bytes = row.chunk_bytes;
  r.in = reinterpret_cast<const uint8_t*>(x);
  r.out = reinterpret_cast<uint8_t*>(x);
  return submit(std::move(r));
}

Result<WorkPtr> PeerCommunicator::all_reduce_fixed(float* out, std::span<float* const> parts, int64_t num_leaves,
                                                   int64_t count, Stream&) {
  if (count < 0) return bad_size("all_reduce_fixed count", count);
  if (num_leaves < world_size() || num_leaves > kMaxWorldSize) {
    return invalid_argument("all_reduce_fixed: " + std::to_string(num_leaves) + " leaves for " +
                            std::to_string(world_size()) + " ranks: must be between the ranks and " +
                            std::to_string(kMaxWorldSize));
  }
  const auto wanted = maximal_subtrees(num_leaves, owned_leaves(num_leaves, rank(), world_size())).size();
  if (parts.size() != wanted) {
    return invalid_argument("all_reduce_fixed: rank " + std::to_string(rank()) + " of " + std::to_string(world_size()) +
                            " brings " + std::to_string(wanted) + " parts of " + std::to_string(num_leaves) +
                            " leaves, got " + std::to_string(parts.size()));
  }
  Request r;
  r.call = {.kind = OpKind::kAllReduceFixed, .num_leaves = static_cast<int16_t>(num_leaves), .size_bytes = count * 4};
  r.parts.assign(parts.begin(), parts.end());
  r.out = reinterpret_cast<uint8_t*>(out);
  bool inside = group_.in_own_heap(out, count * 4);
  for (const float* part : r.parts) inside &= group_.in_own_heap(part, count * 4);
  if (!inside && world_size() > 1 && count > 0) {
    return invalid_argument("all_reduce_fixed: parts and result must lie in the symmetric heap");
  }
  return submit(std::move(r));
}

Result<WorkPtr> PeerCommunicator::reduce_scatter(float* out, const float* in, int64_t count, Stream&) {
  if (count < 0) return bad_size("reduce_scatter count", count);
  Request r;
  r.call = {.kind = OpKind::kReduceScatter, .size_bytes = count * 4};
  r.in = reinterpret_cast<const uint8_t*>(in);
  r.out = reinterpret_cast<uint8_t*>(out);
  return submit(std::move(r));
}

Result<WorkPtr> PeerCommunicator::all_gather(void* out, const void* in, int64_t size_bytes, Stream&) {
  if (size_bytes < 0) return bad_size("all_gather size_bytes", size_bytes);
  Request r;
  r.call = {.kind = OpKind::kAllGather, .size_bytes = size_bytes};
  r.in = static_cast<const uint8_t*>(in);
  r.out = static_cast<uint8_t*>(out);
  return submit(std::move(r));
}

Result<WorkPtr> PeerCommunicator::broadcast(void* x, int64_t size_bytes, int root, Stream&) {
  if (size_bytes < 0) return bad_size("broadcast size_bytes", size_bytes);
  if (root < 0 || root >= world_size()) return invalid_argument("broadcast root " + std::to_string(root));
  Request r;
  r.call = {.kind = OpKind::kBroadcast, .root = root, .size_bytes = size_bytes};
  r.in = r.out = static_cast<uint8_t*>(x);
  return submit(std::move(r));
}

Result<WorkPtr> PeerCommunicator::fetch(void* x, int64_t size_bytes, int source, bool receive, Stream&) {
  if (size_bytes < 0) return bad_size("fetch size_bytes", size_bytes);
  if (source < 0 || source >= world_size()) return invalid_argument("fetch source " + std::to_string(source));
  Request r;
  r.call = {.kind = OpKind::kFetch, .root = source, .size_bytes = size_bytes};
  r.in = r.out = static_cast<uint8_t*>(x);
  r.receives = receive;
  return submit(std::move(r));
}

Status PeerCommunicator::barrier(Deadline deadline) {
  Request r;
  r.call = {.kind = OpKind::kBarrier};
  KTG_ASSIGN_OR_RETURN(std::shared_ptr<Operation> operation, enqueue(std::move(r)));
  return wait(*operation, deadline);
}

// A slot is free again when every rank has completed the call that used it last.
bool PeerCommunicator::may_post(const Operation& operation) {
  if (operation.staged() && queue_.front().get() != &operation) {
    post_missing_ = queue_.front()->missing();
    return false;
  }
  const int64_t needed = operation.number() - kMaxInFlight;
  if (needed <= 0) return true;
  if (queue_.front()->number() <= needed) {
    post_missing_ = queue_.front()->missing();
    return false;
  }
  if (all_completed_ >= needed) return true;
  post_missing_ = {.peers = everyone_else(group_),
                   .offset = offset_in_block(group_, group_.own().completed.stamp),
                   .stamp = make_stamp(membership().generation, needed)};
  if (!is_over(group_, post_missing_)) return false;
  all_completed_ = needed;
  return true;
}

Result<bool> PeerCommunicator::progress() {
  KTG_RETURN_IF_ERROR(interrupted(false, Deadline::never(), {}));
  bool moved = false;
  bool all_before_done = true;
  for (size_t i = 0; i < queue_.size();) {
    Operation& operation = *queue_[i];
    if (!operation.posted()) {
      if (!may_post(operation)) break;
      operation.post(slot_ticks_[operation.number() % kMaxInFlight]);
      moved = true;
    }
    auto state = operation.advance();
    if (!state.ok()) return fail(state.status());
    moved |= state.value() == Operation::State::kMoved;
    all_before_done &= state.value() == Operation::State::kDone;
    if (!all_before_done) {
      ++i;
      continue;
    }
    // Every call before this one is complete and popped, so it is the first.
    operation.complete = true;
    slot_ticks_[operation.number() % kMaxInFlight] += operation.ticks();
    publish(group_, group_.own().completed.stamp, make_stamp(membership().generation, operation.number()));
    // By now every rank has said where it runs.
    if (operation.number() == 1) policy_ = WaitPolicy::for_group(group_);
    queue_.pop_front();
    moved = true;
  }
  return moved;
}

const Missing& PeerCommunicator::missing() const {
  return queue_.front()->posted() ? queue_.front()->missing() : post_missing_;
}

Result<bool> PeerCommunicator::poll(const Operation& operation) {
  auto moved = progress();
  if (operation.complete) return true;
  if (!moved.ok()) return moved.status();
  return false;
}

Status PeerCommunicator::wait(const Operation& operation, Deadline deadline) {
  const TimePoint began = MonotonicClock::now();
  const Deadline limit = Deadline::at(std::min(deadline.when(), began + std::chrono::milliseconds(config_.timeout_ms)));
  const auto ask = [&](bool slow) { return interrupted(slow, limit, began); };
  while (true) {
    auto moved = progress();
    if (operation.complete) return ok_status();
    if (!moved.ok()) return moved.status();
    if (moved.value()) continue;
    KTG_RETURN_IF_ERROR(wait_for(group_, missing(), policy_, ask));
  }
}

Status PeerCommunicator::interrupted(bool slow, Deadline deadline, TimePoint began) {
  if (failed_.load(std::memory_order_acquire)) return status();
  if (stop_.requested()) {
    return fail(aborted("generation " + std::to_string(membership().generation) + " is over"));
  }
  if (!slow) return ok_status();
  for (int p = 0; p < world_size(); ++p) {
    const uint64_t stamp = group_.peers[p].control->failed.stamp.load(std::memory_order_acquire);
    if (generation_of(stamp) != membership().generation || count_of(stamp) == 0) continue;
    const FailureNote note = read_failure(stamp);
    return fail(aborted("rank " + std::to_string(note.origin) + " gave up generation " +
                        std::to_string(membership().generation) + ": " + std::string(to_string(note.cause))),
                note.cause, note.origin);
  }
  if (!deadline.passed()) return ok_status();
  const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(MonotonicClock::now() - began);
  const Operation& first = *queue_.front();
  return fail(deadline_exceeded("rank " + std::to_string(rank()) + " generation " +
                                std::to_string(membership().generation) + ": " + first.description() + " waited " +
                                std::to_string(waited.count()) + " ms for rank " +
                                std::to_string(first_missing(group_, missing()))));
}

Status PeerCommunicator::fail(Status why) {
  const StatusCode cause = why.code();
  return fail(std::move(why), cause, rank());
}

Status PeerCommunicator::fail(Status why, StatusCode cause, int origin) {
  std::lock_guard lock(status_mutex_);
  if (status_.ok()) {
    status_ = std::move(why);
    failed_.store(true, std::memory_order_release);
    publish(group_, group_.own().failed.stamp,
            failure_stamp(membership().generation, {.cause = cause, .origin = origin}));
  }
  return status_;
}

void PeerCommunicator::abort(Status why) {
  if (why.code() != StatusCode::kAborted) why = aborted(why.to_string());
  [[maybe_unused]] Status first = fail(std::move(why));
  wake(group_, rank());
}

Status PeerCommunicator::status() const {
  std::lock_guard lock(status_mutex_);
  return status_;
}

}  // namespace kintsugi::comm
