#include "kernels/kernel_table.h"

namespace kintsugi::kernels::reference {

const KernelTable& kernels() {
  static const KernelTable kTable{&gemm(),       &attention(), &paged_attention(), &norm(),      &rope(),
                                  &activation(), &embedding(), &cross_entropy(),   &optimizer(), &reduce()};
  return kTable;
}

}  // namespace kintsugi::kernels::reference
