// All families of one implementation: what a runtime::Backend carries.
#pragma once

#include "kernels/activation.h"
#include "kernels/attention.h"
#include "kernels/cross_entropy.h"
#include "kernels/embedding.h"
#include "kernels/gemm.h"
#include "kernels/norm.h"
#include "kernels/optimizer.h"
#include "kernels/paged_attention.h"
#include "kernels/reduce.h"
#include "kernels/rope.h"

namespace kintsugi::kernels {

struct KernelTable {
  const GemmKernels* gemm;
  const AttentionKernels* attention;
  const PagedAttentionKernels* paged_attention;
  const NormKernels* norm;
  const RopeKernels* rope;
  const ActivationKernels* activation;
  const EmbeddingKernels* embedding;
  const CrossEntropyKernels* cross_entropy;
  const OptimizerKernels* optimizer;
  const ReduceKernels* reduce;
};

namespace reference { const KernelTable& kernels(); }
namespace cpu { const KernelTable& kernels(); }

}  // namespace kintsugi::kernels
