#include "comm/peer/schedule.h"

#include <algorithm>
#include <bit>

#include "runtime/base/check.h"

namespace kintsugi::comm {

namespace {

// The staging steps that rounds of every algorithm share: after the work on round c its result is copied out, and the
// next round is copied in.
Step copy_step(Act act, int64_t round, const Cut& cut) {
  return Step{.act = act, .round = static_cast<int32_t>(round), .begin = 0, .size = cut.size_of_round(round)};
}

}  // namespace

int64_t slice_begin(int64_t n, int rank, int world_size) {
  constexpr int64_t kLine = 16;
  const int64_t lines = (n + kLine - 1) / kLine;
  return std::min(n, lines * rank / world_size * kLine);
}

// Tick c: my slice of round c - 1 is everywhere, and round c lies where peers can read it (round 0: when posted).
Schedule schedule_direct(const Cut& cut, int rank, int world_size) {
  Schedule s;
  const int64_t rounds = cut.num_rounds();
  for (int64_t c = 0; c < rounds; ++c) {
    const int64_t n = cut.size_of_round(c);
    const int64_t begin = slice_begin(n, rank, world_size);
    Step reduce{.act = Act::kReduce,
                .round = static_cast<int32_t>(c),
                .begin = begin,
                .size = slice_begin(n, rank + 1, world_size) - begin};
    if (c > 0) reduce.waits[0] = {kEveryPeer, 0, static_cast<int32_t>(c)};
    s.steps.push_back(reduce);
    // Round c - 1 is complete since the wait above; its half then takes round c + 1.
    if (cut.any_staged && c > 0) s.steps.push_back(copy_step(Act::kCopyOut, c - 1, cut));
    if (cut.any_staged && c + 1 < rounds) s.steps.push_back(copy_step(Act::kCopyIn, c + 1, cut));
    s.steps.back().publish_lane = 0;
    s.steps.back().publish_tick = static_cast<int32_t>(c + 1);
  }
  if (rounds == 0) return s;
  Step last = cut.any_staged ? copy_step(Act::kCopyOut, rounds - 1, cut) : Step{};
  last.waits[0] = {kEveryPeer, 0, static_cast<int32_t>(rounds)};
  s.steps.push_back(last);
  s.ticks = static_cast<int32_t>(rounds);
  return s;
}

// Ticks of round c start at c * (2N - 1): "round c lies ready"; then one a step. In step s of the first phase rank r
// adds its left neighbour's slice r - 1 - s to its own; in the second it copies slice r - s, complete by then.
Schedule schedule_ring(const Cut& cut, int rank, int world_size) {
  Schedule s;
  const int n_ranks = world_size;
  const int64_t rounds = cut.num_rounds();
  const auto left = static_cast<int16_t>((rank + n_ranks - 1) % n_ranks);
  const auto right = static_cast<int16_t>((rank + 1) % n_ranks);
  const int32_t ticks_a_round = 2 * n_ranks - 1;
  for (int64_t c = 0; c < rounds; ++c) {
    const int32_t base = static_cast<int32_t>(c) * ticks_a_round;
    const int64_t n = cut.size_of_round(c);
    for (int32_t step = 0; step < 2 * (n_ranks - 1); ++step) {
      const bool adds = step < n_ranks - 1;
      const int within = adds ? step : step - (n_ranks - 1);
      const int slice = ((adds ? rank - 1 : rank) - within + 2 * n_ranks) % n_ranks;
      const int64_t begin = slice_begin(n, slice, n_ranks);
      Step out{.act = adds ? Act::kAccumulate : Act::kCopy,
               .round = static_cast<int32_t>(c),
               .begin = begin,
               .size = slice_begin(n, slice + 1, n_ranks) - begin,
               .a = left};
      out.waits[0] = {left, 0, base + step};
      out.publish_lane = 0;
      out.publish_tick = base + step + 1;
      s.steps.push_back(out);
    }
    if (cut.any_staged) s.steps.push_back(copy_step(Act::kCopyOut, c, cut));
    if (c + 1 < rounds) {
      Step in = copy_step(cut.any_staged ? Act::kCopyIn : Act::kNone, c + 1, cut);
      // My right neighbour read round c - 1 out of the half that round c + 1 takes.
      if (cut.any_staged && c > 0) in.waits[0] = {right, 0, base - 1};
      in.publish_lane = 0;
      in.publish_tick = base + ticks_a_round;
      s.steps.push_back(in);
    }
  }
  if (rounds == 0) return s;
  s.ticks = static_cast<int32_t>(rounds) * ticks_a_round;
  Step last;  // my memory is mine again once the right neighbour has copied its last slice
  last.waits[0] = {right, 0, s.ticks - 1};
  s.steps.push_back(last);
  return s;
}

namespace {

// Binary tree over n positions in order, so that every other one is a leaf: counted from 1, the lowest set bit of a
// position is its height, and the root is the largest power of two <= n.
TreeNode in_order_node(int position, int n) {
  TreeNode node;
  const int i = position + 1;
  const int root = static_cast<int>(std::bit_floor(static_cast<unsigned>(n)));
  const int low = i & -i;
  if (i != root) {
    // The parent is one level up, to the left or the right; where it falls beyond n, the next one up to the left.
    int up = (i ^ low) | (low << 1);
    while (up > n) {
      const int up_low = up & -up;
      up = (up ^ up_low) | (up_low << 1);
    }
    node.parent = static_cast<int16_t>(up - 1);
  }
  if (low > 1) {
    node.children[0] = static_cast<int16_t>(i - low / 2 - 1);
    // The right subtree covers (i, i + low); its root is the highest node of that range that exists.
    int step = low / 2;
    while (step >= 1 && i + step > n) step /= 2;
    if (step >= 1) node.children[1] = static_cast<int16_t>(i + step - 1);
  }
  return node;
}

}  // namespace

// Tree 1 is tree 0 mirrored (even N) or shifted by one (odd N), which swaps leaves and inner nodes.
TreeNode double_tree_node(int rank, int world_size, int tree) {
  KTG_CHECK(rank >= 0 && rank < world_size && (tree == 0 || tree == 1)) << rank << " of " << world_size;
  if (tree == 0) return in_order_node(rank, world_size);
  const bool mirror = world_size % 2 == 0;
  auto to_position = [&](int r) { return mirror ? world_size - 1 - r : (r + world_size - 1) % world_size; };
  auto to_rank = [&](int p) { return mirror ? world_size - 1 - p : (p + 1) % world_size; };
  TreeNode node = in_order_node(to_position(rank), world_size);
  auto map = [&](int16_t p) { return p == kNobody ? kNobody : static_cast<int16_t>(to_rank(p)); };
  return TreeNode{.parent = map(node.parent), .children = {map(node.children[0]), map(node.children[1])}};
}

namespace {

// One rank's part of one tree: `up` sums towards the root, `down` copies from it.
class TreeHalf {
 public:
  TreeHalf(int rank, int world_size, int tree, int64_t begin, int64_t end, int64_t chunk)
      : node_(double_tree_node(rank, world_size, tree)), tree_(tree), begin_(begin), end_(end), chunk_(chunk) {}
  int64_t num_chunks() const { return (end_ - begin_ + chunk_ - 1) / chunk_; }

