#include "kernels/attention.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "kernels/composed_attention.h"
#include "kernels/cuda/attention_cudnn.h"
#include "kernels/cuda/attention_documents.h"
#include "kernels/cuda/attention_hopper.h"
#include "kernels/cuda/attention_plain.h"
#include "kernels/cuda/device_error.h"

namespace kintsugi::kernels::cuda {
namespace {

bool valid(const AttentionShape& s) {
  return s.B >= 0 && s.T >= 0 && s.H >= 1 && s.K >= 1 && s.H % s.K == 0 && s.D >= 1 &&
         s.D <= kPlainAttentionMaxHeadSize && s.q_stride >= 1 && s.k_stride >= 1 && s.v_stride >= 1 && s.o_stride >= 1;
}

// What cuDNN and the kernels for Hopper move lies at multiples of 16 bytes.
bool aligned(std::initializer_list<const void*> pointers) {
  return std::all_of(pointers.begin(), pointers.end(),
                     [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; });
}

KernelError forward(void* o, float* lse, const void* q, const void* k, const void* v, const AttentionShape& shape,
                    DType dtype, StreamHandle stream) {
  if (!valid(shape)) return cudaErrorInvalidValue;
  if (shape.B == 0 || shape.T == 0) return kKernelOk;
  if (hopper_attention_applies(shape, dtype) && aligned({o, q, k, v})) {
    return hopper_attention_forward(o, lse, q, k, v, shape, stream);
  }
  if (cudnn_serves(shape, dtype) && aligned({o, q, k, v})) {
    const KernelError error = cudnn_attention_forward(o, lse, q, k, v, shape, stream);
    if (error != kNotSupported) return error;
  }
  return plain_attention_forward(o, lse, q, k, v, shape, dtype, stream);
}

KernelError turned_gradients(void* dq, void* dk, void* dv, const void* d_o, const void* o, const float* lse,
                             const void* q, const void* k, const void* v, const AttentionShape& shape, void* workspace,
                             DType dtype, StreamHandle stream) {
  if (cudnn_serves(shape, dtype) && aligned({dq, dk, dv, d_o, o, q, k, v, workspace})) {
    const KernelError error = cudnn_attention_backward(dq, dk, dv, d_o, o, lse, q, k, v, shape, workspace, stream);
    if (error != kNotSupported) return error;
  }
  return plain_attention_backward(dq, dk, dv, d_o, o, lse, q, k, v, shape, workspace, dtype, stream);
}

KernelError backward(void* dq, void* dk, void* dv, const void* d_o, const void* o, const float* lse, const void* q,
                     const void* k, const void* v, const AttentionShape& shape, void* workspace, DType dtype,
                     StreamHandle stream) {
  if (!valid(shape)) return cudaErrorInvalidValue;
  if (shape.B == 0 || shape.T == 0) return kKernelOk;
  if (hopper_attention_applies(shape, dtype) && aligned({dq, dk, dv, d_o, o, q, k, v, workspace})) {
    return hopper_attention_backward(dq, dk, dv, d_o, o, lse, q, k, v, shape, workspace, stream);
  }
  const KernelError error = turned_gradients(dq, dk, dv, d_o, o, lse, q, k, v, shape, workspace, dtype, stream);
  return error != kKernelOk ? error : turn_back<rope>(dq, dk, shape, dtype, stream);
}

int64_t backward_workspace_bytes(const AttentionShape& shape, DType dtype) {
  int64_t faster = 0;
  if (hopper_attention_applies(shape, dtype)) {
    faster = hopper_attention_workspace_bytes(shape);
  } else if (cudnn_serves(shape, dtype)) {
    faster = cudnn_attention_workspace_bound(shape);
  }
  return std::max(plain_attention_workspace_bytes(shape), faster);
}

int64_t document_mask_bytes(const AttentionShape& shape, DType dtype) {
  // Of a shape with documents, whether or not there are some already.
  return cudnn_serves(with_documents(shape), dtype) ? cudnn_document_mask_bytes(shape) : 0;
}

KernelError write_document_mask(void* mask, const AttentionShape& shape, DType dtype, StreamHandle stream) {
  if (!valid(shape) || shape.document_starts == nullptr) return cudaErrorInvalidValue;
  if (shape.B == 0 || shape.T == 0 || document_mask_bytes(shape, dtype) == 0) return kKernelOk;
  return fill_document_mask(mask, shape.document_starts, shape.B, shape.T, stream);
}

KernelError prepare(const AttentionShape& shape, DType dtype, bool with_backward) {
  if (!valid(shape)) return cudaErrorInvalidValue;
  if (shape.B == 0 || shape.T == 0 || !cudnn_serves(shape, dtype)) return kKernelOk;
  using enum AttentionPass;
  std::vector<AttentionPass> passes = {with_backward ? kForwardWithLse : kForward};
  if (with_backward) passes.push_back(kBackward);
  for (const AttentionPass pass : passes) begin_cudnn_attention(shape, pass, /*compared=*/false);
  for (const AttentionPass pass : passes) {
    const KernelError error = cudnn_attention_prepare(shape, pass);
    if (error != kKernelOk && error != kNotSupported) return error;
  }
  return kKernelOk;
}

std::string library_text(const AttentionShape& shape, DType dtype) {
  if (hopper_attention_applies(shape, dtype)) return "our own";
  if (dtype != DType::kBF16) return "plain (cuDNN serves bf16 only)";
  if (shape.document_starts != nullptr && shape.document_mask == nullptr) return "plain (documents without a mask)";
  if (!cudnn_serves(shape, dtype)) return "plain (cuDNN wants head sizes and strides that are multiples of 8)";
  std::string text = cudnn_version();
  if (text.empty()) return "plain, which is slower (built without cuDNN: launch/setup.sh says how to get it)";
  for (const auto& [pass, name] : {std::pair{AttentionPass::kForwardWithLse, "forward"},
                                   {AttentionPass::kForward, "forward without lse"},
                                   {AttentionPass::kBackward, "backward"}}) {
    const std::string why = cudnn_attention_why_not(shape, pass);
    if (!why.empty()) text += std::string(", ") + name + " plain (" + why + ")";
  }
  return text;
}

const char* library(const AttentionShape& shape, DType dtype) {
  static std::mutex mutex;
  static std::set<std::string>& texts = *new std::set<std::string>;
  const std::lock_guard lock(mutex);
  return texts.insert(library_text(shape, dtype)).first->c_str();
}

}  // namespace

bool cudnn_serves(const AttentionShape& s, DType dtype) {
  if (hopper_attention_applies(s, dtype)) return false;
  return (s.document_starts == nullptr || s.document_mask != nullptr) && dtype == DType::kBF16 && s.D % 8 == 0 &&
         s.q_stride % 8 == 0 && s.k_stride % 8 == 0 && s.v_stride % 8 == 0 && s.o_stride % 8 == 0;
}

const AttentionKernels& attention() {
  static constexpr AttentionKernels kTable{
      forward,      backward, backward_workspace_bytes, document_mask_bytes, write_document_mask, prepare,
      cudnn_serves, library};
  return kTable;
}

}  // namespace kintsugi::kernels::cuda
