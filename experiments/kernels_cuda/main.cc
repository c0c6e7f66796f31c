// kernels_cuda_bench: every device kernel at training shapes against the bandwidth of a plain copy. See README.md.
#include <cuda_runtime.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "experiments/kernels_cuda/bench.h"
#include "kernels/bfloat16.h"
#include "kernels/cuda/libraries.h"

namespace kintsugi::kernels_cuda {
namespace {

constexpr int64_t kPoolBytes = int64_t{24} << 30;
constexpr int64_t kBeyondL2Bytes = int64_t{256} << 20;  // what the sets of one case hold together, at least
constexpr int kSamples = 20;
constexpr double kSampleMs = 0.4;  // a sample is as many launches as fill this time

struct Timer {
  cudaStream_t stream;
  cudaEvent_t begin, end;
  Launch in_front;  // what runs before every sample; may be none

  // ms of `count` calls of launches[i % size].
  float time(const std::vector<Launch>& launches, int count, int& next) {
    if (in_front) in_front(stream);
    cudaEventRecord(begin, stream);
    for (int i = 0; i < count; ++i) launches[static_cast<size_t>(next++) % launches.size()](stream);
    cudaEventRecord(end, stream);
    cudaEventSynchronize(end);
    float ms = 0;
    cudaEventElapsedTime(&ms, begin, end);
    return ms;
  }

