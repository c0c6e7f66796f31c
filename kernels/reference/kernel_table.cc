#include "kernels/kernel_table.h"

#include <cstring>

namespace kintsugi::kernels::reference {

namespace {

std::string errno_text(KernelError error) { return std::strerror(error); }

}  // namespace

const KernelTable& kernels() {
  static const KernelTable kTable{&gemm(),       &attention(), &paged_attention(), &norm(),      &rope(),
                                  &activation(), &embedding(), &cross_entropy(),   &optimizer(), &reduce(),
                                  &sampling(),   &vote(),      errno_text};
  return kTable;
}

}  // namespace kintsugi::kernels::reference
