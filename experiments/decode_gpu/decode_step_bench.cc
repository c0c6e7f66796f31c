// Times a decode step as one launch (kernels/cuda/decode_step.h) at batch 1, and shows where its time goes.
//
//   decode_step_gpu [SHAPE ...]
//
// Shapes are those of decode_bench_gpu, random weights, context 1,024. The launch is recorded as a graph; median of 15
// replays by events after 3. "% of floor" as in decode_bench_gpu. The table: clocks of the first block's multiprocessor
// turned into microseconds, by operation, median over the layers: waiting for the other blocks, making the inputs,
// the product (attention: all of it), and the part of the product's time in which its weights had not arrived (of
// attention's, until the block's part was sent).
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "kernels/cuda/decode_step.h"
#include "kernels/cuda/libraries.h"
#include "kernels/rope.h"

namespace kintsugi {
namespace {

using kernels::DecodeStep;
using kernels::DecodeStepLayer;
using kernels::KernelError;
using kernels::cuda::DecodeStepTuning;
using kernels::cuda::kStepStamps;

constexpr double kCopyBytesPerSecond = 4.28e12;
constexpr int64_t kContext = 1024, kBlockTokens = 16;

struct Shape {
  const char* name;
  int64_t L, C, F, V, H, K, D;
  bool qk_norm;
};
constexpr Shape kShapes[] = {{"qwen3-0.6b", 28, 1024, 3072, 151936, 16, 8, 128, true},
                             {"llama-1b", 16, 2048, 8192, 128256, 32, 8, 64, false},
                             {"llama-8b", 32, 4096, 14336, 128256, 32, 8, 128, false}};

// Device memory full of small bf16 numbers, which as fp32 are small numbers, too; given out piece by piece.
class Pool {
 public:
  explicit Pool(int64_t bytes) {
    if (cudaMalloc(reinterpret_cast<void**>(&data_), static_cast<size_t>(bytes)) != cudaSuccess) data_ = nullptr;
    if (data_ == nullptr) return;
    std::mt19937 rng(20261202);
    std::normal_distribution<float> normal(0.0f, 0.02f);
    std::vector<uint16_t> block(size_t{8} << 20);
    for (uint16_t& x : block) {
      const float value = normal(rng);
      uint32_t bits;
      std::copy_n(reinterpret_cast<const char*>(&value), 4, reinterpret_cast<char*>(&bits));
      x = static_cast<uint16_t>(bits >> 16);
    }
    const auto block_bytes = static_cast<int64_t>(block.size() * 2);
    for (int64_t at = 0; at < bytes; at += block_bytes) {
      cudaMemcpy(data_ + at, block.data(), static_cast<size_t>(std::min(block_bytes, bytes - at)),
                 cudaMemcpyHostToDevice);
    }
  }
  ~Pool() { cudaFree(data_); }
  template <class T = void>
  T* take(int64_t bytes) {
    char* const at = data_ + used_;
    used_ += (bytes + 255) / 256 * 256;
    return reinterpret_cast<T*>(at);
  }
  bool exists() const { return data_ != nullptr; }

