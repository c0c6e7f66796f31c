// Times the kernels of a decode step alone: its products, plain and fused, and decode attention.
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
#include "kernels/cuda/libraries.h"
#include "kernels/gemm.h"
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
  // Once before it is recorded: libraries choose and load what they need.
  if (launch(0) != kernels::kKernelOk || cudaStreamSynchronize(pool.stream) != cudaSuccess) return -1;
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
    bool norm, swiglu;
  } shapes[] = {{"1B qkv", 3072, 2048, true, false},     {"1B o", 2048, 2048, false, false},
                {"1B up", 8192, 2048, true, true},       {"1B down", 2048, 8192, false, false},
                {"1B head", 128256, 2048, true, false},  {"8B qkv", 6144, 4096, true, false},
                {"8B o", 4096, 4096, false, false},      {"8B up", 14336, 4096, true, true},
                {"8B down", 4096, 14336, false, false},  {"0.6B qkv", 4096, 1024, true, false},
                {"0.6B o", 1024, 2048, false, false},    {"0.6B up", 3072, 1024, true, true},
                {"0.6B down", 1024, 3072, false, false}, {"0.6B head", 151936, 1024, true, false}};
  char* const at = pool.workspace;
  const auto* const norm = reinterpret_cast<const float*>(at + (960 << 20));
  for (const auto& s : shapes) {
    for (const int64_t N : {1, 8, 16, 32}) {
      const int64_t bytes = (s.swiglu ? 2 : 1) * s.O * s.I * 2, fit = kPoolBytes / bytes;
      const int64_t count = std::min<int64_t>(fit, 64);
      const kernels::DecodeNorm in{at + (64 << 20), at, at + (32 << 20), norm, 1e-5f, at + (96 << 20),
                                   at + (128 << 20)};
      const double us = time_chain(pool, count, [&](int64_t i) {
        const char* const w = pool.data + i * (fit / count) * bytes;
        if (s.norm) {
          return kernels::cuda::decode_layer().norm_linear(at + (256 << 20), in, w, nullptr, N, s.I, s.O, s.swiglu,
                                                           pool.stream);
        }
        return kernels::cuda::gemm().linear_forward(at + (256 << 20), at, w, nullptr, N, s.I, s.O, DType::kBF16,
                                                    pool.stream);
      });
      report(fmt::format("{} {} x {}{}{}, {} rows", s.name, s.O, s.I, s.norm ? " with norm" : "",
                         s.swiglu ? ", SwiGLU" : "", N),
             us, static_cast<double>(bytes));
    }
  }
}

// Of the shape's attention, with the rotation of the new token or without: what a launch costs.
double time_attention(const Pool& pool, const kernels::PagedShape& shape, const std::vector<int32_t>& tables,
                      int32_t context, bool rotated) {
  const auto S = static_cast<size_t>(shape.S);
  const std::vector<int32_t> lens(S, context), positions(S, context - 1);
  std::vector<int64_t> slots(S);
  for (size_t i = 0; i < S; ++i) {
    const size_t entry = i * static_cast<size_t>(shape.block_table_width) + static_cast<size_t>((context - 1) / 16);
    slots[i] = tables[entry] * int64_t{16} + (context - 1) % 16;
  }
  char* const inputs = pool.workspace + (896 << 20);
  char *const d_lens = inputs, *const d_positions = inputs + 4096, *const d_slots = inputs + 8192,
              *const d_tables = inputs + 16384;
  cudaMemcpy(d_lens, lens.data(), lens.size() * 4, cudaMemcpyHostToDevice);
  cudaMemcpy(d_positions, positions.data(), positions.size() * 4, cudaMemcpyHostToDevice);
  cudaMemcpy(d_slots, slots.data(), slots.size() * 8, cudaMemcpyHostToDevice);
  cudaMemcpy(d_tables, tables.data(), tables.size() * 4, cudaMemcpyHostToDevice);
  cudaDeviceSynchronize();  // the pool's stream does not wait for these
  const auto* const norm = reinterpret_cast<const float*>(pool.workspace + (960 << 20));
  const kernels::DecodeRotation rotation{
      norm, norm, 1e-5f, norm, reinterpret_cast<int32_t*>(d_positions), reinterpret_cast<int64_t*>(d_slots)};
  const int64_t array = shape.S * shape.block_table_width * 16 * shape.K * shape.D * 2;
  return time_chain(pool, std::min<int64_t>(kPoolBytes / (2 * array), 64), [&](int64_t i) {
    char* const k = pool.data + 2 * i * array;
    char *const o = pool.workspace + (640 << 20), *const q = pool.workspace + (512 << 20);
    if (rotated) {
      return kernels::cuda::decode_layer().attention(o, q, k, k + array, reinterpret_cast<int32_t*>(d_tables),
                                                     reinterpret_cast<int32_t*>(d_lens), shape, rotation,
                                                     pool.workspace, pool.stream);
    }
    return kernels::cuda::paged_attention().decode(o, q, k, k + array, reinterpret_cast<int32_t*>(d_tables),
                                                   reinterpret_cast<int32_t*>(d_lens), shape, DType::kBF16,
                                                   pool.workspace, pool.stream);
  });
}

void attention(const Pool& pool) {
  const struct {
    const char* name;
    int64_t H, K, D;
  } shapes[] = {{"1B", 32, 8, 64}, {"8B", 32, 8, 128}, {"0.6B", 16, 8, 128}, {"124M", 12, 12, 64}};
  const int64_t context = 1024, width = 72;
  for (const auto& s : shapes) {
    for (const int64_t S : {1, 8, 16, 32, 128}) {
      std::vector<int32_t> tables(static_cast<size_t>(S * width));
      for (size_t i = 0; i < tables.size(); ++i) tables[i] = static_cast<int32_t>(i);
      const kernels::PagedShape shape{S, s.H, s.K, s.D, 16, width, (s.H + 2 * s.K) * s.D, s.H * s.D, 0.1f};
      for (const bool rotated : {false, true}) {
        const double us = time_attention(pool, shape, tables, context, rotated);
        report(fmt::format("attention {}, batch {} x {}{}", s.name, S, context, rotated ? ", rotated" : ""), us,
               static_cast<double>(2 * S * context * s.K * s.D * 2));
      }
    }
  }
}

int run() {
  Pool pool;
  if (cudaMalloc(reinterpret_cast<void**>(&pool.data), kPoolBytes) != cudaSuccess ||
      cudaMalloc(reinterpret_cast<void**>(&pool.workspace), kPoolBytes) != cudaSuccess ||
      cudaStreamCreateWithFlags(&pool.stream, cudaStreamNonBlocking) != cudaSuccess ||
      kernels::cuda::init_libraries({}) != kernels::kKernelOk) {
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