  // `base`: ticks before this round.
  Step up(int64_t k, int32_t round, int32_t base) const {
    Step s = chunk_step(k, round);
    s.a = node_.children[0];
    s.b = node_.children[1];
    s.act = s.a == kNobody && s.b == kNobody ? Act::kNone : Act::kAccumulate;
    for (int i = 0; i < 2; ++i) s.waits[i] = {node_.children[i], lane_up(), base + static_cast<int32_t>(k) + 1};
    s.publish_lane = lane_up();
    s.publish_tick = base + static_cast<int32_t>(k) + 1;
    return s;
  }
  Step down(int64_t k, int32_t round, int32_t base) const {
    Step s = chunk_step(k, round);
    s.a = node_.parent;
    s.act = s.a == kNobody ? Act::kNone : Act::kCopy;
    s.waits[0] = {node_.parent, lane_down(), base + static_cast<int32_t>(k) + 1};
    s.publish_lane = lane_down();
    s.publish_tick = base + static_cast<int32_t>(k) + 1;
    return s;
  }
  // My memory of the round is mine again: my children have copied all of it.
  Step children_done(int32_t base) const {
    Step s;
    for (int i = 0; i < 2; ++i) {
      s.waits[i] = {node_.children[i], lane_down(), base + static_cast<int32_t>(num_chunks())};
    }
    return s;
  }

