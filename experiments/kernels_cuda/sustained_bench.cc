// Matrix products under a load that lasts: the device lowers its clock when it draws too much power, so an algorithm
// that wins for a millisecond need not win for a second.
#include <algorithm>
#include <cstdio>

#include "experiments/kernels_cuda/bench.h"
#include "kernels/cuda/gemm_tuning.h"
#include "kernels/cuda/library_handles.h"
#include "kernels/cuda/matmul.h"

namespace kintsugi::kernels_cuda {
namespace {

using kernels::cuda::GemmOp;
using kernels::cuda::GemmProblem;
using kernels::cuda::Matmul;
using kernels::cuda::Operands;

constexpr float kHeatMs = 60, kSampleMs = 60;
constexpr int kCandidates = 40, kShown = 6;

int32_t attribute(const cublasLtMatmulAlgo_t& algorithm, cublasLtMatmulAlgoConfigAttributes_t which) {
  uint32_t value = 0;  // some are 16 bits wide
  size_t written = 0;
  const size_t bytes = which == CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID || which == CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID
                           ? sizeof(uint16_t)
                           : sizeof(uint32_t);
  (void)cublasLtMatmulAlgoConfigGetAttribute(&algorithm, which, &value, bytes, &written);
  return static_cast<int32_t>(value);
}

struct Bench {
  cudaStream_t stream;
  cudaEvent_t begin, end;
  void* scratch;

  // Milliseconds of `count` calls.
  float run(Matmul& matmul, const Operands& operands, const cublasLtMatmulAlgo_t& algorithm, int count) const {
    float ms = -1;
    cudaEventRecord(begin, stream);
    for (int i = 0; i < count; ++i) {
      if (matmul.run(operands, algorithm, scratch, kernels::cuda::stream_scratch_bytes(), stream) !=
          CUBLAS_STATUS_SUCCESS) {
        return -1;
      }
    }
    cudaEventRecord(end, stream);
    return cudaEventSynchronize(end) == cudaSuccess && cudaEventElapsedTime(&ms, begin, end) == cudaSuccess ? ms : -1;
  }
};

struct Candidate {
  size_t index;
  float burst_us;
};

void measure(const Bench& bench, Pool& pool, const GemmProblem& p) {
  pool.reset();
  const int64_t x = p.N * p.I * 2, y = p.N * p.O * 2, w = p.I * p.O * 2;
  const bool forward = p.op == GemmOp::kForward, weight = p.op == GemmOp::kBackwardWeight;
  const Operands operands{pool.take(forward  ? y
                                    : weight ? 2 * w
                                             : x),
                          pool.take(weight ? x : w), pool.take(forward ? x : y)};
  Matmul matmul;
  std::vector<cublasLtMatmulAlgo_t> algorithms;
  if (pool.exhausted() || matmul.init(p, operands) != CUBLAS_STATUS_SUCCESS ||
      propose_widely(&algorithms, matmul, p, operands, kCandidates) != CUBLAS_STATUS_SUCCESS) {
    return;
  }
  std::vector<Candidate> candidates;
  for (size_t i = 0; i < algorithms.size(); ++i) {
    float best = 1e9f;
    for (int turn = 0; turn < 3; ++turn) {
      const float ms = bench.run(matmul, operands, algorithms[i], 1);
      if (ms > 0) best = std::min(best, ms);
    }
    candidates.push_back({i, best * 1000});
  }
  std::sort(candidates.begin(), candidates.end(),
            [](const Candidate& a, const Candidate& b) { return a.burst_us < b.burst_us; });
  std::printf("%s: %zu algorithms\n", to_string(p).c_str(), algorithms.size());
  const double operations = 2.0 * static_cast<double>(p.N) * static_cast<double>(p.I) * static_cast<double>(p.O);
  for (size_t i = 0; i < candidates.size() && i < kShown; ++i) {
    const cublasLtMatmulAlgo_t& a = algorithms[candidates[i].index];
    const auto calls = [&](float ms) { return std::max(1, static_cast<int>(ms * 1000 / candidates[i].burst_us)); };
    bench.run(matmul, operands, a, calls(kHeatMs));
    const int count = calls(kSampleMs);
    const double us = 1000.0 * static_cast<double>(bench.run(matmul, operands, a, count)) / count;
    std::printf(
        "  %2zu alone %8.1f us lasting %8.1f us %6.1f TFLOP/s id %d tile %d stages %d splits %d swizzle %d custom %d "
        "inner "
        "%d cluster %d\n",
        candidates[i].index, static_cast<double>(candidates[i].burst_us), us, operations / us / 1e6,
        attribute(a, CUBLASLT_ALGO_CONFIG_ID), attribute(a, CUBLASLT_ALGO_CONFIG_TILE_ID),
        attribute(a, CUBLASLT_ALGO_CONFIG_STAGES_ID), attribute(a, CUBLASLT_ALGO_CONFIG_SPLITK_NUM),
        attribute(a, CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING), attribute(a, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION),
        attribute(a, CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID), attribute(a, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID));
  }
}

// How fast the clock gives way: the rate of one product in windows of some milliseconds from a cool start.
void print_settling(const Bench& bench, Pool& pool) {
  pool.reset();
  const GemmProblem p{GemmOp::kForward, 16384, 4096, 4096};
  const Operands operands{pool.take(p.N * p.O * 2), pool.take(p.I * p.O * 2), pool.take(p.N * p.I * 2)};
  Matmul matmul;
  std::vector<cublasLtMatmulAlgo_t> algorithms;
  if (pool.exhausted() || matmul.init(p, operands) != CUBLAS_STATUS_SUCCESS ||
      propose_widely(&algorithms, matmul, p, operands, 1) != CUBLAS_STATUS_SUCCESS) {
    return;
  }
  std::printf("settling, TFLOP/s:");
  for (int window = 0; window < 60; ++window) {
    constexpr int kCalls = 10;
    const auto ms = static_cast<double>(bench.run(matmul, operands, algorithms[0], kCalls));
    std::printf(" %.0f", kCalls * 2e-9 * static_cast<double>(p.N) * static_cast<double>(p.I * p.O) / ms);
  }
  std::printf("\n");
}

}  // namespace

void print_sustained_products(Pool& pool, cudaStream_t stream) {
  Bench bench{stream, nullptr, nullptr, nullptr};
  cudaEventCreate(&bench.begin);
  cudaEventCreate(&bench.end);
  if (kernels::cuda::stream_scratch(&bench.scratch, stream) == kernels::kKernelOk) {
    print_settling(bench, pool);
    for (const auto& [N, I, O] : {std::tuple<int64_t, int64_t, int64_t>{65536, 768, 2304},
                                  {65536, 768, 768},
                                  {65536, 768, 4096},
                                  {65536, 2048, 768},
                                  {65536, 768, 50304},
                                  {16384, 1600, 4800},
                                  {16384, 1600, 1600},
                                  {16384, 1600, 8704},
                                  {16384, 4352, 1600},
                                  {16384, 1600, 50304}}) {
      measure(bench, pool, {GemmOp::kForward, N, I, O});
      measure(bench, pool, {GemmOp::kBackwardInput, N, I, O});
      measure(bench, pool, {GemmOp::kBackwardWeight, N, I, O});
    }
  }
  cudaEventDestroy(bench.begin);
  cudaEventDestroy(bench.end);
}

}  // namespace kintsugi::kernels_cuda
