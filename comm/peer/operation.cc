#include "comm/peer/operation.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "comm/reduction_tree.h"

namespace kintsugi::comm {

namespace {

// Memory traffic of one piece of work between two looks at the stop word: below 0.1 ms.
constexpr int64_t kPieceBytes = 1 << 20;

bool sums(OpKind kind) {
  return kind == OpKind::kAllReduce || kind == OpKind::kAllReduceFixed || kind == OpKind::kReduceScatter;
}

// The chunk asked for, but no smaller than cuts the data into some thousand pieces: schedules have a step or more for
// each.
int64_t sensible_chunk(int64_t chunk_bytes, int64_t size_bytes) {
  constexpr int64_t kMostChunks = 4096;
  return std::max(chunk_bytes, (size_bytes / kMostChunks + 63) / 64 * 64);
}

// My input has a share for each rank.
bool scatters(OpKind kind) { return kind == OpKind::kReduceScatter || kind == OpKind::kAllToAll; }

bool one_to_all(OpKind kind) { return kind == OpKind::kBroadcast || kind == OpKind::kFetch; }

std::string describe(const Call& call) {
  std::string text = name_of(call.kind);
  if (call.kind != OpKind::kBarrier) text += " of " + std::to_string(call.size_bytes) + " bytes";
  if (call.root >= 0) text += " from rank " + std::to_string(call.root);
  if (call.kind == OpKind::kAllReduceFixed) text += " over " + std::to_string(call.num_leaves) + " leaves";
  if (call.kind == OpKind::kAllReduce) {
    text += " by \"" + std::string(name_of(call.algorithm)) + "\"";
    if (call.chunk_bytes > 0) text += " in chunks of " + std::to_string(call.chunk_bytes);
  }
  return text;
}

}  // namespace

const char* name_of(OpKind kind) {
  switch (kind) {
    case OpKind::kBarrier:
      return "barrier";
    case OpKind::kAllReduce:
      return "all_reduce";
    case OpKind::kAllReduceFixed:
      return "all_reduce_fixed";
    case OpKind::kReduceScatter:
      return "reduce_scatter";
    case OpKind::kAllGather:
      return "all_gather";
    case OpKind::kAllToAll:
      return "all_to_all";
    case OpKind::kBroadcast:
      return "broadcast";
    case OpKind::kFetch:
      return "fetch";
  }
  return "unknown call";
}

Operation::Operation(const PeerGroup& group, Request request, int64_t number)
    : group_(group), request_(std::move(request)), number_(number) {
  const Call& call = request_.call;
  if (group.world_size() == 1 || call.kind == OpKind::kBarrier) return;
  const bool small = heap_extent() <= std::min(group.max_inline_bytes, kPayloadBytes);
  inline_ = small && call.kind != OpKind::kAllReduceFixed &&
            (call.kind != OpKind::kAllReduce || call.algorithm == Algorithm::kDirect);
  // Only memory that peers read (or write) need lie where they can.
  const bool peers_read = !one_to_all(call.kind) || call.root == group.rank();
  staged_ =
      !inline_ && peers_read && call.kind != OpKind::kAllReduceFixed && !group.in_own_heap(request_.in, heap_extent());
  streams_ = call.size_bytes >= group.stream_bytes;
}

int64_t Operation::heap_extent() const {
  return request_.call.size_bytes * (scatters(request_.call.kind) ? group_.world_size() : 1);
}

int64_t Operation::element_bytes() const { return sums(request_.call.kind) ? 4 : 1; }

Slot& Operation::slot_of(int rank) const { return group_.peers[rank].control->slots[number_ % kMaxInFlight]; }

std::string Operation::description() const {
  return describe(request_.call) + " (call " + std::to_string(number_) + ")";
}

void Operation::post(int64_t tick_base) {
  tick_base_ = tick_base;
  Slot& slot = slot_of(group_.rank());
  const uint8_t* heap = group_.peers[group_.rank()].heap;
  const auto offset_of = [&](const void* p) {
    return group_.in_own_heap(p, 0) ? static_cast<const uint8_t*>(p) - heap : int64_t{0};
  };
  slot.call = request_.call;
  slot.staged = staged_;
  slot.receives = request_.receives;
  slot.in_offset = offset_of(request_.in);
  slot.out_offset = offset_of(request_.out);
  slot.num_parts = static_cast<int32_t>(request_.parts.size());
  for (size_t i = 0; i < request_.parts.size(); ++i) slot.part_offsets[i] = offset_of(request_.parts[i]);
  const bool sends = !one_to_all(request_.call.kind) || request_.call.root == group_.rank();
  if (inline_ && sends && heap_extent() > 0) {
    std::memcpy(group_.own().payload[number_ % kMaxInFlight], request_.in, static_cast<size_t>(heap_extent()));
  }
  if (staged_) {
    cut_.any_staged = true;
    cut_ = make_cut();
    if (cut_.num_rounds() > 0) copy_in(0);
  }
  publish(group_, slot.posted, make_stamp(group_.membership.generation, number_));
  posted_ = true;
}

bool Operation::inside_heap(int peer, int64_t offset, int64_t size_bytes) const {
  return offset >= 0 && size_bytes >= 0 && offset <= group_.peers[peer].heap_bytes - size_bytes;
}

// A peer posted its call of this number: it must be the same call.
Status Operation::arrived(int peer) {
  const Slot& slot = slot_of(peer);
  const std::string who = "rank " + std::to_string(group_.own_global()) + " generation " +
                          std::to_string(group_.membership.generation) + " call " + std::to_string(number_);
  const int64_t generation = generation_of(slot.posted.load(std::memory_order_relaxed));
  if (generation != group_.membership.generation) {
    return aborted(who + ": rank " + std::to_string(group_.global(peer)) + " is in generation " +
                   std::to_string(generation));
  }
  if (!(slot.call == request_.call)) {
    return internal_error(who + ": want " + describe(request_.call) + ", got " + describe(slot.call) + " from rank " +
                          std::to_string(group_.global(peer)));
  }
  const bool peers_read = !one_to_all(slot.call.kind) || slot.call.root == peer;
  bool inside = true;
  if (!slot.staged && !inline_ && peers_read && slot.call.kind != OpKind::kBarrier) {
    if (slot.call.kind != OpKind::kAllReduceFixed) inside &= inside_heap(peer, slot.in_offset, heap_extent());
    inside &= !sums(slot.call.kind) || slot.call.kind == OpKind::kReduceScatter ||
              inside_heap(peer, slot.out_offset, slot.call.size_bytes);
    inside &= slot.num_parts <= kMaxParts;
    for (int i = 0; inside && i < slot.num_parts; ++i) {
      inside &= inside_heap(peer, slot.part_offsets[i], slot.call.size_bytes);
    }
  }
  if (!inside) {
    return internal_error(who + ": rank " + std::to_string(group_.global(peer)) + " names memory outside its heap of " +
                          std::to_string(group_.peers[peer].heap_bytes) + " bytes");
  }
  cut_.any_staged |= slot.staged;
  return ok_status();
}

Cut Operation::make_cut() const {
  const Call& call = request_.call;
  Cut cut{.size = call.size_bytes / element_bytes(), .round_size = 0, .any_staged = cut_.any_staged};
  int64_t round_bytes = call.size_bytes;
  const bool rounds_of_chunks = call.kind == OpKind::kAllReduce && call.algorithm != Algorithm::kTree;
  if (call.chunk_bytes > 0 && rounds_of_chunks) {
    round_bytes = std::min(round_bytes, sensible_chunk(call.chunk_bytes, call.size_bytes));
  }
  if (cut.any_staged) {
    const int64_t shares = scatters(call.kind) ? group_.world_size() : 1;
    round_bytes = std::min(round_bytes, kStagingHalfBytes / shares / 64 * 64);
  }
  cut.round_size = std::max<int64_t>(1, round_bytes / element_bytes());
  return cut;
}

void Operation::start() {
  const Call& call = request_.call;
  const int rank = group_.rank();
  const int world_size = group_.world_size();
  cut_ = make_cut();
  if (inline_) {
    cut_.round_size = std::max<int64_t>(1, cut_.size);
    const Act act = sums(call.kind) ? Act::kReduceOwn : one_to_all(call.kind) ? Act::kCopy : Act::kGather;
    if (cut_.size > 0) schedule_.steps = {Step{.act = act, .size = cut_.size, .a = static_cast<int16_t>(call.root)}};
  } else if (call.kind == OpKind::kBarrier) {
    schedule_ = {};
  } else if (call.kind == OpKind::kAllReduce && call.algorithm == Algorithm::kRing) {
    schedule_ = schedule_ring(cut_, rank, world_size);
  } else if (call.kind == OpKind::kAllReduce && call.algorithm == Algorithm::kTree) {
    constexpr int64_t kDefaultChunk = 64 << 10;
    const int64_t chunk = sensible_chunk(call.chunk_bytes > 0 ? call.chunk_bytes : kDefaultChunk, call.size_bytes);
    schedule_ = schedule_double_tree(cut_, rank, world_size, chunk / 4);
  } else if (call.kind == OpKind::kAllReduce || call.kind == OpKind::kAllReduceFixed) {
    schedule_ = schedule_direct(cut_, rank, world_size);
  } else {
    const Act act = sums(call.kind) ? Act::kReduceOwn : one_to_all(call.kind) ? Act::kCopy : Act::kGather;
    schedule_ = schedule_pull(cut_, act, static_cast<int16_t>(call.root));
  }
  if (call.kind == OpKind::kAllReduceFixed) {
    tree_ = SumTree::of_parts(call.num_leaves, world_size);
  } else if (sums(call.kind)) {
    tree_ = SumTree::over(world_size);
  }
  started_ = true;
}

bool Operation::waits_over(const Step& step) {
  for (; next_wait_ < Step::kMaxWaits; ++next_wait_) {
    const Wait& wait = step.waits[next_wait_];
    if (wait.peer == kNobody || wait.tick == 0) continue;  // tick 0: posted, which start() saw
    const Word& own = slot_of(group_.rank()).lanes[wait.lane];
    missing_ = {.peers = wait.peer == kEveryPeer ? everyone_else(group_) : uint64_t{1} << wait.peer,
                .offset = offset_in_block(group_, own.stamp),
                .stamp = make_stamp(group_.membership.generation, tick_base_ + wait.tick)};
    if (!is_over(group_, missing_)) return false;
  }
  return true;
}

Result<Operation::State> Operation::advance() {
  if (!started_) {
    const uint64_t posted = make_stamp(group_.membership.generation, number_);
    missing_ = {.peers = everyone_else(group_),
                .offset = offset_in_block(group_, slot_of(group_.rank()).posted),
                .stamp = posted};
    for (int p = 0; p < group_.world_size(); ++p) {
      const uint64_t bit = uint64_t{1} << p;
      if ((arrived_ & bit) != 0 || slot_of(p).posted.load(std::memory_order_acquire) < posted) continue;
      KTG_RETURN_IF_ERROR(arrived(p));
      arrived_ |= bit;
    }
    if (std::popcount(arrived_) < group_.world_size()) return State::kBlocked;
    start();
  }
  while (next_step_ < schedule_.steps.size()) {
    const Step& step = schedule_.steps[next_step_];
    if (!waits_over(step)) return State::kBlocked;
    if (!run_piece(step)) return State::kMoved;
    if (step.publish_lane >= 0) {
      publish(group_, slot_of(group_.rank()).lanes[step.publish_lane].stamp,
              make_stamp(group_.membership.generation, tick_base_ + step.publish_tick));
    }
    ++next_step_;
    next_wait_ = 0;
    step_done_ = 0;
  }
  return State::kDone;
}

bool Operation::run_piece(const Step& step) {
  if (step.act == Act::kNone) return true;
  if (step.act == Act::kCopyIn || step.act == Act::kCopyOut) {
    if (staged_ && step.act == Act::kCopyIn) copy_in(step.round);
    if (staged_ && step.act == Act::kCopyOut) copy_out(step.round);
    return true;
  }
  const bool sums_all = step.act == Act::kReduce || step.act == Act::kReduceOwn;
  const int64_t streams = sums_all ? 2 * group_.world_size() : step.act == Act::kGather ? group_.world_size() : 3;
  const int64_t piece = std::max<int64_t>(1024, kPieceBytes / element_bytes() / streams / 64 * 64);
  const int64_t begin = step.begin + step_done_;
  const int64_t size = std::min(piece, step.size - step_done_);
  switch (step.act) {
    case Act::kReduce:
      reduce(step, begin, size, /*everywhere=*/true);
      break;
    case Act::kReduceOwn:
      reduce(step, begin, size, /*everywhere=*/false);
      break;
    case Act::kAccumulate:
      accumulate(step, begin, size);
      break;
    case Act::kCopy:
      copy_from(step, begin, size);
      break;
    case Act::kGather:
      gather(step, begin, size);
      break;
    default:
      break;
  }
  step_done_ += size;
  return step_done_ >= step.size;
}

bool Operation::peer_staged(int peer) const { return peer == group_.rank() ? staged_ : slot_of(peer).staged; }

const uint8_t* Operation::source(int peer, int64_t round, int64_t begin) const {
  const int64_t bytes = element_bytes();
  const int64_t share = scatters(request_.call.kind) ? group_.rank() : 0;
  ControlBlock& control = *group_.peers[peer].control;
  if (inline_) return control.payload[number_ % kMaxInFlight] + share * request_.call.size_bytes + begin * bytes;
  if (peer_staged(peer)) return control.staging[round % 2] + (share * cut_.round_size + begin) * bytes;
  const uint8_t* base = peer == group_.rank() ? request_.in : group_.peers[peer].heap + slot_of(peer).in_offset;
  return base + share * request_.call.size_bytes + (round * cut_.round_size + begin) * bytes;
}

uint8_t* Operation::target(int peer, int64_t round, int64_t begin) const {
  const int64_t bytes = element_bytes();
  if (request_.call.kind == OpKind::kAllReduce && !inline_ && peer_staged(peer)) {
    return group_.peers[peer].control->staging[round % 2] + begin * bytes;
  }
  uint8_t* base = peer == group_.rank() ? request_.out : group_.peers[peer].heap + slot_of(peer).out_offset;
  return base + (round * cut_.round_size + begin) * bytes;
}

void Operation::reduce(const Step& step, int64_t begin, int64_t size, bool everywhere) {
  if (size <= 0) return;
  const float* sources[kMaxSumSources];
  float* targets[kMaxWorldSize];
  int num_sources = 0;
  int num_targets = 0;
  const bool fixed = request_.call.kind == OpKind::kAllReduceFixed;
  for (int p = 0; p < group_.world_size(); ++p) {
    if (!fixed) {
      sources[num_sources++] = reinterpret_cast<const float*>(source(p, step.round, begin));
    } else if (p == group_.rank()) {
      for (const float* part : request_.parts) sources[num_sources++] = part + begin;
    } else {
      const Slot& slot = slot_of(p);
      for (int i = 0; i < slot.num_parts; ++i) {
        sources[num_sources++] = reinterpret_cast<const float*>(group_.peers[p].heap + slot.part_offsets[i]) + begin;
      }
    }
    if (everywhere || p == group_.rank()) {
      targets[num_targets++] = reinterpret_cast<float*>(target(p, step.round, begin));
    }
  }
  tree_sum(targets, num_targets, sources, tree_, size, streams_);
}

void Operation::accumulate(const Step& step, int64_t begin, int64_t size) {
  if (size <= 0) return;
  static const SumTree kTwo = SumTree::over(2);
  for (int16_t peer : {step.a, step.b}) {
    if (peer == kNobody) continue;
    auto* own = reinterpret_cast<float*>(target(group_.rank(), step.round, begin));
    const float* sources[2] = {own, reinterpret_cast<const float*>(source(peer, step.round, begin))};
    tree_sum(&own, 1, sources, kTwo, size, /*stream_stores=*/false);
  }
}

void Operation::copy_from(const Step& step, int64_t begin, int64_t size) {
  if (step.a == group_.rank() || !request_.receives || size <= 0) return;
  const int64_t bytes = size * element_bytes();
  copy_bytes(target(group_.rank(), step.round, begin), source(step.a, step.round, begin), bytes, streams_);
}

void Operation::gather(const Step& step, int64_t begin, int64_t size) {
  const int64_t at = step.round * cut_.round_size + begin;
  for (int p = 0; p < group_.world_size(); ++p) {
    uint8_t* out = request_.out + p * request_.call.size_bytes + at;
    const int64_t own_share = scatters(request_.call.kind) ? p * request_.call.size_bytes : 0;
    const uint8_t* in = p == group_.rank() ? request_.in + own_share + at : source(p, step.round, begin);
    copy_bytes(out, in, size, streams_);
  }
}

void Operation::copy_in(int64_t round) {
  const int64_t bytes = element_bytes();
  const int64_t size = cut_.size_of_round(round) * bytes;
  const int64_t stride = cut_.round_size * bytes;
  const int shares = scatters(request_.call.kind) ? group_.world_size() : 1;
  for (int share = 0; share < shares; ++share) {
    std::memcpy(group_.own().staging[round % 2] + share * stride,
                request_.in + share * request_.call.size_bytes + round * stride, static_cast<size_t>(size));
  }
}

void Operation::copy_out(int64_t round) {
  const int64_t bytes = element_bytes();
  std::memcpy(request_.out + round * cut_.round_size * bytes, group_.own().staging[round % 2],
              static_cast<size_t>(cut_.size_of_round(round) * bytes));
}

}  // namespace kintsugi::comm
