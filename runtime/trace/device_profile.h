// What the device's records say about a step: time by kernel family and how far each is from what the device can do at
// most, launches, idle time, and how much of NCCL's time the computation hides. Pure.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/model/model_config.h"
#include "runtime/trace/cupti_trace.h"
#include "runtime/trace/device_activity.h"
#include "runtime/trace/timeline.h"

namespace kintsugi::trace {

enum class KernelFamily {
  kGemm,
  kAttention,
  kNorm,
  kRope,
  kActivation,
  kCrossEntropy,
  kEmbedding,
  kOptimizer,  // the gradient's norm, clipping, the update
  kNccl,
  kCopy,  // copies, fills, conversions
  kOther,
};
inline constexpr size_t kNumFamilies = 11;
const char* to_string(KernelFamily family);
// By the words in a kernel's name, mangled or not: ours, cuBLASLt's, cuDNN's and NCCL's.
KernelFamily family_of(std::string_view kernel_name);
// "rms_norm_forward_kernel<bf16>" of a mangled name: no namespaces, no parameters, at most 80 characters.
std::string short_name(std::string_view kernel_name);

// What must be done at least; what is zero has no bound.
struct Work {
  double flops = 0;
  double bytes = 0;
};
// One call of a kernel whose name (demangled, in small letters) holds `word`.
struct CallWork {
  std::string_view word;  // of static life
  Work work;
};
struct StepWork {
  std::array<Work, kNumFamilies> families;
  std::vector<CallWork> calls;
  Work& of(KernelFamily family) { return families[static_cast<size_t>(family)]; }
  const Work& of(KernelFamily family) const { return families[static_cast<size_t>(family)]; }
};

struct StepShape {
  int64_t tokens = 0;  // of this rank and step
  int64_t seq_len = 0;
  int64_t tokens_per_call = 0;     // of one forward and backward; 0: all
  int64_t element_bytes = 2;       // of activations and matrix operands
  int64_t moment_bytes = 4;        // of an element of each
  int64_t updated_parameters = 0;  // that this rank updates
  int64_t marked_parameters = 0;   // of them, in a table of which only rows with a token have a gradient
  bool documents = false;          // attention ends at their borders: its work is the data's affair
};
// Of forward, backward, norm and update as design and kernels have them: matrix products 6 FLOPs a weight and token;
// causal attention counts half of the T x T square, 2 products forward and 5 backward; of everything else each input is
// read once and each output written once. Work done twice (recomputed activations) does not count twice, and which rows
// of the token table are read, or added to, is the data's affair. A call's work is known where a kernel's name says
// what it computes: our kernels', and cuDNN's of attention. Of the library's products it is not: one name serves
// several.
StepWork step_work(const runtime::ModelConfig& config, const StepShape& shape);

struct FamilyProfile {
  double ms = 0;        // a step, summed over its kernels
  double kernels = 0;   // a step
  double bound_ms = 0;  // its work at the device's peaks; 0: not known. RoPE and activations count by their kernels'
                        // calls where all have a bound: often they are part of a product, and no work of their own
};

struct KernelTotal {
  std::string name;  // short
  KernelFamily family;
  double ms = 0, calls = 0;  // a step
  double bound_ms = 0;       // of its calls, or its family's where it is the only one; 0: not known
};

struct DeviceProfile {
  int64_t steps = 0;
  double window_ms = 0;   // a step: from the first kernel of the steps to the end of their last
  double busy_ms = 0;     // of it, with at least one kernel or copy running
  double kernels = 0;     // a step, copies and fills included
  double launches = 0;    // calls that started them: a graph launch is one
  double nccl_ms = 0;     // with an NCCL kernel running
  double exposed_ms = 0;  // of it, with nothing else running
  std::array<FamilyProfile, kNumFamilies> families;
  std::vector<KernelTotal> top;  // by time, at most 12
  double idle_percent() const { return window_ms > 0 ? 100 * (1 - busy_ms / window_ms) : 0; }
  double overlap_percent() const { return nccl_ms > 0 ? 100 * (1 - exposed_ms / nccl_ms) : 0; }
};

// `activities`: as DeviceTrace::stop() returns them; those of no step are left out.
DeviceProfile profile(std::span<const DeviceActivity> activities, const StepWork& work, const DevicePeaks& peaks);
// The table that is printed, and the same as one JSON object.
std::string to_string(const DeviceProfile& profile);
std::string to_json(const DeviceProfile& profile);

// One timeline a stream, in order of the stream's number; their spans' names live in it, too.
class DeviceLanes {
 public:
  explicit DeviceLanes(std::span<const DeviceActivity> activities);
  DeviceLanes(DeviceLanes&&) = default;  // a copy's spans would point at the original's names
  const std::vector<Timeline>& lanes() const { return lanes_; }

 private:
  std::vector<std::string> names_;
  std::vector<Timeline> lanes_;
};

}  // namespace kintsugi::trace
