// fetch: a rank's memory copied to those who ask for it, by the host's leave.
//
//   1. in the call     the source's stream has come to it; every rank says whether it receives, where its x lies, and
//                      whether it can reach the source's memory
//   2. in the Work     receivers copy out of the source's memory; NCCL sends to those who cannot
//   3.                 every rank says that it is through: then the source may write x again
#include <string>
#include <vector>

#include "comm/nccl/nccl_core.h"
#include "runtime/base/log.h"

namespace kintsugi::comm {
namespace {

struct Request {
  int64_t size_bytes = 0;
  int64_t offset = -1;  // in the device heap; -1: not there
  int32_t receives = 0;
  int32_t reaches_source = 0;
};

class FetchWork final : public Work {
 public:
  FetchWork(std::shared_ptr<NcclCore> core, uint8_t* x, int64_t size_bytes, int source)
      : core_(std::move(core)),
        x_(x),
        size_bytes_(size_bytes),
        source_(source),
        answers_(std::make_shared<Answers>(core_->world_size())),
        requests_(answers_->requests) {
    core_->kept.push_back(answers_);
  }

  Status ask(bool receive) {
    const DeviceHeap* heap = core_->setup.heap;
    Request& own = answers_->own;
    own = {.size_bytes = size_bytes_, .receives = receive ? 1 : 0};
    if (heap != nullptr && heap->contains(x_, size_bytes_)) own.offset = heap->offset_of(x_);
    if (receive && source_ != core_->rank() && own.offset >= 0) own.reaches_source = open_source() ? 1 : 0;
    KTG_ASSIGN_OR_RETURN(control_work_,
                         core_->setup.control->all_gather(requests_.data(), &own, sizeof(own), core_->host_stream));
    return ok_status();
  }

  Result<bool> poll() override {
    if (stage_ == Stage::kComplete) return true;
    if (core_->ended) return aborted("the communicator ended before this fetch was complete");
    KTG_RETURN_IF_ERROR(core_->handle->status());
    const Status moved = advance();
    if (!moved.ok()) return core_->handle->fail(moved);
    if (stage_ != Stage::kComplete) KTG_RETURN_IF_ERROR(core_->handle->check());
    return stage_ == Stage::kComplete;
  }

  Status wait(Deadline deadline) override {
    if (stage_ == Stage::kComplete) return ok_status();
    if (core_->ended) return aborted("the communicator ended before this fetch was complete");
    return core_->host_wait("fetch", core_->bounded(deadline), [this] { return poll(); });
  }

 private:
  // What calls on the control communicator read and write, until they are complete.
  struct Answers {
    explicit Answers(int world_size) : requests(world_size), through(world_size) {}
    Request own;
    uint8_t here = 1;
    std::vector<Request> requests;
    std::vector<uint8_t> through;
  };
  enum class Stage { kAsking, kCopying, kLeaving, kComplete };

  // Once a generation and peer.
  bool open_source() {
    NcclPeer& peer = core_->peers[source_];
    if (!peer.tried) {
      peer.tried = true;
      if (peer.same_host && peer.heap.valid != 0) {
        Result<ImportedMemory> opened = ImportedMemory::open(peer.heap);
        if (opened.ok()) {
          peer.memory = std::move(*opened);
        } else {
          log().warn("memory of rank {}: {}; its state comes through NCCL", source_, opened.status().message());
        }
      }
    }
    return peer.memory.data() != nullptr;
  }

  bool reads_in_place(int r) const {
    return requests_[r].reaches_source != 0 && requests_[r].offset == requests_[source_].offset;
  }

