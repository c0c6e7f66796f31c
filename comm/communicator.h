// Collectives among the ranks of one Membership. One interface, several backends (`local`: threads of
// one process; `host`: processes of one machine over shared memory; `nccl` in the GPU build), one
// conformance suite.
//
// Rules: every rank issues the same calls in the same order, which is checked: a call that differs from a peer's is
// kInternal and names both. One caller thread at a time. A collective starts after what is queued on `stream` and may
// make progress only inside calls of this interface (poll, wait, or a later collective), so a caller that computes
// meanwhile polls its Work now and then. No call but wait() and barrier() blocks. Works complete in the order of
// their calls.
//
// A rank may have several communicators in a generation, over groups of ranks (comm/membership.h) and on channels of
// their own; it makes all of them in one call (create_host_communicators(), LocalWorld::join()). Their collectives run
// side by side: a call waits for calls of the same communicator alone. Whoever polls, waits or calls on one of them
// makes progress on all, so it does not matter that a peer waits on another one meanwhile; only that both have issued
// what is waited for: of all ranks' calls and waits there must be one order in which each rank's own ones follow each
// other. The first error of one is the error of all of them, since a rank gives up a generation, not a group. "One
// caller thread at a time" holds for all of a rank's communicators together.
//
// Every wait takes a Deadline, and comm.timeout_ms bounds it too. The first error is sticky, a deadline that passed
// included (poll() is for those who only want to look): later calls return it at once, until the communicator is
// replaced in the next generation. Peers that wait learn of it and end with kAborted, naming the rank and the code with
// which it began. abort() may come from any thread at any time and makes every call on this rank return kAborted soon
// (between two polls of a bounded spin, at most a few ms). Ranks may be 64 at most. The next generation's works over
// whatever a dead one left there, without clearing or handshake; but every rank of the old one must have stopped or
// died before, because a rank that still runs writes into its peers' buffers.
//
// Sums are fp32, in an order that is a function of (algorithm, world size, count) alone: repeatable.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "comm/membership.h"
#include "runtime/backend.h"
#include "runtime/base/config_table.h"
#include "runtime/base/deadline.h"
#include "runtime/base/status.h"
#include "runtime/base/stop_token.h"

namespace kintsugi::comm {

using kernels::DType;
using runtime::Stream;

enum class Algorithm { kAuto, kDirect, kRing, kTree };
Result<Algorithm> parse_algorithm(std::string_view name);
std::string_view name_of(Algorithm a);

struct CommConfig {
  std::string algorithm = "auto";  // "auto" (the tuning table, else built-in rules), "direct", "ring", "tree"
  int64_t chunk_bytes = 0;         // 0: the table's or the algorithm's own
  std::string tuning_file;         // what `comm_bench --tune` wrote
  bool overlap = true;             // reduce buckets while backward runs
  // Upper size of a gradient bucket, and of the one that is ready first; 0: as resolved() says.
  int64_t bucket_bytes = 0, first_bucket_bytes = 0;
  int64_t timeout_ms = 60'000;  // a collective that takes longer is a hang
  // NCCL's alone.
  std::string protocol = "auto";  // "auto", "simple", "ll", "ll128"
  int64_t nccl_buffsize = 0;      // bytes of a channel's buffer: pieces on the wire are a quarter of it; 0: NCCL's own
  int64_t max_ctas = 0;           // multiprocessors that a collective may take from the computation; 0: NCCL's own
  int64_t max_queued = 0;         // collectives that wait or run on the device; a further one waits on the host
  bool check_calls = false;       // compare every call with the peers' before it starts (debugging: slow)
  Status validate() const;
  // What is 0 of bucket_bytes, first_bucket_bytes and max_queued replaced: 4 MiB, 1 MiB, so that sums start early,
  // and 8. Ranks that share a GPU get 1 GiB, all in one, and 1. A sum waits for several turns of every rank whatever
  // its size (28 ms at 4 ranks for 64 KiB or 1 MiB). And an abort ends queued ones one by one: each starts, and polls
  // 10,000 times before it looks at the flag (source: NCCL 2.28.9, device/primitives.h), 15 to 20 ms of a GPU's time
  // here.
  CommConfig resolved(bool ranks_share_gpu) const;
};
void describe(ConfigTable& table, CommConfig& config);

// A handle on one collective in flight. Dropping it does not cancel: the communicator completes it in order.
class Work {
 public:
  virtual ~Work() = default;
  // Makes progress without waiting; true once complete. Its error once it failed.
  virtual Result<bool> poll() = 0;
  // Afterwards the result may be used on the stream it was issued on. On the CPU the host waits until then. On a
  // device the stream waits for the collective and the host does not: what is queued from here on finds the result
  // (a fetch does keep the host waiting).
  virtual Status wait(Deadline deadline) = 0;
};
using WorkPtr = std::unique_ptr<Work>;

// Memory that peers may read where it lies. The same sequence of allocations on each rank gives the same
// offsets on each, whatever the process: that is how a rank finds a peer's copy of "its" buffer.
class SymmetricHeap {
 public:
  virtual ~SymmetricHeap() = default;
  // 64-byte aligned, zeroed on first use. kResourceExhausted with both numbers when the plan was too small.
  virtual Result<void*> allocate(int64_t size_bytes, std::string_view what) = 0;
  virtual bool contains(const void* p, int64_t size_bytes) const = 0;
  virtual int64_t capacity_bytes() const = 0;
  virtual int64_t used_bytes() const = 0;
  // Its first byte, as this process addresses it.
  virtual uint8_t* data() const = 0;
};

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual const Membership& membership() const = 0;
  int rank() const { return membership().rank; }
  int world_size() const { return membership().world_size; }

