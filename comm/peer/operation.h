// One collective call in flight: its memory, what the peers posted for the same call, its schedule and how far it is.
// Driven by PeerCommunicator, which owns it; not thread safe.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/peer/layout.h"
#include "comm/peer/schedule.h"
#include "comm/peer/sum.h"
#include "comm/peer/wait.h"

namespace kintsugi::comm {

struct Request {
  Call call;
  const uint8_t* in = nullptr;
  uint8_t* out = nullptr;
  bool receives = true;
  std::vector<const float*> parts;  // kAllReduceFixed
};

class Operation {
 public:
  Operation(const PeerGroup& group, Request request, int64_t number);

  // Staged calls share the staging area: they are posted one at a time.
  bool staged() const { return staged_; }
  int64_t number() const { return number_; }

  // Writes the call into its slot, copies what travels with it, and publishes it. `tick_base`: ticks that earlier calls
  // of this slot used, the same on every rank.
  void post(int64_t tick_base);
  bool posted() const { return posted_; }

  // Carries out what needs no waiting, about a millisecond of it at most. Error: the ranks' calls do not match.
  enum class State { kMoved, kBlocked, kDone };
  Result<State> advance();
  const Missing& missing() const { return missing_; }  // after kBlocked
  int64_t ticks() const { return schedule_.ticks; }    // once started
  std::string description() const;                     // "all_reduce of 4096 bytes"

  // Set by the communicator.
  bool complete = false;

 private:
  using Byte = uint8_t;
  Slot& slot_of(int rank) const;
  Status arrived(int peer);
  void start();
  bool waits_over(const Step& step);
  bool run_piece(const Step& step);  // true when the step is complete
  // Where the peers find rank `peer`'s elements of a round, and where its result goes.
  const Byte* source(int peer, int64_t round, int64_t begin) const;
  Byte* target(int peer, int64_t round, int64_t begin) const;
  bool peer_staged(int peer) const;
  void reduce(const Step& step, int64_t begin, int64_t size, bool everywhere);
  void accumulate(const Step& step, int64_t begin, int64_t size);
  void gather(const Step& step, int64_t begin, int64_t size);
  void copy_from(const Step& step, int64_t begin, int64_t size);
  void copy_in(int64_t round);
  void copy_out(int64_t round);
  bool inside_heap(int peer, int64_t offset, int64_t size_bytes) const;
  int64_t heap_extent() const;
  int64_t element_bytes() const;
  Cut make_cut() const;

  const PeerGroup& group_;
  Request request_;
  int64_t number_;
  bool staged_ = false;
  bool inline_ = false;  // travels inside the slot
  bool streams_ = false;
  bool posted_ = false;
  bool started_ = false;
  int64_t tick_base_ = 0;
  uint64_t arrived_ = 0;  // bit r: rank r has posted the same call
  Cut cut_;
  SumTree tree_;
  Schedule schedule_;
  size_t next_step_ = 0;
  int next_wait_ = 0;      // of the step
  int64_t step_done_ = 0;  // elements of the step
  Missing missing_;
};

}  // namespace kintsugi::comm
