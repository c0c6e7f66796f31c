// All families of one implementation: what a runtime::Backend carries.
#pragma once

#include <string>

#include "kernels/activation.h"
#include "kernels/attention.h"
#include "kernels/cross_entropy.h"
#include "kernels/decode_layer.h"
#include "kernels/embedding.h"
#include "kernels/gemm.h"
#include "kernels/norm.h"
#include "kernels/optimizer.h"
#include "kernels/paged_attention.h"
#include "kernels/random.h"
#include "kernels/reduce.h"
#include "kernels/rope.h"
#include "kernels/sampling.h"
#include "kernels/vote.h"

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
  const SamplingKernels* sampling;
  const VoteKernels* vote;
  // What a KernelError of this implementation means: "invalid argument (cudaErrorInvalidValue)".
  std::string (*error_text)(KernelError error);
  const DecodeLayerKernels* decode_layer = nullptr;  // null: a decode step takes the families one by one
  const RandomKernels* random = nullptr;  // null: this implementation draws on the host
};

namespace reference { const KernelTable& kernels(); }
namespace cpu { const KernelTable& kernels(); }
// Only in a build with the CUDA toolkit (KTG_CUDA). The caller has made the device current.
namespace cuda { const KernelTable& kernels(); }

}  // namespace kintsugi::kernels
