// What one rank does in one collective, as data: a list of steps, each with what to wait for, what to do and what to
// publish afterwards. Pure functions of (rank, world size, sizes), so that algorithms are tested without memory,
// threads or time; comm/peer/operation.cc carries the steps out.
//
// Vocabulary. The data is cut into `rounds` of `round_size` elements. A rank whose memory peers cannot address stages:
// round c passes through half c % 2 of its staging area; kCopyIn and kCopyOut move it there and back (other ranks do
// nothing in these steps, but publish all the same). Progress is a counter a lane: the owner publishes `tick` once
// a step is done, others wait for "peer's lane >= tick". Ticks count from 0 within one call, and every
// rank counts the same number of them.
#pragma once

#include <cstdint>
#include <vector>

namespace kintsugi::comm {

enum class Act : uint8_t {
  kNone,
  kCopyIn,      // staged ranks: my memory -> my half, for `round`
  kCopyOut,     // staged ranks: back
  kReduce,      // [begin, begin + size) of every rank = sum over ranks of it
  kReduceOwn,   // the same, but written to my memory alone
  kAccumulate,  // mine += a's (and b's): [begin, begin + size)
  kCopy,        // mine = a's
  kGather,      // my output's share p = p's input, for every p
};

inline constexpr int16_t kEveryPeer = -1;
inline constexpr int16_t kNobody = -2;

struct Wait {
  int16_t peer = kNobody;
  int8_t lane = 0;
  int32_t tick = 0;
};

struct Step {
  static constexpr int kMaxWaits = 3;
  Act act = Act::kNone;
  int32_t round = 0;
  int64_t begin = 0;  // within the round
  int64_t size = 0;
  int16_t a = kNobody;
  int16_t b = kNobody;
  Wait waits[kMaxWaits] = {};
  int8_t publish_lane = -1;
  int32_t publish_tick = 0;
};

struct Schedule {
  std::vector<Step> steps;
  int32_t ticks = 0;  // no lane of any rank goes beyond
};

// How the data of a call is cut.
struct Cut {
  int64_t size = 0;        // elements: floats when they are summed, else bytes
  int64_t round_size = 0;  // elements of every round but the last
  bool any_staged = false;
  int64_t num_rounds() const { return size == 0 ? 0 : (size + round_size - 1) / round_size; }
  int64_t size_of_round(int64_t round) const {
    const int64_t rest = size - round * round_size;
    return rest < round_size ? rest : round_size;
  }
};

// Rank r's share [slice_begin(n, r, N), slice_begin(n, r + 1, N)) of n floats: borders on whole cache lines.
int64_t slice_begin(int64_t n, int rank, int world_size);

// All-reduce: every rank sums its slice over all ranks and writes the result to all. Bytes a rank moves, of S bytes of
// data: S read, S written. Two synchronisations.
Schedule schedule_direct(const Cut& cut, int rank, int world_size);
// All-reduce by a ring: N - 1 steps in which my slice-sized window travels and grows, N - 1 in which it is copied.
// Reads 3 S (N-1)/N, writes 2 S (N-1)/N; talks to one neighbour alone.
Schedule schedule_ring(const Cut& cut, int rank, int world_size);
// All-reduce by two binary trees, each with half of the data; a rank that is a leaf in one is an inner node in the
// other. `chunk` elements travel at a time. Depth log2(N).
Schedule schedule_double_tree(const Cut& cut, int rank, int world_size, int64_t chunk);
// Calls in which a rank reads from peers and writes to its own memory alone: `act` once a round.
Schedule schedule_pull(const Cut& cut, Act act, int16_t root);

// Parent and children of `rank` in tree 0 or 1 of the double tree; kNobody where there is none.
struct TreeNode {
  int16_t parent = kNobody;
  int16_t children[2] = {kNobody, kNobody};
};
TreeNode double_tree_node(int rank, int world_size, int tree);

}  // namespace kintsugi::comm
