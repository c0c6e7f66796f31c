// kernels/norm.h on the device.
#include "kernels/cuda/norm_backward.cuh"
#include "kernels/cuda/norm_forward.cuh"
#include "kernels/norm.h"

namespace kintsugi::kernels::cuda {
namespace {

KernelError rms_norm_forward(void* y, float* rstd, const void* x, const float* w, int64_t N, int64_t C,
                             RowLayout layout, float eps, DType dtype, StreamHandle stream) {
  return for_dtype(dtype, [&]<class T>(T) {
    const NormForward<T> a{nullptr, static_cast<T*>(y), nullptr, rstd, static_cast<const T*>(x), nullptr, w, nullptr,
                           eps};
    return launch_norm_forward<false, false>(a, N, C, layout, stream);
  });
}

KernelError residual_rms_norm_forward(void* sum, void* y, float* rstd, const void* x, const void* residual,
                                      const float* w, int64_t N, int64_t C, float eps, DType dtype,
                                      StreamHandle stream) {
  return for_dtype(dtype, [&]<class T>(T) {
    const NormForward<T> a{static_cast<T*>(sum),
                           static_cast<T*>(y),
                           nullptr,
                           rstd,
                           static_cast<const T*>(x),
                           static_cast<const T*>(residual),
                           w,
                           nullptr,
                           eps};
    return launch_norm_forward<false, true>(a, N, C, RowLayout{}, stream);
  });
}

KernelError layer_norm_forward(void* y, float* mean, float* rstd, const void* x, const float* w, const float* b,
                               int64_t N, int64_t C, float eps, DType dtype, StreamHandle stream) {
  return for_dtype(dtype, [&]<class T>(T) {
    const NormForward<T> a{nullptr, static_cast<T*>(y), mean, rstd, static_cast<const T*>(x), nullptr, w, b, eps};
    return launch_norm_forward<true, false>(a, N, C, RowLayout{}, stream);
  });
}

KernelError residual_layer_norm_forward(void* sum, void* y, float* mean, float* rstd, const void* x,
                                        const void* residual, const float* w, const float* b, int64_t N, int64_t C,
                                        float eps, DType dtype, StreamHandle stream) {
  return for_dtype(dtype, [&]<class T>(T) {
    const NormForward<T> a{static_cast<T*>(sum),
                           static_cast<T*>(y),
                           mean,
                           rstd,
                           static_cast<const T*>(x),
                           static_cast<const T*>(residual),
                           w,
                           b,
                           eps};
    return launch_norm_forward<true, true>(a, N, C, RowLayout{}, stream);
  });
}

// mean and db: LayerNorm's; null otherwise.
template <bool kLayerNorm>
KernelError norm_backward(void* dx, float* dw, float* db, const void* dy, const void* x, const float* w,
                          const float* mean, const float* rstd, const void* dresidual, int64_t N, int64_t C,
                          RowLayout layout, bool accumulate_dw, void* workspace, DType dtype, StreamHandle stream) {
  return for_dtype(dtype, [&]<class T>(T) {
    const NormBackward<T> a{static_cast<T*>(dx),
                            nullptr,
                            nullptr,
                            static_cast<const T*>(dy),
                            static_cast<const T*>(x),
                            w,
                            mean,
                            rstd,
                            static_cast<const T*>(dresidual)};
    return launch_norm_backward<kLayerNorm>(a, dw, db, workspace, N, C, layout, accumulate_dw, stream);
  });
}

KernelError rms_norm_backward(void* dx, float* dw, const void* dy, const void* x, const float* w, const float* rstd,
                              const void* dresidual, int64_t N, int64_t C, RowLayout layout, bool accumulate_dw,
                              void* workspace, DType dtype, StreamHandle stream) {
  return norm_backward<false>(dx, dw, nullptr, dy, x, w, nullptr, rstd, dresidual, N, C, layout, accumulate_dw,
                              workspace, dtype, stream);
}

KernelError layer_norm_backward(void* dx, float* dw, float* db, const void* dy, const void* x, const float* w,
                                const float* mean, const float* rstd, const void* dresidual, int64_t N, int64_t C,
                                bool accumulate_dw, void* workspace, DType dtype, StreamHandle stream) {
  return norm_backward<true>(dx, dw, db, dy, x, w, mean, rstd, dresidual, N, C, RowLayout{}, accumulate_dw, workspace,
                             dtype, stream);
}

// Two rows of partial sums (weights and biases) for each block there can be.
int64_t backward_workspace_bytes(int64_t N, int64_t C) {
  const int64_t blocks = N < kMaxNormBackwardBlocks ? N : kMaxNormBackwardBlocks;
  return 2 * blocks * C * static_cast<int64_t>(sizeof(float));
}

}  // namespace

const NormKernels& norm() {
  static constexpr NormKernels kTable{rms_norm_forward,        residual_rms_norm_forward,   rms_norm_backward,
                                      layer_norm_forward,      residual_layer_norm_forward, layer_norm_backward,
                                      backward_workspace_bytes};
  return kTable;
}

}  // namespace kintsugi::kernels::cuda
