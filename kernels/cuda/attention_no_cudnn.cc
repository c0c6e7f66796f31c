// Builds without cuDNN or its frontend's headers.
#include "kernels/cuda/attention_cudnn.h"
#include "kernels/cuda/device_error.h"
#include "kernels/cuda/gemm_tuning.h"

namespace kintsugi::kernels::cuda {

void begin_cudnn_attention(const AttentionShape&, AttentionPass, bool) {}
bool wait_for_cudnn_attention(std::chrono::milliseconds) { return true; }
KernelError cudnn_attention_prepare(const AttentionShape&, AttentionPass) { return kNotSupported; }
std::string cudnn_attention_why_not(const AttentionShape&, AttentionPass) { return "built without cuDNN"; }
int64_t cudnn_attention_scratch_bytes(const AttentionShape&, AttentionPass) { return -1; }
std::vector<CudnnPlanTime> time_cudnn_attention_plans(const AttentionShape&, AttentionPass, std::vector<void*>, void*,
                                                      int64_t, StreamHandle) {
  return {};
}
AttentionTable attention_table_here() { return {gemm_environment().gpu, 0, {}}; }
KernelError tune_attention(AttentionTable*, const AttentionShape&, void*, int64_t, StreamHandle) { return kKernelOk; }
bool use_attention_table(const AttentionTable& table, std::string* why) {
  if (!table.entries.empty()) *why = "this program was built without cuDNN";
  return table.entries.empty();
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
int64_t cudnn_document_mask_bytes(const AttentionShape&) { return 0; }
const char* cudnn_version() { return ""; }

}  // namespace kintsugi::kernels::cuda
