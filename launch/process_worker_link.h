// WorkerLink between processes: progress, stop word and verdict in the rank's control page, the rest as messages to the
// agent.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include "launch/channel.h"
#include "launch/control_page.h"
#include "launch/worker_link.h"

namespace kintsugi::launch {

class ProcessWorkerLink final : public WorkerLink {
 public:
  // This process's slot of `page`; both outlive the link. `channel` leads to the agent.
  ProcessWorkerLink(ControlPage& page, int slot_index, int64_t incarnation, Channel channel);

  StopToken stop_token(int64_t generation) const override;
  void begun(int64_t step) override;
  void left_vote(const VoteOutcome& vote) override;
  void updated(int64_t step) override;
  void alive() override;
  void entered(EntryMilestone milestone) override;
  Result<Verdict> await_verdict(int64_t generation, Deadline deadline) override;
  bool claim_fault(int64_t index) override;
  bool stop_requested() const override;
  int free_snapshot_slot(bool keep_newest) override;
  Status snapshot_ready(int64_t step, int64_t cursor, int slot, bool save) override;
  HeldSnapshot held_snapshot(int64_t step) const override;
  Status await_snapshots(Deadline deadline) override;
  Status publish(std::string_view topic, std::string_view payload) override;
  Status finished(std::string_view summary_json) override;

  // For the worker's main function. `stopped`: saved because of a stop request, and steps are left.
  Status finished(std::string_view summary_json, bool stopped);
  // The whole job is: this process may end whatever it was doing.
  bool complete() const;
  // `trouble` asks for a new generation; `failed` says that nothing will mend it.
  Status trouble(const Status& reason);
  Status failed(int exit_code, std::string_view message);
  // The newest verdict told this rank to load a checkpoint, and no step has begun since.
  bool loading_checkpoint() const { return verdict_.source == StateSource::kCheckpoint && times_.begun_ns == 0; }
  Status bad_checkpoint(const Status& reason);

 private:
  Status send(MessageType type, int64_t value = 0, std::string body = {});
  void report_resumed();

  ControlPage& page_;
  IncarnationSlot& slot_;
  const int slot_index_;
  const int64_t incarnation_;
  std::mutex send_mutex_;  // publish() may come from a logger's thread
  Channel channel_;
  int64_t generation_ = 0;  // of the newest verdict
  Verdict verdict_;
  EntryTimes times_;
  bool resumed_reported_ = true;
};

}  // namespace kintsugi::launch
