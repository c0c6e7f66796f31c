// One call of each family against the reference loops, before anything is timed. tests/kernels/cuda checks in depth.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>

#include "experiments/kernels_cuda/bench.h"
#include "kernels/bfloat16.h"

namespace kintsugi::kernels_cuda {
namespace {

using kernels::BFloat16;

// A bf16 array on host and device.
struct Pair {
  explicit Pair(int64_t n, uint32_t seed) : host(static_cast<size_t>(n)) {
    std::mt19937 rng(seed);
    std::normal_distribution<float> normal;
    for (BFloat16& x : host) x = kernels::to_bfloat16(normal(rng));
    cudaMalloc(&device, host.size() * 2);
    cudaMemcpy(device, host.data(), host.size() * 2, cudaMemcpyHostToDevice);
  }
  ~Pair() { cudaFree(device); }
  Pair(const Pair&) = delete;
  Pair& operator=(const Pair&) = delete;

  // Largest difference between what the device holds and what the host does, over max(1, |host|).
  double difference() const {
    std::vector<BFloat16> got(host.size());
    if (cudaMemcpy(got.data(), device, got.size() * 2, cudaMemcpyDeviceToHost) != cudaSuccess) return INFINITY;
    double most = 0;
    for (size_t i = 0; i < host.size(); ++i) {
      const double e = kernels::to_float(host[i]), d = std::fabs(kernels::to_float(got[i]) - e);
      most = d >= 0 ? std::max(most, d / std::max(1.0, std::fabs(e))) : INFINITY;
    }
    return most;
  }

  std::vector<BFloat16> host;
  void* device = nullptr;
};

// bf16 rounds by 2^-9 of a value on either side.
bool close(const char* what, const Pair& pair) {
  const double difference = pair.difference();
  if (difference <= 0x1p-7) return true;
  std::printf("%s: differs from the reference by %g\n", what, difference);
  return false;
}

}  // namespace

bool check_rowwise() {
  constexpr int64_t N = 33, C = 1600, V = 50304;
  constexpr DType kType = DType::kBF16;
  const auto& device = kernels::cuda::kernels();
  const auto& reference = kernels::reference::kernels();
  Pair x(N * C, 1), y(N * C, 2), gate_up(N * 2 * C, 3), logits(N * V, 4);
  std::vector<float> w(C, 0.75f), rstd(N), losses(N);
  std::vector<int32_t> targets(N, 7);
  float *d_w = nullptr, *d_rstd = nullptr;
  int32_t* d_targets = nullptr;
  cudaMalloc(&d_w, C * 4);
  cudaMalloc(&d_rstd, N * 4);
  cudaMalloc(&d_targets, N * 4);
  cudaMemcpy(d_w, w.data(), C * 4, cudaMemcpyHostToDevice);
  cudaMemcpy(d_targets, targets.data(), N * 4, cudaMemcpyHostToDevice);
  device.norm->rms_norm_forward(y.device, d_rstd, x.device, d_w, N, C, {}, 1e-5f, kType, nullptr);
  reference.norm->rms_norm_forward(y.host.data(), rstd.data(), x.host.data(), w.data(), N, C, {}, 1e-5f, kType,
                                   nullptr);
  bool good = close("rms_norm", y);
  device.activation->swiglu_forward(y.device, gate_up.device, N, C, kType, nullptr);
  reference.activation->swiglu_forward(y.host.data(), gate_up.host.data(), N, C, kType, nullptr);
  good = close("swiglu", y) && good;
  if (device.cross_entropy->forward_backward != nullptr) {
    device.cross_entropy->forward_backward(d_rstd, logits.device, d_targets, N, V, kType, nullptr);
    reference.cross_entropy->forward_backward(losses.data(), logits.host.data(), targets.data(), N, V, kType, nullptr);
    good = close("cross_entropy", logits) && good;
  }
  cudaFree(d_w);
  cudaFree(d_rstd);
  cudaFree(d_targets);
  return good;
}

}  // namespace kintsugi::kernels_cuda
