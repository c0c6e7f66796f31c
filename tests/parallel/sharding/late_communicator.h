// A communicator that does as little as it may, as late as it may: a call is handed on only when somebody waits for its
// Work (or for a later one), and poll() never brings anything about. Whoever uses a result before wait(), or overwrites
// what a call still reads, computes with wrong numbers. For the CPU, where wait() does the work.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "comm/communicator.h"

namespace kintsugi::parallel {

class LateCommunicator final : public comm::Communicator {
 public:
  using WorkPtr = comm::WorkPtr;
  using Stream = runtime::Stream;

  explicit LateCommunicator(std::unique_ptr<comm::Communicator> inner) : inner_(std::move(inner)) {}

  const comm::Membership& membership() const override { return inner_->membership(); }
  Result<WorkPtr> all_reduce(float* x, int64_t count, Stream& stream) override {
    return later([=, this, &stream] { return inner_->all_reduce(x, count, stream); });
  }
  Result<WorkPtr> all_reduce_fixed(float* out, std::span<float* const> parts, int64_t num_leaves, int64_t count,
                                   Stream& stream) override {
    return later([=, this, &stream, own = std::vector<float*>(parts.begin(), parts.end())] {
      return inner_->all_reduce_fixed(out, own, num_leaves, count, stream);
    });
  }
  Result<WorkPtr> reduce_scatter(float* out, const float* in, int64_t count, Stream& stream) override {
    return later([=, this, &stream] { return inner_->reduce_scatter(out, in, count, stream); });
  }
  Result<WorkPtr> all_gather(void* out, const void* in, int64_t size_bytes, Stream& stream) override {
    return later([=, this, &stream] { return inner_->all_gather(out, in, size_bytes, stream); });
  }
  Result<WorkPtr> all_to_all(void* out, const void* in, int64_t size_bytes, Stream& stream) override {
    return later([=, this, &stream] { return inner_->all_to_all(out, in, size_bytes, stream); });
  }
  Result<WorkPtr> broadcast(void* x, int64_t size_bytes, int root, Stream& stream) override {
    return later([=, this, &stream] { return inner_->broadcast(x, size_bytes, root, stream); });
  }
  Result<WorkPtr> fetch(void* x, int64_t size_bytes, int source, bool receive, Stream& stream) override {
    return later([=, this, &stream] { return inner_->fetch(x, size_bytes, source, receive, stream); });
  }
  Status barrier(Deadline deadline) override {
    KTG_RETURN_IF_ERROR(hand_on_until(nullptr));
    return inner_->barrier(deadline);
  }
  void abort(Status why) override { inner_->abort(std::move(why)); }
  Status status() const override { return inner_->status(); }

 private:
  struct Call {
    std::function<Result<WorkPtr>()> make;
    WorkPtr work;  // once handed on
  };
  class LateWork final : public comm::Work {
   public:
    LateWork(LateCommunicator& owner, std::shared_ptr<Call> call) : owner_(owner), call_(std::move(call)) {}
    Result<bool> poll() override { return call_->work == nullptr ? Result<bool>(false) : call_->work->poll(); }
    Status wait(Deadline deadline) override {
      if (call_->work == nullptr) KTG_RETURN_IF_ERROR(owner_.hand_on_until(call_.get()));
      return call_->work->wait(deadline);
    }

   private:
    LateCommunicator& owner_;
    std::shared_ptr<Call> call_;
  };

  Result<WorkPtr> later(std::function<Result<WorkPtr>()> make) {
    waiting_.push_back(std::make_shared<Call>(Call{.make = std::move(make), .work = nullptr}));
    return WorkPtr(new LateWork(*this, waiting_.back()));
  }
  // In order; null: all.
  Status hand_on_until(const Call* last) {
    while (!waiting_.empty()) {
      const std::shared_ptr<Call> call = std::move(waiting_.front());
      waiting_.pop_front();
      KTG_ASSIGN_OR_RETURN(call->work, call->make());
      if (call.get() == last) break;
    }
    return ok_status();
  }

  std::unique_ptr<comm::Communicator> inner_;
  std::deque<std::shared_ptr<Call>> waiting_;
};

}  // namespace kintsugi::parallel