  // Median time of one call in us, after a warm-up.
  double median_us(const std::vector<Launch>& launches) {
    int next = 0;
    const auto sets = static_cast<int>(launches.size());
    time(launches, 2 * sets, next);
    const double once = static_cast<double>(time(launches, 2 * sets, next)) / (2 * sets);
    const int count = std::clamp(static_cast<int>(kSampleMs / std::max(once, 1e-4)), 1, 200);
    std::vector<double> samples;
    for (int i = 0; i < kSamples; ++i) samples.push_back(static_cast<double>(time(launches, count, next)) / count);
    std::nth_element(samples.begin(), samples.begin() + kSamples / 2, samples.end());
    return samples[kSamples / 2] * 1000;
  }
};

// GB/s, read and written, of copies that move `bytes` in all, half of them each way.
double copy_gb_per_s(Timer& timer, Pool& pool, double bytes) {
  const auto half = static_cast<int64_t>(bytes / 2);
  std::vector<Launch> copies;
  pool.reset();
  do {
    char* from = pool.take<char>(half);
    char* to = pool.take<char>(half);
    copies.push_back([=](cudaStream_t stream) -> KernelError {
      return cudaMemcpyAsync(to, from, static_cast<size_t>(half), cudaMemcpyDeviceToDevice, stream);
    });
  } while (pool.used() < kBeyondL2Bytes && copies.size() < 64);
  const double us = pool.exhausted() ? std::nan("") : timer.median_us(copies);
  pool.reset();
  return 2.0 * static_cast<double>(half) / us / 1e3;
}

nlohmann::json measure(Timer& timer, Pool& pool, const Case& c, double copy_rate) {
  std::vector<Launch> launches;
  const double alike = c.operations > 0 ? 0 : copy_gb_per_s(timer, pool, c.bytes);
  pool.reset();
  do {
    launches.push_back(c.prepare(pool));
  } while (pool.used() < kBeyondL2Bytes && launches.size() < 64);
  cudaDeviceSynchronize();  // the timer's stream does not wait for the cases' uploads
  nlohmann::json row = {{"kernel", c.kernel}, {"shape", c.shape}};
  if (pool.exhausted()) {
    std::printf("%-28s %-24s does not fit into the pool\n", c.kernel.c_str(), c.shape.c_str());
    return row;
  }
  const KernelError error = launches[0](timer.stream);
  if (error != kernels::kKernelOk || cudaStreamSynchronize(timer.stream) != cudaSuccess) {
    std::printf("%-28s %-24s %s\n", c.kernel.c_str(), c.shape.c_str(),
                kernels::cuda::kernels().error_text(error).c_str());
    row["error"] = kernels::cuda::kernels().error_text(error);
    return row;
  }
  const double us = timer.median_us(launches);
  row["us"] = us;
  if (c.operations > 0) {
    const double tflops = c.operations / us / 1e6;
    std::printf("%-28s %-24s %9.1f us %8.1f TFLOP/s\n", c.kernel.c_str(), c.shape.c_str(), us, tflops);
    row["tflop_per_s"] = tflops;
  } else {
    const double rate = c.bytes / us / 1e3;
    std::printf("%-28s %-24s %9.1f us %8.0f GB/s %5.1f %% %5.1f %%\n", c.kernel.c_str(), c.shape.c_str(), us, rate,
                100 * rate / copy_rate, 100 * rate / alike);
    row["gb_per_s"] = rate;
    row["percent_of_copy"] = 100 * rate / copy_rate;
    row["percent_of_copy_of_as_many_bytes"] = 100 * rate / alike;
  }
  return row;
}

// Some 6 ms of bf16 products of normal numbers, the load under which a training step's kernels run. Runs them for half
// a second, until the device's clock has given way, and prints at what rate they run then. Empty: the device failed.
Launch products(Timer& timer) {
  constexpr int64_t n = 8192;
  constexpr int kProducts = 4, kHeat = 80;
  char* memory = nullptr;
  if (cudaMalloc(&memory, 3 * n * n * 2) != cudaSuccess || !fill_with_normals(memory, 2 * n * n * 2)) return {};
  const Launch launch = [=](cudaStream_t stream) {
    KernelError error = kernels::kKernelOk;
    for (int i = 0; i < kProducts && error == kernels::kKernelOk; ++i) {
      error = kernels::cuda::kernels().gemm->linear_forward(memory + 4 * n * n, memory, memory + 2 * n * n, nullptr, n,
                                                            n, n, DType::kBF16, stream);
    }
    return error;
  };
  int next = 0;
  timer.time({launch}, kHeat, next);
  const double ms = static_cast<double>(timer.time({launch}, kHeat, next)) / (kHeat * kProducts);
  if (launch(timer.stream) != kernels::kKernelOk || cudaStreamSynchronize(timer.stream) != cudaSuccess) return {};
  std::printf("between products at %.0f TFLOP/s\n", 2e-9 * n * n * n / ms);
  return launch;
}

int run(int argc, char** argv) {
  CLI::App app("Times the device kernels against the bandwidth of a copy.");
  std::string json_path;
  std::vector<std::string> filters;
  app.add_option("--json", json_path, "write the results there");
  app.add_option("--filter", filters, "only kernels whose names contain one of these");
  bool between_products = false;
  app.add_flag("--between-products", between_products, "samples between matrix products, at the clock these leave");
  CLI11_PARSE(app, argc, argv);
  const auto wanted = [&](const std::string& name) {
    const auto contained = [&](const std::string& filter) { return name.find(filter) != std::string::npos; };
    return filters.empty() || std::any_of(filters.begin(), filters.end(), contained);
  };
  cudaDeviceProp device{};
  char* memory = nullptr;
  if (cudaGetDeviceProperties(&device, 0) != cudaSuccess || cudaMalloc(&memory, kPoolBytes) != cudaSuccess ||
      !fill_with_normals(memory, kPoolBytes)) {
    std::printf("no device, or not %lld GiB free on it\n", static_cast<long long>(kPoolBytes >> 30));
    return 1;
  }
  if (!check_rowwise()) return 1;
  Pool pool(memory, kPoolBytes);
  Timer timer{};
  cudaStreamCreateWithFlags(&timer.stream, cudaStreamNonBlocking);
  cudaEventCreate(&timer.begin);
  cudaEventCreate(&timer.end);
  if (kernels::cuda::init_libraries({}) != kernels::kKernelOk) return 1;
  if (between_products) {
    timer.in_front = products(timer);
    if (!timer.in_front) return 1;
  }
  const double copy_rate = copy_gb_per_s(timer, pool, double{1 << 30} * 2);
  std::printf("%s; copy of 1 GiB: %.0f GB/s read + written; %% of that, %% of a copy of as many bytes\n", device.name,
              copy_rate);
  nlohmann::json results = nlohmann::json::array(), gemms, epilogues, graphs;
  if (wanted("gemm")) gemms = bench_gemms(pool, timer.stream);
  if (wanted("epilogue")) epilogues = bench_epilogues(pool, timer.stream);
  if (wanted("attention")) graphs = attention_builds();
  if (!filters.empty() && wanted("sustained")) print_sustained_products(pool, timer.stream);
  if (!filters.empty() && wanted("plans")) print_attention_plans(pool, timer.stream);
  std::vector<Case> cases = rowwise_cases();
  for (auto more : {bias_gradient_cases, fused_product_cases, attention_cases}) {
    for (Case& c : more()) cases.push_back(std::move(c));
  }
  for (const Case& c : cases) {
    if (wanted(c.kernel)) results.push_back(measure(timer, pool, c, copy_rate));
  }
  if (!json_path.empty()) {
    std::ofstream(json_path) << nlohmann::json{{"device", device.name},  {"copy_gb_per_s", copy_rate},
                                               {"cases", results},       {"gemms", gemms},
                                               {"epilogues", epilogues}, {"attention_graphs", graphs}}
                                    .dump(1)
                             << "\n";
  }
  return cudaDeviceSynchronize() == cudaSuccess ? 0 : 1;
}

}  // namespace

bool fill_with_normals(void* data, int64_t size_bytes) {
  static const std::vector<uint16_t> kBlock = [] {
    std::vector<uint16_t> block(size_t{8} << 20);
    std::mt19937 rng(1);
    std::normal_distribution<float> normal;
    for (uint16_t& x : block) x = kernels::to_bfloat16(normal(rng)).bits;
    return block;
  }();
  auto* const to = static_cast<char*>(data);
  const auto block_bytes = std::min(static_cast<int64_t>(kBlock.size() * 2), size_bytes);
  if (cudaMemcpy(to, kBlock.data(), static_cast<size_t>(block_bytes), cudaMemcpyHostToDevice) != cudaSuccess) {
    return false;
  }
  for (int64_t done = block_bytes; done < size_bytes; done *= 2) {
    const auto part = static_cast<size_t>(std::min(done, size_bytes - done));
    if (cudaMemcpy(to + done, to, part, cudaMemcpyDeviceToDevice) != cudaSuccess) return false;
  }
  return cudaDeviceSynchronize() == cudaSuccess;
}

}  // namespace kintsugi::kernels_cuda

int main(int argc, char** argv) { return kintsugi::kernels_cuda::run(argc, argv); }
