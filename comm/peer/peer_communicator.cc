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
Result<TuningTable> choose_tuning(const CommConfig& config, int group_size, int world_size) {
  KTG_ASSIGN_OR_RETURN(Algorithm algorithm, parse_algorithm(config.algorithm));
  if (algorithm == Algorithm::kAuto && !config.tuning_file.empty() && group_size > 1) {
    KTG_ASSIGN_OR_RETURN(TuningTable table, TuningTable::load_file(config.tuning_file));
    if (table.world_size == group_size) {
      for (TuningRow& row : table.rows) {
        if (config.chunk_bytes != 0) row.chunk_bytes = config.chunk_bytes;
      }
      return table;
    }
    if (group_size == world_size) {
      log().warn("comm.tuning_file = \"{}\" was measured with {} ranks, this world has {}: the built-in rules are used",
                 config.tuning_file, table.world_size, world_size);
    }
  }
  // Direct is ahead at every size and world size measured in experiments/collectives.
  if (algorithm == Algorithm::kAuto || group_size == 1) algorithm = Algorithm::kDirect;
  return TuningTable{.world_size = group_size,
                     .rows = {{.max_bytes = std::numeric_limits<int64_t>::max(),
                               .algorithm = algorithm,
                               .chunk_bytes = config.chunk_bytes}}};
}

Status outside(const char* what, int64_t value, int64_t lowest, int64_t highest) {
  return invalid_argument(std::string(what) + " " + std::to_string(value) + " is outside [" + std::to_string(lowest) +
                          ", " + std::to_string(highest) + "]");
}

Status check_world(const PeerWorld& world) {
  const Membership& m = world.membership;
  if (m.world_size < 1 || m.world_size > kMaxWorldSize) return outside("world_size", m.world_size, 1, kMaxWorldSize);
  if (m.rank < 0 || m.rank >= m.world_size) return outside("rank", m.rank, 0, m.world_size - 1);
  if (m.generation < 0 || m.generation > kMaxGeneration) return outside("generation", m.generation, 0, kMaxGeneration);
  KTG_CHECK(!world.memory.empty());
  for (const std::vector<PeerMemory>& channel : world.memory) {
    if (static_cast<int>(channel.size()) == m.world_size) continue;
    return invalid_argument("memory of " + std::to_string(channel.size()) + " ranks for a world of " +
                            std::to_string(m.world_size));
  }
  return ok_status();
}

std::string describe(const Group& group) {
  std::string text = "the group of ranks";
  for (const int r : group.ranks) text.append(" ").append(std::to_string(r));
  return text.append(" on channel ").append(std::to_string(group.channel));
}

Status check_groups(const PeerWorld& world, std::span<const Group> groups) {
  const Membership& m = world.membership;
  uint64_t channels = 0;
  for (const Group& group : groups) {
    const auto wrong = [&](const std::string& why) { return invalid_argument(describe(group) + ": " + why); };
    if (group.channel < 0 || group.channel >= static_cast<int>(world.memory.size())) {
      return wrong("the memory has " + std::to_string(world.memory.size()) + " channels");
    }
    if ((channels >> group.channel & 1) != 0) return wrong("this rank has another group there");
    channels |= uint64_t{1} << group.channel;
    for (size_t i = 0; i < group.ranks.size(); ++i) {
      const int r = group.ranks[i];
      if (r < 0 || r >= m.world_size) return wrong("ranks are 0 to " + std::to_string(m.world_size - 1));
      if (i > 0 && group.ranks[i - 1] >= r) return wrong("ranks must ascend");
    }
    if (std::find(group.ranks.begin(), group.ranks.end(), m.rank) == group.ranks.end()) {
      return wrong("rank " + std::to_string(m.rank) + " is not in it");
    }
  }
  return ok_status();
}

PeerGroup view_of(const PeerWorld& world, const Group& group) {
  const int size = static_cast<int>(group.ranks.size());
  const auto place = std::find(group.ranks.begin(), group.ranks.end(), world.membership.rank) - group.ranks.begin();
  PeerGroup view{
      .membership = {.generation = world.membership.generation, .rank = static_cast<int>(place), .world_size = size},
      .peers = {},
      .ranks = group.ranks,
      .everyone = {},
      .max_inline_bytes = kPayloadBytes,
      .stream_bytes = stream_from(world.membership.world_size)};
  for (const int r : group.ranks) view.peers.push_back(world.memory[group.channel][r]);
  for (const PeerMemory& rank : world.memory[0]) view.everyone.push_back(rank.control);
  return view;
}

}  // namespace

