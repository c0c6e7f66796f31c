// In place of onednn_matmul.cc where oneDNN is not built in.
#include <cerrno>

#include "kernels/cpu/matmul.h"

namespace kintsugi::kernels::cpu {

KernelError onednn_matmul(const Matmul&) { return ENOTSUP; }
const char* onednn_library() { return nullptr; }

}  // namespace kintsugi::kernels::cpu
