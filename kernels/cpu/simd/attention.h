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

}  // namespace kintsugi::kernels::cpu::KTG_ISA