 private:
  char* data_ = nullptr;
  int64_t used_ = 0;
};

struct Problem {
  std::vector<DecodeStepLayer> layers;
  DecodeStep step{};
  void* logits;
  void* workspace;
  double floor_ms;
};

template <class T>
const T* upload(Pool& pool, const std::vector<T>& values) {
  T* const to = pool.take<T>(static_cast<int64_t>(values.size() * sizeof(T)));
  cudaMemcpy(to, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice);
  return to;
}

int64_t matrix_bytes(const Shape& s) {
  return 2 * (s.L * ((s.H + 2 * s.K) * s.D * s.C + s.C * s.H * s.D + 3 * s.F * s.C) + s.V * s.C);
}
int64_t cache_bytes(const Shape& s) { return 2 * s.L * 2 * (kContext + kBlockTokens) * s.K * s.D; }

void fill(Problem* p, const Shape& s, Pool& pool) {
  const int64_t QKV = (s.H + 2 * s.K) * s.D, width = kContext / kBlockTokens;
  for (int64_t l = 0; l < s.L; ++l) {
    DecodeStepLayer layer{};
    layer.qkv_w = pool.take(2 * QKV * s.C);
    layer.o_w = pool.take(2 * s.C * s.H * s.D);
    layer.up_w = pool.take(4 * s.F * s.C);
    layer.down_w = pool.take(2 * s.C * s.F);
    layer.norm1 = pool.take<float>(4 * s.C);
    layer.norm2 = pool.take<float>(4 * s.C);
    if (s.qk_norm) layer.q_norm = pool.take<float>(4 * s.D), layer.k_norm = pool.take<float>(4 * s.D);
    layer.k_cache = pool.take(2 * kContext * s.K * s.D);
    layer.v_cache = pool.take(2 * kContext * s.K * s.D);
    p->layers.push_back(layer);
  }
  std::vector<int32_t> table(static_cast<size_t>(width));
  for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>((i * 37) % table.size());
  std::vector<float> cos_sin(static_cast<size_t>(kContext * s.D));
  kernels::fill_rope_table(cos_sin.data(), kContext, s.D, 500000.0);
  DecodeStep& step = p->step;
  step.layers = p->layers.data();
  step.L = s.L, step.C = s.C, step.F = s.F, step.V = s.V;
  step.head = pool.take(2 * s.V * s.C);
  step.token_table = step.head;
  step.norm = pool.take<float>(4 * s.C);
  step.eps = 1e-5f;
  step.ids = upload<int32_t>(pool, {5});
  step.block_tables = upload(pool, table);
  step.context_lens = upload<int32_t>(pool, {static_cast<int32_t>(kContext)});
  step.shape = {1, s.H, s.K, s.D, kBlockTokens, width, QKV, s.H * s.D, 0.1f};
  step.cos_sin = upload(pool, cos_sin);
  step.positions = upload<int32_t>(pool, {static_cast<int32_t>(kContext - 1)});
  step.slots = upload<int64_t>(pool, {table.back() * kBlockTokens + kBlockTokens - 1});
  p->logits = pool.take(2 * s.V);
  const int64_t workspace_bytes = kernels::cuda::decode_step_workspace_bytes(step);
  p->workspace = pool.take(workspace_bytes);
  cudaMemset(p->workspace, 0, static_cast<size_t>(workspace_bytes));
  p->floor_ms = static_cast<double>(matrix_bytes(s) + 2 * s.L * 2 * kContext * s.K * s.D) / kCopyBytesPerSecond * 1e3;
}

// Milliseconds a step; negative when something failed.
double time_step(const Problem& p, const DecodeStepTuning& tuning, cudaStream_t stream) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  if (cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) != cudaSuccess) return -1;
  const KernelError error = kernels::cuda::decode_step(p.logits, p.step, p.workspace, tuning, stream);
  if (cudaStreamEndCapture(stream, &graph) != cudaSuccess || error != 0) {
    fmt::print("launch: error {}\n", error);
    return -1;
  }
  if (cudaGraphInstantiate(&exec, graph, 0) != cudaSuccess) return -1;
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  std::vector<float> times;
  for (int i = 0; i < 18; ++i) {
    cudaEventRecord(begin, stream);
    cudaGraphLaunch(exec, stream);
    cudaEventRecord(end, stream);
    if (const cudaError_t failed = cudaEventSynchronize(end); failed != cudaSuccess) {
      fmt::print("{}, waited for {}\n", cudaGetErrorString(failed), *tuning.report);
      return -1;
    }
    float ms = 0;
    cudaEventElapsedTime(&ms, begin, end);
    if (i >= 3) times.push_back(ms);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void show_stamps(const std::vector<long long>& stamps, int64_t L, double ms) {
  const auto at = [&](int64_t operation, int which) {
    return static_cast<double>(stamps[static_cast<size_t>(operation * kStepStamps + which)]);
  };
  const double us_per_clock = ms * 1e3 / (at(5 * L, 2) - at(0, 0));
  constexpr std::array kNames{"qkv", "attention", "o", "up", "down"};
  double sum = 0;
  for (int kind = 0; kind < 5; ++kind) {
    std::vector<double> wait, input, product, starved;
    for (int64_t l = 1; l < L; ++l) {
      const int64_t i = 5 * l + kind;
      wait.push_back((at(i, 0) - at(i - 1, 2)) * us_per_clock);
      input.push_back((at(i, 1) - at(i, 0)) * us_per_clock);
      product.push_back((at(i, 2) - at(i, 1)) * us_per_clock);
      starved.push_back((kind == 1 ? at(i, 3) - at(i, 1) : at(i, 3)) * us_per_clock);
    }
    fmt::print("    {:<10} wait {:6.2f}  inputs {:6.2f}  product {:6.2f}, of it {} {:6.2f} us\n",
               kNames[static_cast<size_t>(kind)], median(wait), median(input), median(product),
               kind == 1 ? "until parts are sent" : "without weights", median(starved));
    sum += median(wait) + median(input) + median(product);
  }
  fmt::print("    layer {:.2f} us; head: wait {:.2f} inputs {:.2f} product {:.2f} without weights {:.2f}; {:.2f} GHz\n",
             sum, (at(5 * L, 0) - at(5 * L - 1, 2)) * us_per_clock, (at(5 * L, 1) - at(5 * L, 0)) * us_per_clock,
             (at(5 * L, 2) - at(5 * L, 1)) * us_per_clock, at(5 * L, 3) * us_per_clock, 1e-3 / us_per_clock);
}

bool measure(const Shape& s, cudaStream_t stream, unsigned* report) {
  Pool pool(matrix_bytes(s) + cache_bytes(s) + (int64_t{256} << 20));
  if (!pool.exists()) return false;
  Problem p;
  fill(&p, s, pool);
  for (const auto& [window, slots] :
       std::vector<std::pair<int, int>>{{2, 0}, {3, 0}, {4, 0}, {5, 0}, {6, 0}, {8, 0}, {16, 0}, {4, 6}, {6, 8}}) {
    const double ms = time_step(p, {.window = window, .max_slots = slots, .report = report}, stream);
    if (ms < 0) return false;
    fmt::print("{:<12} window {:>2} slots {:>2}: {:.3f} ms, floor {:.3f} ms, {:.1f} % of floor\n", s.name, window,
               slots, ms, p.floor_ms, 100 * p.floor_ms / ms);
  }
  const auto count = static_cast<size_t>((5 * s.L + 1) * kStepStamps);
  auto* const stamps = pool.take<long long>(static_cast<int64_t>(count * 8));
  for (const int window : {4, 8}) {
    const double ms = time_step(p, {.window = window, .stamps = stamps, .report = report}, stream);
    if (ms < 0) return false;
    std::vector<long long> seen(count);
    cudaMemcpy(seen.data(), stamps, count * 8, cudaMemcpyDeviceToHost);
    fmt::print("  window {}, with stamps {:.3f} ms\n", window, ms);
    show_stamps(seen, s.L, ms);
  }
  return true;
}

int run(const std::vector<std::string>& wanted) {
  unsigned* report = nullptr;
  cudaStream_t stream = nullptr;
  if (kernels::cuda::init_libraries({}) != kernels::kKernelOk ||
      cudaHostAlloc(reinterpret_cast<void**>(&report), sizeof(*report), cudaHostAllocMapped) != cudaSuccess ||
      cudaStreamCreate(&stream) != cudaSuccess) {
    fmt::print("no device\n");
    return 1;
  }
  *report = 0;
  bool ok = true;
  for (const Shape& s : kShapes) {
    if (wanted.empty() || std::find(wanted.begin(), wanted.end(), s.name) != wanted.end()) {
      ok = ok && measure(s, stream, report);
    }
  }
  return ok ? 0 : 1;
}

}  // namespace
}  // namespace kintsugi

int main(int argc, char** argv) { return kintsugi::run({argv + 1, argv + argc}); }
