// Moments that live in pinned host memory pass through a few buckets on the device while an update runs: one bucket is
// brought while another is updated and a third goes back, each on a stream of its own. All that this takes of the
// caller's stream are events, so an update can be recorded into a graph, and the host waits for nothing.
//
//   bring      bucket 0 | bucket 1 | bucket 2 | bucket 3 ...
//   update                bucket 0 | bucket 1 | bucket 2
//   take back                        bucket 0 | bucket 1
//
// The copies between begin() and end() come after what the stream has queued before, and before what it queues then:
// the moments in host memory are whole wherever the stream's own work sees them. On the CPU the same happens at once.
// Not thread safe.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "kernels/optimizer.h"
#include "parallel/state_memory.h"
#include "runtime/backend.h"
#include "runtime/model/train_state.h"

namespace kintsugi::parallel {

class MomentStage {
 public:
  static constexpr int kBuckets = 3;
  // `longest`: elements of the longest piece that is brought; at most options.bucket.
  static Result<std::unique_ptr<MomentStage>> create(const MomentsOptions& options, int64_t longest,
                                                     runtime::Backend& backend);
  static int64_t device_bytes(const MomentsOptions& options, int64_t longest);

  Status begin(runtime::Stream& stream);
  // Elements [begin, begin + count) of the state's moments, on the device once `stream` comes to what is queued next.
  Result<kernels::Moments> bring(const runtime::TrainState& state, int64_t begin, int64_t count,
                                 runtime::Stream& stream);
  // The same elements, updated by what `stream` has queued since bring().
  Status take_back(const runtime::TrainState& state, int64_t begin, int64_t count, runtime::Stream& stream);
  Status end(runtime::Stream& stream);

 private:
  struct Bucket {
    uint8_t *m = nullptr, *v = nullptr;
    std::unique_ptr<runtime::Event> brought, updated, taken;
  };
  explicit MomentStage(runtime::Backend& backend) : backend_(backend) {}
  Bucket& bucket() { return buckets_[static_cast<size_t>(next_ % kBuckets)]; }

  runtime::Backend& backend_;
  runtime::Buffer memory_;
  std::array<Bucket, kBuckets> buckets_;
  std::unique_ptr<runtime::Stream> in_, out_;
  std::unique_ptr<runtime::Event> begun_;
  int64_t next_ = 0;
};

}  // namespace kintsugi::parallel
