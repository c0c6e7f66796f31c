// Families without kernels yet: their tables are null.
#include "kernels/kernel_table.h"

namespace kintsugi::kernels::cuda {

const NormKernels& norm() {
  static constexpr NormKernels kTable{};
  return kTable;
}
const RopeKernels& rope() {
  static constexpr RopeKernels kTable{};
  return kTable;
}
const ActivationKernels& activation() {
  static constexpr ActivationKernels kTable{};
  return kTable;
}
const EmbeddingKernels& embedding() {
  static constexpr EmbeddingKernels kTable{};
  return kTable;
}
const CrossEntropyKernels& cross_entropy() {
  static constexpr CrossEntropyKernels kTable{};
  return kTable;
}
const OptimizerKernels& optimizer() {
  static constexpr OptimizerKernels kTable{};
  return kTable;
}
const ReduceKernels& reduce() {
  static constexpr ReduceKernels kTable{};
  return kTable;
}

}  // namespace kintsugi::kernels::cuda
