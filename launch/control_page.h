// One rank's control page: memory that its agent creates (a memfd, so it outlives every worker) and that the
// rank's worker, its spares, and all agents of the host map. What must be fast, or must be readable after a
// death, goes through here; everything else through the Channel.
//
// A rank's processes come and go; each is an incarnation and has a slot of the page to itself, from before its exec
// until it has been reaped. Within a slot one process writes progress and its agent writes the mailbox.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <memory>

#include "launch/unique_fd.h"
#include "launch/verdict.h"
#include "runtime/base/status.h"

namespace kintsugi::launch {

inline constexpr int kMaxIncarnations = 8;    // of one rank at a time: worker, spares, and those being buried
inline constexpr int kMaxFaultEntries = 512;  // of fault.kill

// When an incarnation passed the milestones between two generations (CLOCK_MONOTONIC ns; 0: not yet, or not its own).
struct EntryTimes {
  int64_t stopped_ns = 0;       // a survivor saw that the generation is over
  int64_t drained_ns = 0;       // nothing of it ran any more
  int64_t entered_ns = 0;       // it read the verdict on the next
  int64_t communicator_ns = 0;  // the new communicator stands
  int64_t fetched_ns = 0;       // its state is in place
  int64_t compared_ns = 0;      // and equal to its peers'
  int64_t state_ns = 0;         // the device's communicator is connected, too
  int64_t begun_ns = 0;         // it began the first step
  int64_t committed_ns = 0;     // it made that step's update
};

// Locked by a thread of the worker that lives as long as the process: the kernel hands it on at death.
struct alignas(64) IncarnationSlot {
  pthread_mutex_t life;

  // Progress: the worker's alone. vote is written before reduced_step.
  std::atomic<int64_t> begun_step;
  std::atomic<int64_t> reduced_step;
  std::atomic<int64_t> updated_step;
  VoteOutcome vote;
  std::atomic<int64_t> heartbeat;  // grows with every sign of progress
  std::atomic<int64_t> fault_ns;   // just before this incarnation killed itself by fault.kill

  // Mailbox: the agent writes the verdict, then its generation, then signals the word. Written only while the worker is
  // known to wait for it, so never under a reader's hands.
  alignas(64) std::atomic<uint32_t> mail_word;
  std::atomic<int64_t> verdict_generation;
  std::atomic<int32_t> leave;  // the whole job is complete: go
  Verdict verdict;
};

enum class SnapshotSlotState : int32_t { kFree = 0, kHandedOver = 1, kWriting = 2 };

struct SnapshotSlot {
  std::atomic<int32_t> state;  // SnapshotSlotState
  int64_t step;
  int64_t cursor;
  int64_t sequence;  // of the handover, from 1
  // The step whose snapshot lies here complete, whoever is alive; -1: none, or it is being filled. Also while the slot
  // is free: sharded runs go back to it.
  std::atomic<int64_t> held_step;
};

struct ControlPage {
  uint64_t magic;
  int32_t rank;
  int32_t num_snapshot_slots;

  // Generations below this are over: workers stop between two operations.
  alignas(64) std::atomic<int64_t> stop_generation;
  std::atomic<uint32_t> stop_word;      // signalled when the above grows
  std::atomic<int32_t> stop_requested;  // a signal asked for: finish the step, save, leave
  std::atomic<int32_t> obituary;        // of this rank's agent: an agent that sees its death speaks for all, once

  // Faults that fired, one bit an entry.
  std::atomic<uint64_t> faults_claimed[kMaxFaultEntries / 64];

  // Snapshots. A slot goes free -> handed over (worker) -> writing -> free (agent), or stays free when the snapshot is
  // for memory alone.
  SnapshotSlot snapshots[kMaxSnapshotSlots];
  std::atomic<int64_t> handed_sequence;   // handovers so far
  std::atomic<int64_t> settled_sequence;  // all up to this are durable or have failed
  std::atomic<int64_t> failed_sequence;   // the last of them that failed; 0: none
  char failure[512];                      // and why
  std::atomic<uint32_t> snapshot_word;    // signalled when one of the above changes

  IncarnationSlot slots[kMaxIncarnations];

  // True once for each entry in the life of the job.
  bool claim_fault(int64_t index);
  // Makes a slot ready for a new process.
  void reset_slot(int index);
  Progress progress(int index) const;
  // What is known of the process that was given the newest verdict; a rank without one has no progress.
  Progress newest_progress() const;
  // False while a process that locked its life mutex lives. For the one who takes the page over from a dead agent: it
  // locks what it finds unlocked for a moment.
  bool all_processes_ended();
  // generation >= stop_generation afterwards.
  void stop_generations_below(int64_t generation);
};

// A mapping of one page.
class ControlPageMap {
 public:
  static Result<UniqueFd> create_fd(int rank, int num_snapshot_slots);
  // kFailedPrecondition when the descriptor is not a control page.
  static Result<ControlPageMap> map(int fd);
  ControlPageMap() = default;
  ControlPageMap(ControlPageMap&& other) noexcept : page_(std::exchange(other.page_, nullptr)) {}
  ControlPageMap& operator=(ControlPageMap&& other) noexcept {
    std::swap(page_, other.page_);
    return *this;
  }
  ~ControlPageMap();
  ControlPage* get() const { return page_; }
  ControlPage* operator->() const { return page_; }

 private:
  explicit ControlPageMap(ControlPage* page) : page_(page) {}
  ControlPage* page_ = nullptr;
};

}  // namespace kintsugi::launch
