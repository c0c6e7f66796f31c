#include "comm/nccl/nccl_communicator.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <fstream>
#include <optional>
#include <string>
#include <thread>

#include "comm/nccl/fixed_order.h"
#include "comm/nccl/nccl_core.h"
#include "comm/nccl/nccl_environment.h"
#include "comm/nccl/solo_communicator.h"
#include "runtime/base/log.h"

namespace kintsugi::comm {
namespace {

constexpr auto kFinishPatience = std::chrono::seconds(5);
constexpr auto kWarmUpPatience = std::chrono::seconds(60);

// What every rank tells the others first.
struct Introduction {
  ncclUniqueId id;  // rank 0's
  int32_t has_id = 0;
  uint64_t host = 0;
  IpcHandle heap;
};

// The same for all processes of a host, containers included, until it boots again.
uint64_t host_hash() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string text;
  file >> text;
  return std::hash<std::string>()(text);
}

// One call, for comparison with the peers'.
struct CallRecord {
  char what[24] = {};
  int64_t size = 0;
  int64_t number = 0;
  int32_t root = -1;
  int32_t num_leaves = 0;
  std::string to_string() const {
    std::string text = std::string(what) + " of " + std::to_string(size);
    if (root >= 0) text += ", root " + std::to_string(root);
    if (num_leaves > 0) text += ", " + std::to_string(num_leaves) + " leaves";
    return text + " (call " + std::to_string(number) + ")";
  }
};

class NcclWork final : public Work {
 public:
  NcclWork(std::shared_ptr<NcclCore> core, EventPool::Event done, cudaStream_t caller)
      : core_(std::move(core)), done_(std::move(done)), caller_(caller) {}
  Result<bool> poll() override {
    if (complete_) return true;
    KTG_ASSIGN_OR_RETURN(complete_, core_->reached(done_.get()));
    if (!complete_) KTG_RETURN_IF_ERROR(core_->handle->check());
    return complete_;
  }
  Status wait(Deadline) override {
    if (complete_) return ok_status();
    if (core_->handle->failed()) return core_->handle->status();
    if (core_->handle->stop_requested()) {
      return core_->handle->fail(aborted("generation " + std::to_string(core_->handle->generation()) + " is over"));
    }
    return cuda_status(cudaStreamWaitEvent(caller_, done_.get(), 0), "cudaStreamWaitEvent");
  }

 private:
  std::shared_ptr<NcclCore> core_;
  EventPool::Event done_;
  cudaStream_t caller_;
  bool complete_ = false;
};

class NcclCommunicator final : public Communicator {
 public:
  explicit NcclCommunicator(std::shared_ptr<NcclCore> core) : core_(std::move(core)) {}
  ~NcclCommunicator() override {
    core_->ended = true;
    core_->handle->finish(Deadline::after(kFinishPatience));
    // NCCL may still be launching on the stream that goes with this.
    (void)drain(Deadline::after(kFinishPatience)).ok();
    core_->handle->drop_before_abort();
  }

  const Membership& membership() const override { return core_->handle->membership(); }
  Result<WorkPtr> all_reduce(float* x, int64_t count, Stream& stream) override;
  Result<WorkPtr> all_reduce_fixed(float* out, std::span<float* const> parts, int64_t num_leaves, int64_t count,
                                   Stream& stream) override;
  Result<WorkPtr> reduce_scatter(float* out, const float* in, int64_t count, Stream& stream) override;
  Result<WorkPtr> all_gather(void* out, const void* in, int64_t size_bytes, Stream& stream) override;
  Result<WorkPtr> all_to_all(void* out, const void* in, int64_t size_bytes, Stream& stream) override;
  Result<WorkPtr> broadcast(void* x, int64_t size_bytes, int root, Stream& stream) override;
  Result<WorkPtr> fetch(void* x, int64_t size_bytes, int source, bool receive, Stream& stream) override;
  Status barrier(Deadline deadline) override;
  void abort(Status why) override;
  Status drain(Deadline deadline) override;
  Status status() const override { return core_->handle->status(); }

