#include "comm/nccl/solo_communicator.h"

#include <mutex>
#include <string>

namespace kintsugi::comm {
namespace {

// The result is there once the stream has come to `copied`.
class SoloWork final : public Work {
 public:
  explicit SoloWork(std::unique_ptr<runtime::Event> copied) : copied_(std::move(copied)) {}
  Result<bool> poll() override { return copied_ == nullptr ? Result<bool>(true) : copied_->reached(); }
  Status wait(Deadline) override { return ok_status(); }  // the copy is on the caller's stream already

 private:
  std::unique_ptr<runtime::Event> copied_;
};

class SoloCommunicator final : public Communicator {
 public:
  SoloCommunicator(const Membership& membership, runtime::Backend& backend, StopToken stop)
      : membership_(membership), backend_(backend), stop_(stop) {}

  const Membership& membership() const override { return membership_; }
  Result<WorkPtr> all_reduce(float* x, int64_t count, Stream& stream) override {
    return copy(x, x, count * 4, "all_reduce", stream);
  }
  Result<WorkPtr> all_reduce_fixed(float* out, std::span<float* const> parts, int64_t, int64_t count,
                                   Stream& stream) override {
    if (parts.size() != 1) {
      return invalid_argument("all_reduce_fixed: one rank brings 1 part, got " + std::to_string(parts.size()));
    }
    return copy(out, parts[0], count * 4, "all_reduce_fixed", stream);
  }
  Result<WorkPtr> reduce_scatter(float* out, const float* in, int64_t count, Stream& stream) override {
    return copy(out, in, count * 4, "reduce_scatter", stream);
  }
  Result<WorkPtr> all_gather(void* out, const void* in, int64_t size_bytes, Stream& stream) override {
    return copy(out, in, size_bytes, "all_gather", stream);
  }
  Result<WorkPtr> all_to_all(void* out, const void* in, int64_t size_bytes, Stream& stream) override {
    return copy(out, in, size_bytes, "all_to_all", stream);
  }
  Result<WorkPtr> broadcast(void* x, int64_t size_bytes, int root, Stream& stream) override {
    if (root != 0) return invalid_argument("broadcast: there is no rank " + std::to_string(root));
    return copy(x, x, size_bytes, "broadcast", stream);
  }
  Result<WorkPtr> fetch(void* x, int64_t size_bytes, int source, bool, Stream& stream) override {
    if (source != 0) return invalid_argument("fetch: there is no rank " + std::to_string(source));
    return copy(x, x, size_bytes, "fetch", stream);
  }
  Status barrier(Deadline) override { return status(); }

  void abort(Status why) override {
    const std::lock_guard lock(mutex_);
    if (!status_.ok()) return;
    status_ = why.code() == StatusCode::kAborted ? std::move(why) : aborted(why.to_string());
  }
  Status status() const override {
    const std::lock_guard lock(mutex_);
    if (status_.ok() && stop_.requested()) {
      return aborted("generation " + std::to_string(membership_.generation) + " is over");
    }
    return status_;
  }

 private:
  Result<WorkPtr> copy(void* out, const void* in, int64_t size_bytes, const char* what, Stream& stream) {
    KTG_RETURN_IF_ERROR(status());
    if (size_bytes < 0) {
      return invalid_argument(std::string(what) + " of " + std::to_string(size_bytes) + " bytes: must not be negative");
    }
    if (out == in || size_bytes == 0) return WorkPtr(new SoloWork(nullptr));
    KTG_RETURN_IF_ERROR(backend_.copy(out, in, size_bytes, stream));
    KTG_ASSIGN_OR_RETURN(std::unique_ptr<runtime::Event> copied, backend_.create_event());
    KTG_RETURN_IF_ERROR(copied->record(stream));
    return WorkPtr(new SoloWork(std::move(copied)));
  }

  const Membership membership_;
  runtime::Backend& backend_;
  const StopToken stop_;
  mutable std::mutex mutex_;
  Status status_;
};

}  // namespace

std::unique_ptr<Communicator> create_solo_communicator(const Membership& membership, runtime::Backend& backend,
                                                       StopToken stop) {
  return std::make_unique<SoloCommunicator>(membership, backend, stop);
}

}  // namespace kintsugi::comm
