#include "kernels/kernel_table.h"

namespace kintsugi::kernels::cpu {

const AttentionKernels& attention() { return reference::attention(); }
const PagedAttentionKernels& paged_attention() { return reference::paged_attention(); }
const NormKernels& norm() { return reference::norm(); }
const RopeKernels& rope() { return reference::rope(); }
const ActivationKernels& activation() { return reference::activation(); }
const EmbeddingKernels& embedding() { return reference::embedding(); }
const CrossEntropyKernels& cross_entropy() { return reference::cross_entropy(); }
const OptimizerKernels& optimizer() { return reference::optimizer(); }
const ReduceKernels& reduce() { return reference::reduce(); }

const KernelTable& kernels() {
  static const KernelTable kTable{&gemm(),       &attention(), &paged_attention(), &norm(),      &rope(),
                                  &activation(), &embedding(), &cross_entropy(),   &optimizer(), &reduce()};
  return kTable;
}

}  // namespace kintsugi::kernels::cpu