 private:
  using Calls = std::function<ncclResult_t(ncclComm_t, cudaStream_t)>;
  // Checks, and compares with the peers where that is asked for.
  Status begin(const CallRecord& call, std::initializer_list<const void*> memory, Stream& stream);
  Status join(Stream& stream);
  // Waits while config.max_queued collectives have not ended.
  Status make_room();
  Result<WorkPtr> end(Stream& stream);
  Result<WorkPtr> launch(const CallRecord& call, std::initializer_list<const void*> memory, Stream& stream,
                         const Calls& calls);
  Status compare(CallRecord call);
  Status sum_chunk(const FixedOrderPlan& plan, float* out, std::span<float* const> parts, int64_t begin, int64_t count,
                   int64_t slot_size);

  std::shared_ptr<NcclCore> core_;
  EventPool::Event joined_, last_;
  // Each collective, or piece of one, that may not have ended: what it works on is there, and its own end.
  struct Queued {
    EventPool::Event ready, done;
  };
  std::deque<Queued> queued_;
  int64_t num_calls_ = 0;
};

CallRecord record(const char* what, int64_t size, int root = -1, int64_t num_leaves = 0) {
  CallRecord call{.size = size, .root = root, .num_leaves = static_cast<int32_t>(num_leaves)};
  std::strncpy(call.what, what, sizeof(call.what) - 1);
  return call;
}

Status NcclCommunicator::begin(const CallRecord& call, std::initializer_list<const void*> memory, Stream& stream) {
  if (core_->handle->failed()) return status();
  if (call.size < 0) return invalid_argument(std::string(call.what) + " of " + std::to_string(call.size));
  if (call.root >= world_size()) {
    return invalid_argument(std::string(call.what) + ": there is no rank " + std::to_string(call.root));
  }
  if (call.size > 0) {
    for (const void* p : memory) KTG_RETURN_IF_ERROR(core_->check_device_memory(p, call.what));
  }
  ++num_calls_;
  if (core_->config.check_calls) KTG_RETURN_IF_ERROR(compare(call));
  KTG_RETURN_IF_ERROR(make_room());
  return join(stream);
}

Status NcclCommunicator::make_room() {
  const auto limit = static_cast<size_t>(core_->config.max_queued);
  while (limit > 0 && queued_.size() >= limit) {
    const Queued& first = queued_.front();
    const auto passed = [&](const EventPool::Event& event) -> Result<bool> {
      KTG_ASSIGN_OR_RETURN(const bool there, core_->reached(event.get()));
      if (!there) KTG_RETURN_IF_ERROR(core_->handle->check());
      return there;
    };
    // The computation before a collective takes what it takes; from there on peers that stay away are late.
    constexpr const char* kWhat = "an earlier collective";
    KTG_RETURN_IF_ERROR(core_->host_wait(kWhat, std::nullopt, [&] { return passed(first.ready); }));
    KTG_RETURN_IF_ERROR(core_->host_wait(kWhat, core_->call_deadline(), [&] { return passed(first.done); }));
    queued_.pop_front();
  }
  return ok_status();
}

// What the communicator's stream does from here on starts behind what `stream` holds.
Status NcclCommunicator::join(Stream& stream) {
  KTG_ASSIGN_OR_RETURN(joined_, core_->events->take());
  KTG_RETURN_IF_ERROR(cuda_status(cudaEventRecord(joined_.get(), native(stream)), "cudaEventRecord"));
  return cuda_status(cudaStreamWaitEvent(core_->queue(), joined_.get(), 0), "cudaStreamWaitEvent");
}

Result<WorkPtr> NcclCommunicator::end(Stream& stream) {
  KTG_ASSIGN_OR_RETURN(EventPool::Event done, core_->events->take());
  KTG_RETURN_IF_ERROR(cuda_status(cudaEventRecord(done.get(), core_->queue()), "cudaEventRecord"));
  last_ = done;
  if (core_->config.max_queued > 0) queued_.push_back({joined_, done});
  return WorkPtr(new NcclWork(core_, std::move(done), native(stream)));
}

Result<WorkPtr> NcclCommunicator::launch(const CallRecord& call, std::initializer_list<const void*> memory,
                                         Stream& stream, const Calls& calls) {
  KTG_RETURN_IF_ERROR(begin(call, memory, stream));
  if (call.size > 0) {
    const auto enqueue = [&](ncclComm_t comm) { return calls(comm, core_->queue()); };
    KTG_RETURN_IF_ERROR(core_->handle->call(call.what, enqueue, core_->call_deadline()));
  }
  return end(stream);
}

Status NcclCommunicator::compare(CallRecord call) {
  call.number = num_calls_;
  std::vector<CallRecord> all(world_size());
  KTG_ASSIGN_OR_RETURN(const WorkPtr gathered,
                       core_->setup.control->all_gather(all.data(), &call, sizeof(call), core_->host_stream));
  if (const Status waited = gathered->wait(core_->call_deadline()); !waited.ok()) return core_->handle->fail(waited);
  for (int r = 0; r < world_size(); ++r) {
    if (std::memcmp(&all[r], &call, sizeof(call)) == 0) continue;
    return core_->handle->fail(internal_error("rank " + std::to_string(rank()) + " calls " + call.to_string() +
                                              ", rank " + std::to_string(r) + " calls " + all[r].to_string()));
  }
  return ok_status();
}

Result<WorkPtr> NcclCommunicator::all_reduce(float* x, int64_t count, Stream& stream) {
  return launch(record("all_reduce", count), {x}, stream, [&](ncclComm_t comm, cudaStream_t queue) {
    return ncclAllReduce(x, x, static_cast<size_t>(count), ncclFloat, ncclSum, comm, queue);
  });
}

Result<WorkPtr> NcclCommunicator::reduce_scatter(float* out, const float* in, int64_t count, Stream& stream) {
  return launch(record("reduce_scatter", count), {out, in}, stream, [&](ncclComm_t comm, cudaStream_t queue) {
    return ncclReduceScatter(in, out, static_cast<size_t>(count), ncclFloat, ncclSum, comm, queue);
  });
}

Result<WorkPtr> NcclCommunicator::all_gather(void* out, const void* in, int64_t size_bytes, Stream& stream) {
  return launch(record("all_gather", size_bytes), {out, in}, stream, [&](ncclComm_t comm, cudaStream_t queue) {
    return ncclAllGather(in, out, static_cast<size_t>(size_bytes), ncclUint8, comm, queue);
  });
}

Result<WorkPtr> NcclCommunicator::all_to_all(void* out, const void* in, int64_t size_bytes, Stream& stream) {
  KTG_RETURN_IF_ERROR(begin(record("all_to_all", size_bytes), {out, in}, stream));
  const auto exchange = [&](ncclComm_t comm) {
    ncclResult_t result = ncclSuccess;
    const auto keep = [&result](ncclResult_t r) {
      if (result == ncclSuccess) result = r;
    };
    const auto bytes = static_cast<size_t>(size_bytes);
    for (int peer = 0; peer < world_size(); ++peer) {
      keep(ncclSend(static_cast<const uint8_t*>(in) + peer * size_bytes, bytes, ncclUint8, peer, comm, core_->queue()));
      keep(ncclRecv(static_cast<uint8_t*>(out) + peer * size_bytes, bytes, ncclUint8, peer, comm, core_->queue()));
    }
    return result;
  };
  if (size_bytes > 0) {
    KTG_RETURN_IF_ERROR(core_->handle->call_group("all_to_all", exchange, core_->call_deadline()));
  }
  return end(stream);
}

Result<WorkPtr> NcclCommunicator::broadcast(void* x, int64_t size_bytes, int root, Stream& stream) {
  if (root < 0) return invalid_argument("broadcast: there is no rank " + std::to_string(root));
  return launch(record("broadcast", size_bytes, root), {x}, stream, [&](ncclComm_t comm, cudaStream_t queue) {
    return ncclBroadcast(x, x, static_cast<size_t>(size_bytes), ncclUint8, root, comm, queue);
  });
}

Result<WorkPtr> NcclCommunicator::fetch(void* x, int64_t size_bytes, int source, bool receive, Stream& stream) {
  if (source < 0) return invalid_argument("fetch: there is no rank " + std::to_string(source));
  if (size_bytes > 0) KTG_RETURN_IF_ERROR(core_->check_device_memory(x, "fetch", /*pinned=*/true));
  KTG_RETURN_IF_ERROR(begin(record("fetch", size_bytes, source), {}, stream));
  return start_fetch(core_, x, size_bytes, source, receive, stream);
}

Result<WorkPtr> NcclCommunicator::all_reduce_fixed(float* out, std::span<float* const> parts, int64_t num_leaves,
                                                   int64_t count, Stream& stream) {
  if (num_leaves < world_size() || num_leaves > 64) {
    return invalid_argument("all_reduce_fixed: " + std::to_string(num_leaves) + " leaves for " +
                            std::to_string(world_size()) + " ranks: must be between the ranks and 64");
  }
  const FixedOrderPlan plan = plan_fixed_order(num_leaves, world_size());
  const int num_own = plan.first_part[rank() + 1] - plan.first_part[rank()];
  if (static_cast<int>(parts.size()) != num_own) {
    return invalid_argument("all_reduce_fixed: rank " + std::to_string(rank()) + " of " + std::to_string(world_size()) +
                            " brings " + std::to_string(num_own) + " parts of " + std::to_string(num_leaves) +
                            " leaves, got " + std::to_string(parts.size()));
  }
  if (core_->setup.fixed_order_staging == nullptr) {
    return failed_precondition("all_reduce_fixed: this communicator was made without memory to stage it in");
  }
  KTG_RETURN_IF_ERROR(begin(record("all_reduce_fixed", count, -1, num_leaves), {out}, stream));
  for (const float* part : parts) {
    if (count > 0) KTG_RETURN_IF_ERROR(core_->check_device_memory(part, "all_reduce_fixed"));
  }
  // A rank stages what others send and the sums on the way to the root; the root goes to `out`. Sized alike on all
  // ranks (the one with the fewest parts of its own stages the most), because the chunks must be the same.
  const int64_t slot_size = kFixedOrderStagingBytes / static_cast<int64_t>(sizeof(float)) / plan.num_operands / 64 * 64;
  const int64_t chunk = slot_size * world_size();
  for (int64_t at = 0; at < count; at += chunk) {
    KTG_RETURN_IF_ERROR(sum_chunk(plan, out, parts, at, std::min(chunk, count - at), slot_size));
    if (at + chunk < count) {
      KTG_RETURN_IF_ERROR(end(stream).status());
      KTG_RETURN_IF_ERROR(make_room());
    }
  }
  return end(stream);
}

Status NcclCommunicator::sum_chunk(const FixedOrderPlan& plan, float* out, std::span<float* const> parts, int64_t begin,
                                   int64_t count, int64_t slot_size) {
  const int me = rank(), n = world_size();
  const int own = plan.first_part[me];
  const Slice mine = slice_of(count, me, n);
  const cudaStream_t queue = core_->queue();
  auto* const staging = static_cast<float*>(core_->setup.fixed_order_staging);
  std::vector<float*> operands(plan.num_operands);
  for (int p = 0; p < plan.num_operands; ++p) operands[p] = staging + p * slot_size;
  for (size_t j = 0; j < parts.size(); ++j) operands[own + j] = parts[j] + begin + mine.begin;
  operands[plan.sums.back().result] = out + begin + mine.begin;

  const auto exchange = [&](ncclComm_t comm) {
    ncclResult_t result = ncclSuccess;
    const auto keep = [&result](ncclResult_t r) {
      if (result == ncclSuccess) result = r;
    };
    for (int peer = 0; peer < n; ++peer) {
      if (peer == me) continue;
      const Slice theirs = slice_of(count, peer, n);
      for (float* part : parts) {
        if (theirs.count == 0) break;
        keep(ncclSend(part + begin + theirs.begin, static_cast<size_t>(theirs.count), ncclFloat, peer, comm, queue));
      }
      for (int p = plan.first_part[peer]; p < plan.first_part[peer + 1] && mine.count > 0; ++p) {
        keep(ncclRecv(operands[p], static_cast<size_t>(mine.count), ncclFloat, peer, comm, queue));
      }
    }
    return result;
  };
  KTG_RETURN_IF_ERROR(core_->handle->call_group("all_reduce_fixed", exchange, core_->call_deadline()));

  for (const TreeSum& sum : plan.sums) {
    if (mine.count == 0) break;
    std::vector<const float*> from;
    for (const int operand : sum.operands) from.push_back(operands[operand]);
    const kernels::KernelError error = core_->setup.backend->kernels().reduce->tree_sum(
        operands[sum.result], from.data(), static_cast<int64_t>(from.size()), mine.count, queue);
    if (error != kernels::kKernelOk) {
      return core_->handle->fail(device_lost("all_reduce_fixed: kernel error " + std::to_string(error)));
    }
  }

  const auto spread = [&](ncclComm_t comm) {
    ncclResult_t result = ncclSuccess;
    const auto keep = [&result](ncclResult_t r) {
      if (result == ncclSuccess) result = r;
    };
    for (int peer = 0; peer < n; ++peer) {
      if (peer == me) continue;
      const Slice theirs = slice_of(count, peer, n);
      float* root = out + begin;
      if (mine.count > 0) {
        keep(ncclSend(root + mine.begin, static_cast<size_t>(mine.count), ncclFloat, peer, comm, queue));
      }
      if (theirs.count > 0) {
        keep(ncclRecv(root + theirs.begin, static_cast<size_t>(theirs.count), ncclFloat, peer, comm, queue));
      }
    }
    return result;
  };
  return core_->handle->call_group("all_reduce_fixed", spread, core_->call_deadline());
}

Status NcclCommunicator::barrier(Deadline deadline) {
  KTG_RETURN_IF_ERROR(core_->handle->wait_ready(deadline));
  if (last_ != nullptr) {
    const auto done = [&]() -> Result<bool> {
      KTG_ASSIGN_OR_RETURN(const bool there, core_->reached(last_.get()));
      if (!there) KTG_RETURN_IF_ERROR(core_->handle->check());
      return there;
    };
    KTG_RETURN_IF_ERROR(core_->host_wait("barrier", core_->bounded(deadline), done));
  }
  const Status met = core_->setup.control->barrier(deadline);
  return met.ok() ? met : core_->handle->fail(met);
}

void NcclCommunicator::abort(Status why) {
  if (why.code() != StatusCode::kAborted) why = aborted(why.to_string());
  (void)core_->handle->fail(why).ok();
  core_->setup.control->abort(std::move(why));
}

Status NcclCommunicator::drain(Deadline deadline) {
  if (core_->handle->failed()) KTG_RETURN_IF_ERROR(core_->handle->wait_halted(deadline));
  return core_->stream->synchronize(deadline);
}

}  // namespace

