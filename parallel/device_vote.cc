#include "parallel/device_vote.h"

#include <new>

namespace kintsugi::parallel {
namespace {

constexpr int64_t kInputsBytes = 256, kScalarsBytes = 256;
constexpr uintptr_t kPageBytes = 4096;
static_assert(sizeof(kernels::StepInputs) <= kInputsBytes && sizeof(kernels::AdamWScalars) <= kScalarsBytes);

}  // namespace

int64_t DeviceVote::device_bytes(int64_t num_losses) {
  return kInputsBytes + kScalarsBytes + num_losses * static_cast<int64_t>(sizeof(kernels::LossSums));
}

DeviceVote::DeviceMemory DeviceVote::device() const {
  auto* bytes = device_.as<uint8_t>();
  return {.inputs = reinterpret_cast<kernels::StepInputs*>(bytes),
          .scalars = reinterpret_cast<kernels::AdamWScalars*>(bytes + kInputsBytes),
          .losses = reinterpret_cast<kernels::LossSums*>(bytes + kInputsBytes + kScalarsBytes)};
}

Result<std::unique_ptr<DeviceVote>> DeviceVote::create(const Vote& vote, int64_t num_losses, bool add_up,
                                                       runtime::Backend& backend) {
  std::unique_ptr<DeviceVote> result(new DeviceVote(vote, num_losses, add_up, backend));
  KTG_ASSIGN_OR_RETURN(result->host_, backend.allocate_host(sizeof(HostMemory), "the vote's host memory"));
  KTG_ASSIGN_OR_RETURN(result->device_, backend.allocate(device_bytes(num_losses), "the vote's scalars"));
  new (result->host_.data()) HostMemory{};
  return result;
}

Status DeviceVote::open(StopToken stop) {
  if (const auto* word = stop.word(); word != nullptr && word != stop_.word()) {
    // The word lies in a page that the agent shares with this process.
    const auto page = reinterpret_cast<uintptr_t>(word) / kPageBytes * kPageBytes;
    stop_page_ = runtime::Buffer();  // it may be the same page
    KTG_ASSIGN_OR_RETURN(stop_page_, backend_.register_host(reinterpret_cast<void*>(page), kPageBytes));
  }
  stop_ = stop;
  host().publication.step = -1;
  __atomic_store_n(&host().closed, 0, __ATOMIC_SEQ_CST);
  return ok_status();
}

Status DeviceVote::upload(const kernels::StepInputs& inputs, runtime::Stream& stream) {
  kernels::StepInputs& staged = host().inputs[inputs.step % 2];
  staged = inputs;
  staged.generation = stop_.generation();
  return backend_.copy(device().inputs, &staged, sizeof(staged), stream);
}

Status DeviceVote::enter(const kernels::Gradient& gradient, runtime::Stream& stream) {
  KTG_RETURN_IF_ERROR(
      stream.launched(backend_.kernels().vote->fill_record(vote_.record(), device().inputs, device().losses,
                                                           num_losses_, add_up_, vote_.shape(), stream.handle()),
                      "vote.fill_record"));
  return vote_.sum_squares(gradient, backend_, stream);
}

Status DeviceVote::gather(comm::Communicator& communicator, runtime::Stream& stream, Deadline deadline) {
  KTG_ASSIGN_OR_RETURN(const comm::WorkPtr work,
                       communicator.all_gather(vote_.records(), vote_.record(), vote_.shape().record_bytes(), stream));
  return work->wait(deadline);
}

Status DeviceVote::count(runtime::Stream& stream) {
  static_assert(sizeof(std::atomic<int64_t>) == sizeof(int64_t));
  return stream.launched(backend_.kernels().vote->tally(
                             device().scalars, &host().publication, vote_.records(), vote_.shape(), device().inputs,
                             reinterpret_cast<const int64_t*>(stop_.word()), &host().closed, stream.handle()),
                         "vote.tally");
}

Status DeviceVote::upload_scalars(const kernels::AdamWScalars& scalars, runtime::Stream& stream) {
  host().scalars = scalars;
  return backend_.copy(device().scalars, &host().scalars, sizeof(scalars), stream);
}

std::optional<VoteResult> DeviceVote::published(int64_t step) const {
  const kernels::VotePublication& publication = host().publication;
  if (__atomic_load_n(&publication.step, __ATOMIC_ACQUIRE) != step) return std::nullopt;
  return result_of(publication.count, step);
}

}  // namespace kintsugi::parallel
