// Families without kernels yet: their tables are null.
#include "kernels/kernel_table.h"

namespace kintsugi::kernels::cuda {

const EmbeddingKernels& embedding() {
  static constexpr EmbeddingKernels kTable{};
  return kTable;
}
const CrossEntropyKernels& cross_entropy() {
  static constexpr CrossEntropyKernels kTable{};
  return kTable;
}

}  // namespace kintsugi::kernels::cuda