Status NcclCore::host_wait(const char* what, std::optional<Deadline> limit, const std::function<Result<bool>()>& done) {
  constexpr int kEager = 500;
  for (int polls = 0;; ++polls) {
    if (handle->failed()) return handle->status();
    const Result<bool> there = done();
    if (!there.ok()) return handle->failed() ? handle->status() : handle->fail(there.status());
    if (*there) return ok_status();
    if (handle->stop_requested()) {
      return handle->fail(aborted("generation " + std::to_string(handle->generation()) + " is over"));
    }
    if (limit && limit->passed()) {
      return handle->fail(deadline_exceeded("rank " + std::to_string(rank()) + " generation " +
                                            std::to_string(handle->generation()) + ": " + what + " waited too long"));
    }
    if (polls > kEager) {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    } else {
      std::this_thread::yield();
    }
  }
}

Result<bool> NcclCore::reached(cudaEvent_t event) {
  const cudaError_t state = cudaEventQuery(event);
  // In this order: an abort is known before it ends a kernel.
  if (handle->failed()) return handle->status();
  if (state == cudaSuccess) return true;
  if (state == cudaErrorNotReady) {
    (void)cudaGetLastError();
    return false;
  }
  return handle->fail(cuda_status(state, "cudaEventQuery"));
}