  Status advance() {
    if (stage_ == Stage::kAsking) {
      KTG_ASSIGN_OR_RETURN(const bool asked, control_work_->poll());
      if (!asked) return ok_status();
      KTG_RETURN_IF_ERROR(copy());
      stage_ = Stage::kCopying;
    }
    if (stage_ == Stage::kCopying) {
      if (copied_ != nullptr) {
        KTG_ASSIGN_OR_RETURN(const bool copied, core_->reached(copied_.get()));
        if (!copied) return ok_status();
      }
      KTG_ASSIGN_OR_RETURN(control_work_, core_->setup.control->all_gather(answers_->through.data(), &answers_->here, 1,
                                                                           core_->host_stream));
      stage_ = Stage::kLeaving;
    }
    KTG_ASSIGN_OR_RETURN(const bool all_through, control_work_->poll());
    if (all_through) stage_ = Stage::kComplete;
    return ok_status();
  }

  Status copy() {
    std::vector<int> sent_to;
    for (int r = 0; r < core_->world_size(); ++r) {
      if (requests_[r].size_bytes != size_bytes_) {
        return internal_error("fetch: rank " + std::to_string(core_->rank()) + " wants " + std::to_string(size_bytes_) +
                              " bytes, rank " + std::to_string(r) + " " + std::to_string(requests_[r].size_bytes));
      }
      if (r != source_ && requests_[r].receives != 0 && !reads_in_place(r)) sent_to.push_back(r);
    }
    const int me = core_->rank();
    if (size_bytes_ == 0) return ok_status();
    const cudaStream_t queue = core_->queue();
    if (me == source_) {
      if (sent_to.empty()) return ok_status();
      const auto send = [&](ncclComm_t comm) {
        for (const int r : sent_to) {
          const ncclResult_t sent = ncclSend(x_, static_cast<size_t>(size_bytes_), ncclUint8, r, comm, queue);
          if (sent != ncclSuccess) return sent;
        }
        return ncclSuccess;
      };
      KTG_RETURN_IF_ERROR(core_->handle->call_group("fetch", send, core_->call_deadline()));
    } else if (requests_[me].receives == 0) {
      return ok_status();
    } else if (reads_in_place(me)) {
      const uint8_t* from = core_->peers[source_].memory.data() + requests_[source_].offset;
      KTG_RETURN_IF_ERROR(
          cuda_status(cudaMemcpyAsync(x_, from, static_cast<size_t>(size_bytes_), cudaMemcpyDeviceToDevice, queue),
                      "copying a peer's state"));
    } else {
      const auto receive = [&](ncclComm_t comm) {
        return ncclRecv(x_, static_cast<size_t>(size_bytes_), ncclUint8, source_, comm, queue);
      };
      KTG_RETURN_IF_ERROR(core_->handle->call_group("fetch", receive, core_->call_deadline()));
    }
    KTG_ASSIGN_OR_RETURN(copied_, core_->events->take());
    return cuda_status(cudaEventRecord(copied_.get(), queue), "cudaEventRecord");
  }

  std::shared_ptr<NcclCore> core_;
  uint8_t* x_;
  int64_t size_bytes_;
  int source_;
  Stage stage_ = Stage::kAsking;
  WorkPtr control_work_;
  const std::shared_ptr<Answers> answers_;
  std::vector<Request>& requests_;
  EventPool::Event copied_;
};

}  // namespace

Result<WorkPtr> start_fetch(const std::shared_ptr<NcclCore>& core, void* x, int64_t size_bytes, int source,
                            bool receive, Stream& stream) {
  KTG_ASSIGN_OR_RETURN(const EventPool::Event before, core->events->take());
  KTG_RETURN_IF_ERROR(cuda_status(cudaEventRecord(before.get(), native(stream)), "cudaEventRecord"));
  KTG_RETURN_IF_ERROR(core->host_wait("fetch", core->call_deadline(), [&] { return core->reached(before.get()); }));
  auto work = std::make_unique<FetchWork>(core, static_cast<uint8_t*>(x), size_bytes, source);
  KTG_RETURN_IF_ERROR(work->ask(receive));
  return WorkPtr(std::move(work));
}

}  // namespace kintsugi::comm
