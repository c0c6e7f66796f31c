#include "parallel/moment_stage.h"

namespace kintsugi::parallel {
namespace {

int64_t moment_bytes(const MomentsOptions& options, int64_t longest) {
  return runtime::arena_bytes(longest * kernels::size_of(options.dtype));
}

}  // namespace

int64_t MomentStage::device_bytes(const MomentsOptions& options, int64_t longest) {
  return 2 * kBuckets * moment_bytes(options, longest);
}

Result<std::unique_ptr<MomentStage>> MomentStage::create(const MomentsOptions& options, int64_t longest,
                                                         runtime::Backend& backend) {
  std::unique_ptr<MomentStage> stage(new MomentStage(backend));
  KTG_ASSIGN_OR_RETURN(stage->memory_, backend.allocate(device_bytes(options, longest), "moments on their way"));
  KTG_ASSIGN_OR_RETURN(stage->in_, backend.create_stream());
  KTG_ASSIGN_OR_RETURN(stage->out_, backend.create_stream());
  KTG_ASSIGN_OR_RETURN(stage->begun_, backend.create_event());
  auto* next = stage->memory_.as<uint8_t>();
  for (Bucket& bucket : stage->buckets_) {
    bucket.m = next;
    bucket.v = next + moment_bytes(options, longest);
    next += 2 * moment_bytes(options, longest);
    for (std::unique_ptr<runtime::Event>* event : {&bucket.brought, &bucket.updated, &bucket.taken}) {
      KTG_ASSIGN_OR_RETURN(*event, backend.create_event());
    }
  }
  return stage;
}

Status MomentStage::begin(runtime::Stream& stream) {
  next_ = 0;
  KTG_RETURN_IF_ERROR(begun_->record(stream));
  KTG_RETURN_IF_ERROR(begun_->wait_on(*in_));
  return begun_->wait_on(*out_);
}

Result<kernels::Moments> MomentStage::bring(const runtime::TrainState& state, int64_t begin, int64_t count,
                                            runtime::Stream& stream) {
  Bucket& b = bucket();
  if (next_ >= kBuckets) KTG_RETURN_IF_ERROR(b.taken->wait_on(*in_));
  KTG_RETURN_IF_ERROR(backend_.copy(b.m, state.at(1, begin), state.bytes_of(1, count), *in_));
  KTG_RETURN_IF_ERROR(backend_.copy(b.v, state.at(2, begin), state.bytes_of(2, count), *in_));
  KTG_RETURN_IF_ERROR(b.brought->record(*in_));
  KTG_RETURN_IF_ERROR(b.brought->wait_on(stream));
  return kernels::Moments{.m = b.m, .v = b.v, .dtype = state.moments_dtype};
}

Status MomentStage::take_back(const runtime::TrainState& state, int64_t begin, int64_t count, runtime::Stream& stream) {
  Bucket& b = bucket();
  KTG_RETURN_IF_ERROR(b.updated->record(stream));
  KTG_RETURN_IF_ERROR(b.updated->wait_on(*out_));
  KTG_RETURN_IF_ERROR(backend_.copy(state.at(1, begin), b.m, state.bytes_of(1, count), *out_));
  KTG_RETURN_IF_ERROR(backend_.copy(state.at(2, begin), b.v, state.bytes_of(2, count), *out_));
  KTG_RETURN_IF_ERROR(b.taken->record(*out_));
  ++next_;
  return ok_status();
}

// What was brought the stream has waited for already; both streams must be joined for a recording to end.
Status MomentStage::end(runtime::Stream& stream) {
  KTG_RETURN_IF_ERROR(begun_->record(*in_));
  KTG_RETURN_IF_ERROR(begun_->wait_on(stream));
  KTG_RETURN_IF_ERROR(begun_->record(*out_));
  return begun_->wait_on(stream);
}

}  // namespace kintsugi::parallel