Status NcclCore::check_device_memory(const void* p, const char* what, bool pinned) const {
  cudaPointerAttributes attributes{};
  const cudaError_t error = cudaPointerGetAttributes(&attributes, p);
  if (error != cudaSuccess) (void)cudaGetLastError();
  const bool device =
      error == cudaSuccess && (attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged);
  const bool mapped =
      error == cudaSuccess && attributes.type == cudaMemoryTypeHost && attributes.devicePointer != nullptr;
  if (device || (pinned && mapped)) return ok_status();
  return invalid_argument(std::string(what) +
                          ": the memory is the host's, and NCCL's communicator serves the device's alone (the control "
                          "communicator is for the host's)");
}

Result<std::unique_ptr<Communicator>> create_nccl_communicator(const NcclSetup& setup, const CommConfig& config,
                                                               StopToken stop, Deadline deadline) {
  KTG_RETURN_IF_ERROR(config.validate());
  const Membership membership = setup.control->membership();
  if (membership.world_size == 1) return create_solo_communicator(membership, *setup.backend, stop);
  KTG_RETURN_IF_ERROR(check_nccl_config(config));

  Introduction own{.id = {}, .host = host_hash(), .heap = setup.heap != nullptr ? setup.heap->handle() : IpcHandle{}};
  Status id_status;
  if (membership.rank == 0) {
    const Result<ncclUniqueId> id = NcclHandle::create_id();
    id_status = id.status();
    if (id.ok()) {
      own.id = *id;
      own.has_id = 1;
    }
  }
  HostStream host_stream;
  std::vector<Introduction> all(membership.world_size);
  KTG_ASSIGN_OR_RETURN(const WorkPtr introduced, setup.control->all_gather(all.data(), &own, sizeof(own), host_stream));
  KTG_RETURN_IF_ERROR(introduced->wait(deadline));
  if (all[0].has_id == 0) return id_status.ok() ? unavailable("rank 0 cannot make an NCCL id") : id_status;

  KTG_ASSIGN_OR_RETURN(std::unique_ptr<Stream> stream, setup.backend->create_stream(runtime::StreamPriority::kHigh));
  auto core = std::make_shared<NcclCore>(setup, config, std::move(stream));
  for (const Introduction& peer : all) {
    core->peers.push_back({.heap = peer.heap, .same_host = peer.host == own.host, .tried = false, .memory = {}});
  }
  KTG_ASSIGN_OR_RETURN(core->handle,
                       NcclHandle::begin(all[0].id, membership, config.max_ctas, stop, setup.before_abort));
  return std::unique_ptr<Communicator>(new NcclCommunicator(std::move(core)));
}

Status warm_up_nccl() {
  KTG_ASSIGN_OR_RETURN(const ncclUniqueId id, NcclHandle::create_id());
  KTG_ASSIGN_OR_RETURN(
      const std::shared_ptr<NcclHandle> handle,
      NcclHandle::begin(id, {.generation = -1, .rank = 0, .world_size = 1}, /*max_ctas=*/0, StopToken(), nullptr));
  KTG_RETURN_IF_ERROR(handle->wait_ready(Deadline::after(kWarmUpPatience)));
  handle->finish(Deadline::after(kFinishPatience));
  return handle->status();
}

std::string nccl_description() {
  int version = 0;
  if (ncclGetVersion(&version) != ncclSuccess) return "NCCL";
  return "NCCL " + std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

}  // namespace kintsugi::comm