 private:
  int8_t lane_up() const { return static_cast<int8_t>(tree_); }
  int8_t lane_down() const { return static_cast<int8_t>(2 + tree_); }
  Step chunk_step(int64_t k, int32_t round) const {
    const int64_t at = begin_ + k * chunk_;
    return Step{.round = round, .begin = at, .size = std::min(chunk_, end_ - at)};
  }
  TreeNode node_;
  int tree_;
  int64_t begin_, end_, chunk_;
};

}  // namespace

// In each round all ranks go through (up 0, tree 0), (up 0, tree 1), (up 1, tree 0), ... with the downs some chunks
// behind, in one global order; each step depends on steps earlier in that order or nearer to a leaf (up) or to the root
// (down) at the same place of it, so no cycle of waits exists.
Schedule schedule_double_tree(const Cut& cut, int rank, int world_size, int64_t chunk) {
  Schedule s;
  const int64_t rounds = cut.num_rounds();
  const auto lag = static_cast<int64_t>(std::bit_width(static_cast<unsigned>(world_size)));
  int32_t base = 0;
  for (int64_t c = 0; c < rounds; ++c) {
    const auto round = static_cast<int32_t>(c);
    const int64_t n = cut.size_of_round(c);
    const int64_t middle = slice_begin(n, 1, 2);
    const TreeHalf halves[2] = {{rank, world_size, 0, 0, middle, chunk}, {rank, world_size, 1, middle, n, chunk}};
    const int64_t chunks = std::max(halves[0].num_chunks(), halves[1].num_chunks());
    for (int64_t i = 0; i < chunks + lag; ++i) {
      for (const TreeHalf& half : halves) {
        if (i < half.num_chunks()) s.steps.push_back(half.up(i, round, base));
      }
      for (const TreeHalf& half : halves) {
        if (i >= lag && i - lag < half.num_chunks()) s.steps.push_back(half.down(i - lag, round, base));
      }
    }
    for (const TreeHalf& half : halves) {
      if (half.num_chunks() > 0) s.steps.push_back(half.children_done(base));
    }
    if (cut.any_staged) s.steps.push_back(copy_step(Act::kCopyOut, c, cut));
    if (cut.any_staged && c + 1 < rounds) s.steps.push_back(copy_step(Act::kCopyIn, c + 1, cut));
    // Round c + 1 is read only behind an `up` of its own, which its owner publishes after this copy.
    base += static_cast<int32_t>(chunks);
  }
  s.ticks = base;
  return s;
}

// Tick c: I have read round c - 1 of my peers, and my round c lies where they can read it (round 0: when posted).
Schedule schedule_pull(const Cut& cut, Act act, int16_t root) {
  Schedule s;
  const int64_t rounds = cut.num_rounds();
  for (int64_t c = 0; c < rounds; ++c) {
    Step work{.act = act, .round = static_cast<int32_t>(c), .begin = 0, .size = cut.size_of_round(c), .a = root};
    if (c > 0) work.waits[0] = {kEveryPeer, 0, static_cast<int32_t>(c)};
    s.steps.push_back(work);
    if (cut.any_staged && c + 1 < rounds) s.steps.push_back(copy_step(Act::kCopyIn, c + 1, cut));
    s.steps.back().publish_lane = 0;
    s.steps.back().publish_tick = static_cast<int32_t>(c + 1);
  }
  if (rounds == 0) return s;
  Step last;
  last.waits[0] = {kEveryPeer, 0, static_cast<int32_t>(rounds)};
  s.steps.push_back(last);
  s.ticks = static_cast<int32_t>(rounds);
  return s;
}

}  // namespace kintsugi::comm
