#include "kernels/kernel_table.h"

#include "kernels/cpu/isa.h"

namespace kintsugi::kernels::cpu {

const AttentionKernels& attention() { return *best_isa().families->attention; }
const PagedAttentionKernels& paged_attention() { return *best_isa().families->paged_attention; }
const NormKernels& norm() { return *best_isa().families->norm; }
const RopeKernels& rope() { return *best_isa().families->rope; }
const ActivationKernels& activation() { return *best_isa().families->activation; }
const EmbeddingKernels& embedding() { return *best_isa().families->embedding; }
const CrossEntropyKernels& cross_entropy() { return *best_isa().families->cross_entropy; }
const OptimizerKernels& optimizer() { return *best_isa().families->optimizer; }
const SamplingKernels& sampling() { return reference::sampling(); }
const ReduceKernels& reduce() { return *best_isa().families->reduce; }

const KernelTable& kernels() {
  static const KernelTable kTable = [] {
    KernelTable table = *best_isa().families;
    table.gemm = &gemm();
    table.sampling = &sampling();
    table.vote = reference::kernels().vote;
    table.error_text = reference::kernels().error_text;
    return table;
  }();
  return kTable;
}

}  // namespace kintsugi::kernels::cpu
