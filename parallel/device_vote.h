// The vote where results stay on the device: the records are filled, gathered and counted by kernels, the update reads
// its scalars where the count left them, and the host learns of the outcome from memory that a kernel writes. No call
// waits.
//
// The count is also the gate of the update (design: "committed"). An aborted collective ends with whatever lies in its
// buffers, and what is queued behind it then runs. So whoever ends a generation raises the stop word, or calls close(),
// before work in flight is aborted, and the kernel that counts publishes a step and lets its update through only while
// neither is raised. Whether a step is part of the state is therefore known for certain once the stream has drained:
// it is when it was published.
//
// A step: upload(); forward and backward fill losses(); enter(); the gather, between ranks; count(); the update with
// scalars(). All of it but upload() can be recorded into a graph.
// Not thread safe, except close().
#pragma once

#include <atomic>
#include <memory>
#include <optional>

#include "comm/communicator.h"
#include "kernels/vote.h"
#include "parallel/vote.h"
#include "runtime/backend.h"

namespace kintsugi::parallel {

class DeviceVote {
 public:
  // `num_losses`: micro-steps of this rank. `add_up`: their losses count as one (fast order). `vote` is attached to
  // device memory, and outlives this.
  static Result<std::unique_ptr<DeviceVote>> create(const Vote& vote, int64_t num_losses, bool add_up,
                                                    runtime::Backend& backend);
  static int64_t device_bytes(int64_t num_losses);

  // The generation's stop word becomes part of the gate; null: none. Forgets what was published. Nothing is in flight.
  Status open(StopToken stop);
  // From any thread: nothing passes the gate from here on. Returns once that is so for every kernel that has not yet
  // read the word.
  void close() { __atomic_store_n(&host().closed, 1, __ATOMIC_SEQ_CST); }

  // What the host says of the next step. Its predecessor has been published, or nothing is in flight.
  Status upload(const kernels::StepInputs& inputs, runtime::Stream& stream);
  kernels::LossSums* losses(int64_t micro_step) const { return device().losses + micro_step; }
  Status enter(const kernels::Gradient& gradient, runtime::Stream& stream);
  Status gather(comm::Communicator& communicator, runtime::Stream& stream, Deadline deadline);
  Status count(runtime::Stream& stream);
  const kernels::AdamWScalars* scalars() const { return device().scalars; }
  // An update whose outcome is known from elsewhere: after a recovery.
  Status upload_scalars(const kernels::AdamWScalars& scalars, runtime::Stream& stream);

  // The outcome of `step` once it has passed the gate. Reads one word.
  std::optional<VoteResult> published(int64_t step) const;

 private:
  struct HostMemory {
    kernels::VotePublication publication;
    kernels::StepInputs inputs[2];  // by step, so that one may still be on its way
    kernels::AdamWScalars scalars;
    int32_t closed;
  };
  struct DeviceMemory {
    kernels::StepInputs* inputs;
    kernels::AdamWScalars* scalars;
    kernels::LossSums* losses;
  };
  DeviceVote(const Vote& vote, int64_t num_losses, bool add_up, runtime::Backend& backend)
      : vote_(vote), num_losses_(num_losses), add_up_(add_up), backend_(backend) {}
  HostMemory& host() const { return *host_.as<HostMemory>(); }
  DeviceMemory device() const;

  const Vote& vote_;
  const int64_t num_losses_;
  const bool add_up_;
  runtime::Backend& backend_;
  runtime::Buffer host_, device_, stop_page_;
  StopToken stop_;
};

}  // namespace kintsugi::parallel