  // x[i] = sum over ranks of x[i], in place. Fastest when x lies in the symmetric heap at the same offset on all
  // ranks; other memory is staged.
  virtual Result<WorkPtr> all_reduce(float* x, int64_t count, Stream& stream) = 0;

  // Fixed-order sum, for results that do not depend on the world size. The global tree has `num_leaves` leaves
  // (virtual shards); this rank brings `parts`, its maximal subtrees of the leaf range [first_leaf, last_leaf) in
  // ascending order (comm/reduction_tree.h computes them). All parts of all ranks have `count` elements and lie in
  // symmetric heaps; rank r owns leaves [r V / N, (r+1) V / N), N <= V <= 64.
  // out (may be parts[0]) = the tree's root, the same bits on every rank and for every world size.
  virtual Result<WorkPtr> all_reduce_fixed(float* out, std::span<float* const> parts, int64_t num_leaves, int64_t count,
                                           Stream& stream) = 0;

  // out[i] = sum over ranks of in[rank * count + i]; in has world_size * count elements. out may be in + rank * count.
  virtual Result<WorkPtr> reduce_scatter(float* out, const float* in, int64_t count, Stream& stream) = 0;
  // out (world_size * size_bytes) = the ranks' inputs in rank order. in may be out + rank * size_bytes.
  virtual Result<WorkPtr> all_gather(void* out, const void* in, int64_t size_bytes, Stream& stream) = 0;
  // out (world_size * size_bytes): out[r] = rank r's in[rank], of in (world_size * size_bytes). They do not overlap.
  virtual Result<WorkPtr> all_to_all(void* out, const void* in, int64_t size_bytes, Stream& stream) = 0;
  virtual Result<WorkPtr> broadcast(void* x, int64_t size_bytes, int root, Stream& stream) = 0;
  // Every rank calls it; ranks with receive = true get `source`'s x, the others keep theirs. State transfer after a
  // recovery: the source's bytes are read where they lie.
  virtual Result<WorkPtr> fetch(void* x, int64_t size_bytes, int source, bool receive, Stream& stream) = 0;
  virtual Status barrier(Deadline deadline) = 0;

  // From any thread, any number of times. Ends all communicators of this rank and generation.
  virtual void abort(Status why) = 0;
  // Until nothing that was started here reads or writes memory any more: after abort(), before that memory serves
  // anything else. The host's backends work inside calls alone, so there is nothing to wait for.
  virtual Status drain(Deadline) { return ok_status(); }
  // The first error, or ok; never clears.
  virtual Status status() const = 0;
};

}  // namespace kintsugi::comm
