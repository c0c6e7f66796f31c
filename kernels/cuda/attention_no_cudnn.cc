// Builds without cuDNN or its frontend's headers.
#include "kernels/cuda/attention_cudnn.h"
#include "kernels/cuda/device_error.h"

namespace kintsugi::kernels::cuda {

KernelError cudnn_attention_prepare(const AttentionShape&, AttentionPass) { return kNotSupported; }
std::string cudnn_attention_why_not(const AttentionShape&, AttentionPass) { return "built without cuDNN"; }
int64_t cudnn_attention_scratch_bytes(const AttentionShape&, AttentionPass) { return -1; }
std::vector<CudnnPlanTime> time_cudnn_attention_plans(const AttentionShape&, AttentionPass, std::vector<void*>, void*,
                                                      int64_t, StreamHandle) {
  return {};
}
KernelError cudnn_attention_forward(void*, float*, const void*, const void*, const void*, const AttentionShape&,
                                    StreamHandle) {
  return kNotSupported;
}
KernelError cudnn_attention_backward(void*, void*, void*, const void*, const void*, const float*, const void*,
                                     const void*, const void*, const AttentionShape&, void*, StreamHandle) {
  return kNotSupported;
}
int64_t cudnn_attention_workspace_bound(const AttentionShape&) { return 0; }
const char* cudnn_version() { return ""; }

}  // namespace kintsugi::kernels::cuda
