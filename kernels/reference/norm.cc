#include "kernels/norm.h"

#include "kernels/reference/norm_loops.h"

namespace kintsugi::kernels::reference {
namespace {

// The sum is stored in T and the norm reads it back, so that the backward pass sees the same x.
template <class T>
void add_rows(void* sum, const void* x, const void* residual, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    put(static_cast<T*>(sum)[i], get(static_cast<const T*>(x)[i]) + get(static_cast<const T*>(residual)[i]));
  }
}

KernelError rms_forward(void* y, float* rstd, const void* x, const float* w, int64_t N, int64_t C, RowLayout layout,
                        float eps, DType dtype, StreamHandle) {
  return for_dtype(dtype, [&]<class T>(T) {
    rms_norm_forward(static_cast<T*>(y), rstd, static_cast<const T*>(x), w, N, C, layout, eps);
  });
}

KernelError residual_rms_forward(void* sum, void* y, float* rstd, const void* x, const void* residual, const float* w,
                                 int64_t N, int64_t C, float eps, DType dtype, StreamHandle) {
  return for_dtype(dtype, [&]<class T>(T) {
    add_rows<T>(sum, x, residual, N * C);
    rms_norm_forward(static_cast<T*>(y), rstd, static_cast<const T*>(sum), w, N, C, RowLayout{}, eps);
  });
}

KernelError rms_backward(void* dx, float* dw, const void* dy, const void* x, const float* w, const float* rstd,
                         const void* dresidual, int64_t N, int64_t C, RowLayout layout, bool accumulate_dw, void*,
                         DType dtype, StreamHandle) {
  return for_dtype(dtype, [&]<class T>(T) {
    rms_norm_backward(static_cast<T*>(dx), dw, static_cast<const T*>(dy), static_cast<const T*>(x), w, rstd,
                      static_cast<const T*>(dresidual), N, C, layout, accumulate_dw);
  });
}

KernelError layer_forward(void* y, float* mean, float* rstd, const void* x, const float* w, const float* b, int64_t N,
                          int64_t C, float eps, DType dtype, StreamHandle) {
  return for_dtype(dtype, [&]<class T>(T) {
    layer_norm_forward(static_cast<T*>(y), mean, rstd, static_cast<const T*>(x), w, b, N, C, eps);
  });
}

KernelError residual_layer_forward(void* sum, void* y, float* mean, float* rstd, const void* x, const void* residual,
                                   const float* w, const float* b, int64_t N, int64_t C, float eps, DType dtype,
                                   StreamHandle) {
  return for_dtype(dtype, [&]<class T>(T) {
    add_rows<T>(sum, x, residual, N * C);
    layer_norm_forward(static_cast<T*>(y), mean, rstd, static_cast<const T*>(sum), w, b, N, C, eps);
  });
}

KernelError layer_backward(void* dx, float* dw, float* db, const void* dy, const void* x, const float* w,
                           const float* mean, const float* rstd, const void* dresidual, int64_t N, int64_t C,
                           bool accumulate_dw, void*, DType dtype, StreamHandle) {
  return for_dtype(dtype, [&]<class T>(T) {
    layer_norm_backward(static_cast<T*>(dx), dw, db, static_cast<const T*>(dy), static_cast<const T*>(x), w, mean, rstd,
                        static_cast<const T*>(dresidual), N, C, accumulate_dw);
  });
}

int64_t backward_workspace_bytes(int64_t, int64_t) { return 0; }

}  // namespace

const NormKernels& norm() {
  static constexpr NormKernels kTable{
      rms_forward,    residual_rms_forward,    rms_backward, layer_forward, residual_layer_forward,
      layer_backward, backward_workspace_bytes};
  return kTable;
}

}  // namespace kintsugi::kernels::reference
