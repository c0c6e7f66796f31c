// What every kernel header shares. A kernel family is one header that declares a struct of
// function pointers with documented signatures, and one getter per implementation:
//   reference::   plain loops, sums in double; what every other implementation is tested against
//   cpu::         vectorised for the host (AVX2 or AVX-512 chosen at run time, OpenMP threads)
//   cuda::        the device (kernels/cuda, in builds with the CUDA toolkit)
// Kernels know raw pointers, sizes and a stream; nothing of tensors, ranks or files.
//
// Conventions for all families: outputs first, inputs, sizes, stream last. Arrays are dense and
// row-major unless a stride says otherwise, 64-byte aligned at their start on the CPU (16 on the
// device). `void*` data is of the call's DType. Sums are taken in fp32 or better, in an order
// that depends on the sizes alone: not on the number of threads, and for row-wise results not on
// how many rows there are. Outputs may alias inputs only where the header says so.
// Calls return kKernelOk, or an error that the backend turns into a Status.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace kintsugi::kernels {

// Storage type of activations and matmul operands, and of optimizer moments. Weights' master copies and gradients are
// always fp32.
enum class DType : uint8_t { kF32 = 0, kBF16 = 1 };

constexpr int64_t size_of(DType t) { return t == DType::kF32 ? 4 : 2; }
constexpr const char* name_of(DType t) { return t == DType::kF32 ? "fp32" : "bf16"; }
// Of a name that has been checked.
constexpr DType dtype_named(std::string_view name) { return name == "bf16" ? DType::kBF16 : DType::kF32; }

// cudaStream_t on the device; unused (nullptr) on the CPU, where calls are synchronous.
using StreamHandle = void*;

// 0, or an implementation's own code, which KernelTable::error_text explains: errno on the CPU (ENOTSUP, ENOMEM), on
// the device cudaError_t and, beyond kLibraryErrors, codes of its libraries.
using KernelError = int;
inline constexpr KernelError kKernelOk = 0;

}  // namespace kintsugi::kernels
