// Times the kernels of a decode step alone: products of a few rows, and decode attention.
//
//   decode_kernels_gpu
//
// Each line is a chain of launches over different weights or caches, 1 GiB in all, so that nothing is found in the
// second-level cache, recorded as one CUDA graph. 3 launches of the graph to warm up, then the median of 15, by events
// around each. "% of copy" holds the bytes that must be read (weights once; keys and values once) against 4.28 TB/s,
// the H200's copy bandwidth. Results are checked by the tests (tests/kernels/cuda), not here.
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "kernels/cuda/gemv.h"
#include "kernels/paged_attention.h"

namespace kintsugi {
namespace {

using kernels::DType;
using kernels::KernelError;

constexpr double kCopyBytesPerSecond = 4.28e12;
constexpr int64_t kPoolBytes = 1LL << 30;

struct Pool {
  char* data = nullptr;  // kPoolBytes of small bf16 numbers
  char* workspace = nullptr;
  cudaStream_t stream = nullptr;
};

// Microseconds of one of `count` launches in a graph; negative when something failed.
double time_chain(const Pool& pool, int64_t count, const std::function<KernelError(int64_t)>& launch) {
  if (cudaStreamBeginCapture(pool.stream, cudaStreamCaptureModeThreadLocal) != cudaSuccess) return -1;
  KernelError error = 0;
  for (int64_t i = 0; i < count && error == 0; ++i) error = launch(i);
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  if (cudaStreamEndCapture(pool.stream, &graph) != cudaSuccess || error != 0) {
    fmt::print("launch: error {}\n", error);
    return -1;
  }
  if (cudaGraphInstantiate(&exec, graph, 0) != cudaSuccess) return -1;
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  std::vector<float> times;
  for (int i = 0; i < 18; ++i) {
    cudaEventRecord(begin, pool.stream);
    cudaGraphLaunch(exec, pool.stream);
    cudaEventRecord(end, pool.stream);
    if (cudaEventSynchronize(end) != cudaSuccess) return -1;
    float ms = 0;
    cudaEventElapsedTime(&ms, begin, end);
    if (i >= 3) times.push_back(ms);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  std::sort(times.begin(), times.end());
  return times[times.size() / 2] * 1e3 / static_cast<double>(count);
}

void report(const std::string& what, double us, double bytes) {
  fmt::print("{:<44} {:8.2f} us {:7.2f} TB/s {:5.1f} % of copy\n", what, us, bytes / us * 1e-6,
             bytes / us * 1e8 / kCopyBytesPerSecond);
}

void products(const Pool& pool) {
  const struct {
    const char* name;
    int64_t O, I;
  } shapes[] = {{"1B qkv", 3072, 2048},    {"1B o", 2048, 2048},       {"1B up", 16384, 2048}, {"1B down", 2048, 8192},
                {"1B head", 128256, 2048}, {"8B qkv", 6144, 4096},     {"8B o", 4096, 4096},   {"8B up", 28672, 4096},
                {"8B down", 4096, 14336},  {"0.6B qkv", 4096, 1024},   {"0.6B o", 1024, 2048}, {"0.6B up", 6144, 1024},
                {"0.6B down", 1024, 3072}, {"0.6B head", 151936, 1024}};
  for (const auto& s : shapes) {
    for (const int64_t N : {1, 4, 8, 16}) {
      const int64_t bytes = s.O * s.I * 2, fit = kPoolBytes / bytes, count = std::min<int64_t>(fit, 64);
      const double us = time_chain(pool, count, [&](int64_t i) {
        return kernels::cuda::gemv(pool.workspace + (64 << 20), pool.workspace, pool.data + i * (fit / count) * bytes,
                                   nullptr, N, s.I, s.O, DType::kBF16, pool.stream);
      });
      report(fmt::format("{} {} x {}, {} rows", s.name, s.O, s.I, N), us, static_cast<double>(bytes));
    }
  }
}

void attention(const Pool& pool) {
  const struct {
    const char* name;
    int64_t H, K, D;
  } shapes[] = {{"1B", 32, 8, 64}, {"8B", 32, 8, 128}, {"0.6B", 16, 8, 128}, {"124M", 12, 12, 64}};
  const int64_t context = 1024, P = 16, width = 72;
  for (const auto& s : shapes) {
    for (const int64_t S : {1, 8, 32}) {
      std::vector<int32_t> tables(static_cast<size_t>(S * width)), lens(static_cast<size_t>(S), context);
      for (size_t i = 0; i < tables.size(); ++i) tables[i] = static_cast<int32_t>(i);
      int32_t* device;
      if (cudaMalloc(reinterpret_cast<void**>(&device), (tables.size() + lens.size()) * 4) != cudaSuccess) return;
      cudaMemcpy(device, tables.data(), tables.size() * 4, cudaMemcpyHostToDevice);
      cudaMemcpy(device + tables.size(), lens.data(), lens.size() * 4, cudaMemcpyHostToDevice);
      const int64_t array = S * width * P * s.K * s.D * 2, count = std::min<int64_t>(kPoolBytes / (2 * array), 64);
      const kernels::PagedShape shape{S, s.H, s.K, s.D, P, width, (s.H + 2 * s.K) * s.D, s.H * s.D, 0.1f};
      const double us = time_chain(pool, count, [&](int64_t i) {
        char* const k = pool.data + 2 * i * array;
        return kernels::cuda::paged_attention().decode(pool.workspace + (640 << 20), pool.workspace + (512 << 20), k,
                                                       k + array, device, device + tables.size(), shape, DType::kBF16,
                                                       pool.workspace, pool.stream);
      });
      report(fmt::format("attention {}, batch {} x {}", s.name, S, context), us,
             static_cast<double>(2 * S * context * s.K * s.D * 2));
      cudaFree(device);
    }
  }
}

int run() {
  Pool pool;
  if (cudaMalloc(reinterpret_cast<void**>(&pool.data), kPoolBytes) != cudaSuccess ||
      cudaMalloc(reinterpret_cast<void**>(&pool.workspace), kPoolBytes) != cudaSuccess ||
      cudaStreamCreateWithFlags(&pool.stream, cudaStreamNonBlocking) != cudaSuccess) {
    fmt::print("no GPU, or too little memory: {}\n", cudaGetErrorString(cudaGetLastError()));
    return 1;
  }
  cudaMemset(pool.data, 0x3c, kPoolBytes);
  cudaMemset(pool.workspace, 0, kPoolBytes);
  cudaDeviceSynchronize();
  products(pool);
  attention(pool);
  return cudaDeviceSynchronize() == cudaSuccess ? 0 : 1;
}

}  // namespace
}  // namespace kintsugi

int main() { return kintsugi::run(); }
