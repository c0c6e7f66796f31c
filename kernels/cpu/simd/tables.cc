#include "kernels/cpu/simd/tables.h"

namespace kintsugi::kernels::cpu::KTG_ISA {

const KernelTable& families() {
  static const KernelTable kTable{nullptr,      &attention(),     &paged_attention(), &norm(),   &rope(), &activation(),
                                  &embedding(), &cross_entropy(), &optimizer(),       &reduce(), nullptr, nullptr,
                                  nullptr};
  return kTable;
}

}  // namespace kintsugi::kernels::cpu::KTG_ISA
