// A device communicator whose collectives come late: each waits, on the device, behind work that takes a while. What
// uses a result without waiting for it, or overwrites what a collective still reads, then computes with wrong numbers.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "comm/communicator.h"
#include "runtime/backend.h"

namespace kintsugi::parallel {

class SlowCommunicator final : public comm::Communicator {
 public:
  using WorkPtr = comm::WorkPtr;
  using Stream = runtime::Stream;
  // `idle` queues the delay on a stream. `backend` outlives it.
  using Idle = std::function<Status(Stream&)>;
  SlowCommunicator(std::unique_ptr<comm::Communicator> inner, runtime::Backend& backend, Idle idle)
      : inner_(std::move(inner)),
        backend_(backend),
        idle_(std::move(idle)),
        side_(std::move(backend.create_stream()).value()) {}

  const comm::Membership& membership() const override { return inner_->membership(); }
  Result<WorkPtr> all_reduce(float* x, int64_t count, Stream& stream) override {
    return late(stream, [&] { return inner_->all_reduce(x, count, *side_); });
  }
  Result<WorkPtr> all_reduce_fixed(float* out, std::span<float* const> parts, int64_t num_leaves, int64_t count,
                                   Stream& stream) override {
    return late(stream, [&] { return inner_->all_reduce_fixed(out, parts, num_leaves, count, *side_); });
  }
  Result<WorkPtr> reduce_scatter(float* out, const float* in, int64_t count, Stream& stream) override {
    return late(stream, [&] { return inner_->reduce_scatter(out, in, count, *side_); });
  }
  Result<WorkPtr> all_gather(void* out, const void* in, int64_t size_bytes, Stream& stream) override {
    return late(stream, [&] { return inner_->all_gather(out, in, size_bytes, *side_); });
  }
  Result<WorkPtr> all_to_all(void* out, const void* in, int64_t size_bytes, Stream& stream) override {
    return late(stream, [&] { return inner_->all_to_all(out, in, size_bytes, *side_); });
  }
  Result<WorkPtr> broadcast(void* x, int64_t size_bytes, int root, Stream& stream) override {
    return late(stream, [&] { return inner_->broadcast(x, size_bytes, root, *side_); });
  }
  Result<WorkPtr> fetch(void* x, int64_t size_bytes, int source, bool receive, Stream& stream) override {
    return inner_->fetch(x, size_bytes, source, receive, stream);
  }
  Status barrier(Deadline deadline) override { return inner_->barrier(deadline); }
  void abort(Status why) override { inner_->abort(std::move(why)); }
  Status status() const override { return inner_->status(); }

 private:
  class SlowWork final : public comm::Work {
   public:
    SlowWork(WorkPtr inner, SlowCommunicator& owner, Stream& caller)
        : inner_(std::move(inner)), owner_(owner), caller_(caller) {}
    Result<bool> poll() override { return inner_->poll(); }
    Status wait(Deadline deadline) override {
      KTG_RETURN_IF_ERROR(inner_->wait(deadline));
      return owner_.chain(*owner_.side_, caller_);
    }

   private:
    WorkPtr inner_;
    SlowCommunicator& owner_;
    Stream& caller_;
  };

  // `second` goes on behind what `first` holds.
  Status chain(Stream& first, Stream& second) {
    KTG_ASSIGN_OR_RETURN(const std::unique_ptr<runtime::Event> event, backend_.create_event());
    KTG_RETURN_IF_ERROR(event->record(first));
    return event->wait_on(second);
  }
  Result<WorkPtr> late(Stream& stream, const std::function<Result<WorkPtr>()>& call) {
    KTG_RETURN_IF_ERROR(chain(stream, *side_));
    KTG_RETURN_IF_ERROR(idle_(*side_));
    KTG_ASSIGN_OR_RETURN(WorkPtr work, call());
    return WorkPtr(new SlowWork(std::move(work), *this, stream));
  }

  std::unique_ptr<comm::Communicator> inner_;
  runtime::Backend& backend_;
  Idle idle_;
  std::unique_ptr<Stream> side_;
};

}  // namespace kintsugi::parallel