Result<std::vector<std::unique_ptr<Communicator>>> PeerCommunicator::create(const PeerWorld& world,
                                                                            std::span<const Group> groups,
                                                                            const CommConfig& config, StopToken stop) {
  KTG_RETURN_IF_ERROR(config.validate());
  KTG_RETURN_IF_ERROR(check_world(world));
  KTG_RETURN_IF_ERROR(check_groups(world, groups));
  std::shared_ptr<PeerSet> set;
  std::vector<std::unique_ptr<Communicator>> all;
  for (const Group& group : groups) {
    const int size = static_cast<int>(group.ranks.size());
    KTG_ASSIGN_OR_RETURN(TuningTable tuning, choose_tuning(config, size, world.membership.world_size));
    PeerGroup view = view_of(world, group);
    if (set == nullptr) {
      publish_cpus(view);
      set = std::make_shared<PeerSet>(view, stop);
    }
    all.emplace_back(new PeerCommunicator(std::move(view), config, std::move(tuning), set, world.keep_alive));
  }
  return all;
}

Result<std::unique_ptr<Communicator>> PeerCommunicator::create(const PeerWorld& world, const CommConfig& config,
                                                               StopToken stop) {
  KTG_RETURN_IF_ERROR(check_world(world));
  Group everyone;
  for (int r = 0; r < world.membership.world_size; ++r) everyone.ranks.push_back(r);
  KTG_ASSIGN_OR_RETURN(auto made, create(world, std::span(&everyone, 1), config, stop));
  return std::move(made.front());
}

PeerCommunicator::PeerCommunicator(PeerGroup group, const CommConfig& config, TuningTable tuning,
                                   std::shared_ptr<PeerSet> set, std::shared_ptr<void> keep_alive)
    : group_(std::move(group)),
      config_(config),
      tuning_(std::move(tuning)),
      set_(std::move(set)),
      keep_alive_(std::move(keep_alive)),
      self_(std::make_shared<PeerCommunicator*>(this)) {
  set_->add(this);
}

PeerCommunicator::~PeerCommunicator() {
  // Peers that wait for the rest of these calls need not wait for their deadline.
  if (!queue_.empty()) {
    [[maybe_unused]] Status ignored = fail(aborted("the communicator ended with calls in flight"));
  }
  set_->remove(this);
  *self_ = nullptr;
}

Result<std::shared_ptr<Operation>> PeerCommunicator::enqueue(Request request) {
  if (set_->failed()) return status();
  auto operation = std::make_shared<Operation>(group_, std::move(request), ++last_number_);
  queue_.push_back(operation);
  auto moved = set_->progress();
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

Result<WorkPtr> PeerCommunicator::all_to_all(void* out, const void* in, int64_t size_bytes, Stream&) {
  if (size_bytes < 0) return bad_size("all_to_all size_bytes", size_bytes);
  Request r;
  r.call = {.kind = OpKind::kAllToAll, .size_bytes = size_bytes};
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
    if (operation.number() == 1) set_->refresh_policy(group_);
    queue_.pop_front();
    moved = true;
  }
  return moved;
}

const Missing& PeerCommunicator::missing() const {
  return queue_.front()->posted() ? queue_.front()->missing() : post_missing_;
}

Result<bool> PeerCommunicator::poll(const Operation& operation) {
  auto moved = set_->progress();
  if (operation.complete) return true;
  if (!moved.ok()) return moved.status();
  return false;
}

Status PeerCommunicator::wait(const Operation& operation, Deadline deadline) {
  const TimePoint began = MonotonicClock::now();
  const Deadline limit = Deadline::at(std::min(deadline.when(), began + std::chrono::milliseconds(config_.timeout_ms)));
  const auto late = [&] {
    const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(MonotonicClock::now() - began);
    return fail(deadline_exceeded("rank " + std::to_string(group_.own_global()) + " generation " +
                                  std::to_string(membership().generation) + ": " + queue_.front()->description() +
                                  " waited " + std::to_string(waited.count()) + " ms for rank " +
                                  std::to_string(group_.global(first_missing(group_, missing())))));
  };
  while (true) {
    auto moved = set_->progress();
    if (operation.complete) return ok_status();
    if (!moved.ok()) return moved.status();
    if (moved.value()) continue;
    KTG_RETURN_IF_ERROR(set_->wait(limit, late));
  }
}

Status PeerCommunicator::fail(Status why) {
  const StatusCode cause = why.code();
  return set_->fail(std::move(why), {.cause = cause, .origin = group_.own_global()});
}

void PeerCommunicator::abort(Status why) {
  if (why.code() != StatusCode::kAborted) why = aborted(why.to_string());
  [[maybe_unused]] Status first = fail(std::move(why));
  wake(group_, rank());
}

Status PeerCommunicator::status() const { return set_->status(); }

}  // namespace kintsugi::comm
