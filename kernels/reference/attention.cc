#include "kernels/attention.h"

#include "kernels/composed_attention.h"
#include "kernels/reference/attention_loops.h"

namespace kintsugi::kernels::reference {
namespace {

KernelError forward(void* o, float* lse, const void* q, const void* k, const void* v, const AttentionShape& shape,
                    DType dtype, StreamHandle) {
  return for_dtype(dtype, [&]<class T>(T) {
    attention_forward(static_cast<T*>(o), lse, static_cast<const T*>(q), static_cast<const T*>(k),
                      static_cast<const T*>(v), shape);
  });
}

KernelError backward(void* dq, void* dk, void* dv, const void* d_o, const void* o, const float* lse, const void* q,
                     const void* k, const void* v, const AttentionShape& shape, void*, DType dtype,
                     StreamHandle stream) {
  const KernelError error = for_dtype(dtype, [&]<class T>(T) {
    attention_backward(static_cast<T*>(dq), static_cast<T*>(dk), static_cast<T*>(dv), static_cast<const T*>(d_o),
                       static_cast<const T*>(o), lse, static_cast<const T*>(q), static_cast<const T*>(k),
                       static_cast<const T*>(v), shape);
  });
  return error != kKernelOk ? error : turn_back<rope>(dq, dk, shape, dtype, stream);
}

int64_t backward_workspace_bytes(const AttentionShape&, DType) { return 0; }

int64_t document_mask_bytes(const AttentionShape&, DType) { return 0; }

KernelError write_document_mask(void*, const AttentionShape&, DType, StreamHandle) { return kKernelOk; }

KernelError prepare(const AttentionShape&, DType, bool) { return kKernelOk; }

bool built_by_shape(const AttentionShape&, DType) { return false; }

const char* library(const AttentionShape&, DType) { return "reference"; }

}  // namespace

const AttentionKernels& attention() {
  static constexpr AttentionKernels kTable{
      forward,        backward, backward_workspace_bytes, document_mask_bytes, write_document_mask, prepare,
      built_by_shape, library};
  return kTable;
}

}  // namespace kintsugi::kernels::reference
