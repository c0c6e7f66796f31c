// The kernel families of one instruction set variant; see vector.h for KTG_ISA.
#pragma once

#include "kernels/cpu/matmul.h"
#include "kernels/kernel_table.h"

namespace kintsugi::kernels::cpu::KTG_ISA {

const AttentionKernels& attention();
const PagedAttentionKernels& paged_attention();
const NormKernels& norm();
const RopeKernels& rope();
const ActivationKernels& activation();
const EmbeddingKernels& embedding();
const CrossEntropyKernels& cross_entropy();
const OptimizerKernels& optimizer();
const ReduceKernels& reduce();

// All of the above; gemm is null, because cpu::gemm() is common to all variants and calls the two functions below.
const KernelTable& families();

// The built-in matrix product, and the column sums of linear_backward_bias.
KernelError blocked_matmul(const Matmul& matmul);
KernelError column_sums(float* sums, const void* x, int64_t rows, int64_t cols, bool accumulate, DType dtype);

}  // namespace kintsugi::kernels::cpu::KTG_ISA
