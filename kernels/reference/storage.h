// How the reference loops read and write their storage types. All arithmetic is in double; a result is rounded
// once, when it is stored. Instantiated with double the loops are exact enough for finite differences.
#pragma once

#include <cerrno>

#include "kernels/bfloat16.h"
#include "kernels/types.h"

namespace kintsugi::kernels::reference {

inline double get(double x) { return x; }
inline double get(float x) { return x; }
inline double get(BFloat16 x) { return to_float(x); }

inline void put(double& y, double x) { y = x; }
inline void put(float& y, double x) { y = static_cast<float>(x); }
inline void put(BFloat16& y, double x) { y = to_bfloat16(static_cast<float>(x)); }

// Calls f(T{}) with the storage type of `dtype`; ENOTSUP for a type that the reference does not know.
template <class F>
KernelError for_dtype(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kF32:
      f(float{});
      return kKernelOk;
    case DType::kBF16:
      f(BFloat16{});
      return kKernelOk;
  }
  return ENOTSUP;
}

}  // namespace kintsugi::kernels::reference
