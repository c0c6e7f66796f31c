// The entries of AttentionKernels, each in a file of its own.
#pragma once

#include "kernels/attention.h"
#include "kernels/cpu/simd/vector.h"

namespace kintsugi::kernels::cpu::KTG_ISA {

KernelError attention_forward(void* o, float* lse, const void* q, const void* k, const void* v,
                              const AttentionShape& shape, DType dtype, StreamHandle stream);
KernelError attention_backward(void* dq, void* dk, void* dv, const void* d_o, const void* o, const float* lse,
                               const void* q, const void* k, const void* v, const AttentionShape& shape,
                               void* workspace, DType dtype, StreamHandle stream);
int64_t attention_backward_workspace_bytes(const AttentionShape& shape, DType dtype);

// Calls body(first, shape) for each document of sequence b: where in the sequence it begins, and the shape with its
// length as T. To the loops a document is a sequence of its own, so its bits are those that it has alone.
template <class Body>
void for_documents(const AttentionShape& s, int64_t b, Body&& body) {
  AttentionShape document = s;
  document.document_starts = nullptr;
  if (s.document_starts == nullptr) return body(int64_t{0}, document);
  const int32_t* const starts = s.document_starts + b * s.T;
  for (int64_t first = 0, end; first < s.T; first = end) {
    for (end = first + 1; end < s.T && starts[end] == starts[first];) ++end;
    document.T = end - first;
    body(first, document);
  }
}

}  // namespace kintsugi::kernels::cpu::KTG_ISA
