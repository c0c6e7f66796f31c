// kernel_bench: the CPU kernels at the benchmark model's shapes (4 layers, C 256, 8 heads of 32, SwiGLU 704, 256 bytes
// vocabulary, T 256, B 4), one thread unless told otherwise. Each kernel is first checked against the reference loops
// on a smaller problem, then warmed up, then timed. See README.md for how the columns are measured.
#include <time.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "kernels/bfloat16.h"
#include "kernels/cpu/isa.h"
#include "kernels/kernel_table.h"

namespace kintsugi::kernels {
namespace {

// One training step of the benchmark model on one rank.
constexpr int64_t kB = 4, kT = 256, kN = kB * kT, kC = 256, kH = 8, kD = 32, kF = 704, kV = 256, kLayers = 4;
constexpr int64_t kParams = 3'345'664;

struct Options {
  double seconds = 0.3;  // spent on each kernel
  int threads = 1;
  DType dtype = DType::kF32;
  std::string json;
};

// CPU time of this thread, so that what else runs on the machine counts less; wall time with more threads.
double now(int threads) {
  timespec t;
  clock_gettime(threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

struct Timing {
  double median, best;
  int repetitions;
};

Timing time_kernel(const std::function<void()>& call, const Options& options) {
  for (int i = 0; i < 3; ++i) call();
  std::vector<double> seconds;
  double total = 0;
  while (total < options.seconds || seconds.size() < 7) {
    const double begin = now(options.threads);
    call();
    seconds.push_back(now(options.threads) - begin);
    total += seconds.back();
  }
  std::sort(seconds.begin(), seconds.end());
  return {seconds[seconds.size() / 2], seconds.front(), static_cast<int>(seconds.size())};
}

// Memory for one argument, filled with normal numbers. Kept for the whole run.
class Memory {
 public:
  explicit Memory(DType dtype) : dtype_(dtype) {}
  void* typed(int64_t n, float scale = 1.0f) { return fill(n, dtype_, scale); }
  float* f32(int64_t n, float scale = 1.0f) { return static_cast<float*>(fill(n, DType::kF32, scale)); }
  int32_t* ids(int64_t n, int64_t below) {
    int32_t* p = static_cast<int32_t*>(take(n * 4));
    for (int64_t i = 0; i < n; ++i) p[i] = static_cast<int32_t>(rng_() % static_cast<uint32_t>(below));
    return p;
  }

 private:
  void* take(int64_t bytes) {
    blocks_.emplace_back(static_cast<size_t>(bytes + 64));
    const auto address = reinterpret_cast<uintptr_t>(blocks_.back().data());
    return blocks_.back().data() + (64 - address % 64) % 64;
  }
  void* fill(int64_t n, DType dtype, float scale) {
    void* p = take(n * size_of(dtype));
    std::normal_distribution<float> normal(0.0f, scale);
    for (int64_t i = 0; i < n; ++i) {
      const float x = normal(rng_);
      if (dtype == DType::kF32) {
        static_cast<float*>(p)[i] = x;
      } else {
        static_cast<BFloat16*>(p)[i] = to_bfloat16(x);
      }
    }
    return p;
  }
  DType dtype_;
  std::mt19937 rng_{1};
  std::vector<std::vector<unsigned char>> blocks_;
};

enum class Bound { kCompute, kMemory };

struct Case {
  std::string name;
  Bound bound;
  double work;   // operations, or bytes moved to and from memory
  int per_step;  // calls in one training step
  bool is_gemm;
  std::function<void()> call;
};

// Keeps building cases; each lambda holds raw pointers into Memory.
struct Suite {
  Memory& memory;
  const KernelTable& k;
  DType dtype;
  std::vector<Case> cases;
  double element() const { return static_cast<double>(size_of(dtype)); }
};

double product(int64_t a, int64_t b, int64_t c = 1) {
  return static_cast<double>(a) * static_cast<double>(b) * static_cast<double>(c);
}

void add_linear(Suite& s, const std::string& name, int64_t I, int64_t O, int per_step) {
  void *x = s.memory.typed(kN * I), *w = s.memory.typed(O * I, 0.05f), *y = s.memory.typed(kN * O);
  float* dw = s.memory.f32(O * I);
  const GemmKernels& gemm = *s.k.gemm;
  const DType t = s.dtype;
  const double work = 2 * product(kN, I, O);
  const std::string shape = " " + std::to_string(I) + "->" + std::to_string(O);
  s.cases.push_back({name + shape + " forward", Bound::kCompute, work, per_step, true,
                     [=, &gemm] { gemm.linear_forward(y, x, w, nullptr, kN, I, O, t, nullptr); }});
  s.cases.push_back({name + shape + " d input", Bound::kCompute, work, per_step, true,
                     [=, &gemm] { gemm.linear_backward_input(x, y, w, kN, I, O, false, t, nullptr); }});
  s.cases.push_back({name + shape + " d weight", Bound::kCompute, work, per_step, true,
                     [=, &gemm] { gemm.linear_backward_weight(dw, y, x, kN, I, O, false, t, nullptr); }});
}

void add_attention(Suite& s) {
  const int64_t width = 3 * kH * kD;
  const AttentionShape shape{kB,    kT,    kH,    kH,      kD,
                             width, width, width, kH * kD, 1.0f / std::sqrt(static_cast<float>(kD))};
  char *qkv = static_cast<char*>(s.memory.typed(kN * width)), *d_qkv = static_cast<char*>(s.memory.typed(kN * width));
  void *o = s.memory.typed(kN * kH * kD), *d_o = s.memory.typed(kN * kH * kD);
  float* lse = s.memory.f32(kB * kH * kT);
  const int64_t part = kH * kD * size_of(s.dtype);
  void* workspace = s.memory.f32(s.k.attention->backward_workspace_bytes(shape, s.dtype) / 4 + 1);
  const AttentionKernels& attention = *s.k.attention;
  const DType t = s.dtype;
  const double work = 2 * product(kB * kH, kT * kT, kD);  // two products, causal half
  s.cases.push_back({"attention forward", Bound::kCompute, work, kLayers, false, [=, &attention] {
                       attention.forward(o, lse, qkv, qkv + part, qkv + 2 * part, shape, t, nullptr);
                     }});
  s.cases.push_back({"attention backward", Bound::kCompute, 2.5 * work, kLayers, false, [=, &attention] {
                       attention.backward(d_qkv, d_qkv + part, d_qkv + 2 * part, d_o, o, lse, qkv, qkv + part,
                                          qkv + 2 * part, shape, workspace, t, nullptr);
                     }});
}

void add_norms(Suite& s) {
  void *x = s.memory.typed(kN * kC), *r = s.memory.typed(kN * kC), *y = s.memory.typed(kN * kC),
       *sum = s.memory.typed(kN * kC);
  float *w = s.memory.f32(kC), *rstd = s.memory.f32(kN), *dw = s.memory.f32(kC);
  void* workspace = s.memory.f32(s.k.norm->backward_workspace_bytes(kN, kC) / 4 + 1);
  const NormKernels& norm = *s.k.norm;
  const DType t = s.dtype;
  const double rows = product(kN, kC) * s.element();
  s.cases.push_back({"rms_norm forward", Bound::kMemory, 2 * rows, 1, false,
                     [=, &norm] { norm.rms_norm_forward(y, rstd, x, w, kN, kC, {}, 1e-5f, t, nullptr); }});
  s.cases.push_back({"residual_rms_norm forward", Bound::kMemory, 4 * rows, 2 * kLayers, false,
                     [=, &norm] { norm.residual_rms_norm_forward(sum, y, rstd, x, r, w, kN, kC, 1e-5f, t, nullptr); }});
  s.cases.push_back({"rms_norm backward", Bound::kMemory, 4 * rows, 2 * kLayers + 1, false, [=, &norm] {
                       norm.rms_norm_backward(sum, dw, y, x, w, rstd, r, kN, kC, {}, false, workspace, t, nullptr);
                     }});
}

void add_elementwise(Suite& s) {
  const DType t = s.dtype;
  const double e = s.element();
  void *gate_up = s.memory.typed(kN * 2 * kF), *act = s.memory.typed(kN * kF), *d_gate_up = s.memory.typed(kN * 2 * kF);
  const ActivationKernels& activation = *s.k.activation;
  s.cases.push_back({"swiglu forward", Bound::kMemory, 3 * product(kN, kF) * e, kLayers, false,
                     [=, &activation] { activation.swiglu_forward(act, gate_up, kN, kF, t, nullptr); }});
  s.cases.push_back({"swiglu backward", Bound::kMemory, 5 * product(kN, kF) * e, kLayers, false,
                     [=, &activation] { activation.swiglu_backward(d_gate_up, act, gate_up, kN, kF, t, nullptr); }});
  s.cases.push_back({"gelu forward (GPT-2)", Bound::kMemory, 2 * product(kN, kF) * e, 0, false,
                     [=, &activation] { activation.gelu_forward(act, gate_up, kN, kF, t, nullptr); }});

  float* table = s.memory.f32(kT * kD);
  fill_rope_table(table, kT, kD, 10000.0);
  int32_t* positions = s.memory.ids(kN, kT);
  for (int64_t n = 0; n < kN; ++n) positions[n] = static_cast<int32_t>(n % kT);
  void* qkv = s.memory.typed(kN * 3 * kC);
  const RopeKernels& rope = *s.k.rope;
  s.cases.push_back({"rope q and k", Bound::kMemory, 2 * product(kN, 2 * kC) * e, 2 * kLayers, false,
                     [=, &rope] { rope.rotate(qkv, positions, table, kN, 2 * kH, kD, 3 * kC, false, t, nullptr); }});

  int32_t* ids = s.memory.ids(kN, kV);
  void *embedding_table = s.memory.typed(kV * kC), *y = s.memory.typed(kN * kC);
  float* dtable = s.memory.f32(kV * kC);
  const EmbeddingKernels& embedding = *s.k.embedding;
  s.cases.push_back({"embedding forward", Bound::kMemory, 2 * product(kN, kC) * e, 1, false, [=, &embedding] {
                       embedding.forward(y, ids, embedding_table, nullptr, nullptr, kN, kC, t, nullptr);
                     }});
  s.cases.push_back({"embedding backward", Bound::kMemory, product(kN, kC) * (e + 8) + product(kV, kC) * 4, 1, false,
                     [=, &embedding] { embedding.backward(dtable, y, ids, nullptr, kN, kC, kV, {}, t, nullptr); }});

  void* logits = s.memory.typed(kN * kV);
  float* losses = s.memory.f32(kN);
  const CrossEntropyKernels& cross_entropy = *s.k.cross_entropy;
  // In place: later calls see gradients for logits, the same work on other numbers.
  s.cases.push_back({"cross_entropy forward+backward", Bound::kMemory, 2 * product(kN, kV) * e, 1, false,
                     [=, &cross_entropy] { cross_entropy.forward_backward(losses, logits, ids, kN, kV, t, nullptr); }});
}

void add_flat(Suite& s) {
  float *w = s.memory.f32(kParams), *m = s.memory.f32(kParams, 0.01f), *v = s.memory.f32(kParams),
        *grad = s.memory.f32(kParams);
  for (int64_t i = 0; i < kParams; ++i) v[i] = v[i] * v[i];
  void* copy = s.dtype == DType::kF32 ? nullptr : s.memory.typed(kParams);
  static AdamWScalars scalars{1e-9f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.5f, 0.5f, 1e-3f, 0};
  const OptimizerKernels& optimizer = *s.k.optimizer;
  const ReduceKernels& reduce = *s.k.reduce;
  const DType t = s.dtype;
  const double n = static_cast<double>(kParams);
  s.cases.push_back({"adamw 3.3M", Bound::kMemory, n * (28 + (copy != nullptr ? 2 : 0)), 1, false, [=, &optimizer] {
                       optimizer.adamw(w, {m, v}, copy, grad, kParams, &scalars, nullptr, 0, t, nullptr);
                     }});
  static std::vector<double> partials(kParams / 4096 + 1);
  s.cases.push_back({"sum_squares 3.3M", Bound::kMemory, n * 4, 1, false, [=, &reduce] {
                       reduce.sum_squares(partials.data(), grad, 0, static_cast<int64_t>(partials.size()), 4096,
                                          kParams, nullptr);
                     }});
  static std::vector<const float*> srcs;
  for (int i = 0; i < 8; ++i) srcs.push_back(s.memory.f32(kParams / 8));
  s.cases.push_back({"tree_sum 8 x 0.4M", Bound::kMemory, n / 8 * 4 * 9, 0, false,
                     [=, &reduce] { reduce.tree_sum(m, srcs.data(), 8, kParams / 8, nullptr); }});
  void* bf16 = s.memory.f32(kParams / 2 + 1);
  s.cases.push_back({"convert fp32 to bf16 3.3M", Bound::kMemory, n * 6, 0, false,
                     [=, &reduce] { reduce.convert(bf16, w, kParams, DType::kBF16, nullptr); }});
}

void add_decode(Suite& s) {
  const int64_t S = 8, P = 16, length = 256, M = length / P;
  const PagedShape shape{S, kH, kH, kD, P, M, kC, kC, 1.0f / std::sqrt(static_cast<float>(kD))};
  void *q = s.memory.typed(S * kC), *o = s.memory.typed(S * kC);
  void *k_cache = s.memory.typed(S * length * kC), *v_cache = s.memory.typed(S * length * kC);
  int32_t *tables = s.memory.ids(S * M, S * M), *lens = s.memory.ids(S, 1);
  for (int64_t i = 0; i < S; ++i) lens[i] = static_cast<int32_t>(length);
  const PagedAttentionKernels& paged = *s.k.paged_attention;
  const DType t = s.dtype;
  s.cases.push_back({"paged decode 8 x 256", Bound::kMemory, 2 * product(S, length, kC) * s.element(), 0, false,
                     [=, &paged] { paged.decode(o, q, k_cache, v_cache, tables, lens, shape, t, nullptr, nullptr); }});
  for (const int64_t rows : {int64_t{1}, int64_t{8}}) {
    void *x = s.memory.typed(rows * kC), *w = s.memory.typed(2 * kF * kC), *y = s.memory.typed(rows * 2 * kF);
    const GemmKernels& gemm = *s.k.gemm;
    s.cases.push_back({"decode linear 256->1408, " + std::to_string(rows) + " rows", Bound::kMemory,
                       product(2 * kF, kC) * s.element(), 0, true,
                       [=, &gemm] { gemm.linear_forward(y, x, w, nullptr, rows, kC, 2 * kF, t, nullptr); }});
  }
}

// The bounds: the best rate of a large square product, and of a copy that exceeds the caches.
double gemm_peak(const Options& options) {
  const int64_t n = 1024;
  Memory memory(options.dtype);
  void *a = memory.typed(n * n), *b = memory.typed(n * n), *c = memory.typed(n * n);
  const Timing t =
      time_kernel([&] { cpu::gemm().linear_forward(c, a, b, nullptr, n, n, n, options.dtype, nullptr); }, options);
  return 2 * product(n, n, n) / t.best;
}

double copy_bandwidth(const Options& options) {
  std::vector<char> from(size_t{256} << 20, 1), to(from.size());
  const Timing t = time_kernel([&] { std::memcpy(to.data(), from.data(), from.size()); }, options);
  return 2.0 * static_cast<double>(from.size()) / t.best;
}

// The fast kernels against the reference loops on one head's worth of work; the unit tests do this in depth.
bool matches_reference(DType dtype) {
  const int64_t N = 33, I = 72, O = 40;
  Memory memory(dtype);
  void *x = memory.typed(N * I), *w = memory.typed(O * I), *y = memory.typed(N * O), *expected = memory.typed(N * O);
  cpu::gemm().linear_forward(y, x, w, nullptr, N, I, O, dtype, nullptr);
  reference::gemm().linear_forward(expected, x, w, nullptr, N, I, O, dtype, nullptr);
  const AttentionShape shape{1, N, 2, 2, 20, 72, 72, 72, 40, 0.2f};
  void *o = memory.typed(N * 40), *o_expected = memory.typed(N * 40);
  cpu::attention().forward(o, nullptr, x, x, x, shape, dtype, nullptr);
  reference::attention().forward(o_expected, nullptr, x, x, x, shape, dtype, nullptr);
  std::vector<float> got(static_cast<size_t>(N * O)), want(got.size()), got_o(got.size()), want_o(got.size());
  cpu::reduce().convert_to_f32(got.data(), y, N * O, dtype, nullptr);
  cpu::reduce().convert_to_f32(want.data(), expected, N * O, dtype, nullptr);
  cpu::reduce().convert_to_f32(got_o.data(), o, N * 40, dtype, nullptr);
  cpu::reduce().convert_to_f32(want_o.data(), o_expected, N * 40, dtype, nullptr);
  const float relative = dtype == DType::kF32 ? 1e-5f : 1.0f / 128;
  for (size_t i = 0; i < got.size(); ++i) {
    if (!(std::fabs(got[i] - want[i]) <= 1e-4f + relative * std::fabs(want[i]))) return false;
    if (!(std::fabs(got_o[i] - want_o[i]) <= 1e-5f + relative * std::fabs(want_o[i]))) return false;
  }
  return true;
}

int run(const Options& options) {
  cpu::set_num_threads(options.threads);
  std::printf("kernels: %s, %s; %s; %d thread%s; times are the thread's %s\n", cpu::isa_name(), cpu::gemm().library(),
              name_of(options.dtype), options.threads, options.threads == 1 ? "" : "s",
              options.threads == 1 ? "CPU time" : "wall time");
  if (!matches_reference(options.dtype)) {
    std::printf("FAILED: the fast kernels differ from the reference\n");
    return 1;
  }
  const double peak = gemm_peak(options), bandwidth = copy_bandwidth(options);
  std::printf("bounds: GEMM 1024^3 %.1f GFLOP/s, copy of 256 MiB %.1f GB/s (read + write)\n\n", peak / 1e9,
              bandwidth / 1e9);
  Memory memory(options.dtype);
  Suite suite{memory, cpu::kernels(), options.dtype, {}};
  add_linear(suite, "qkv", kC, 3 * kC, kLayers);
  add_linear(suite, "out", kC, kC, kLayers);
  add_linear(suite, "gate_up", kC, 2 * kF, kLayers);
  add_linear(suite, "down", kF, kC, kLayers);
  add_linear(suite, "head", kC, kV, 1);
  add_attention(suite);
  add_norms(suite);
  add_elementwise(suite);
  add_flat(suite);
  add_decode(suite);

  nlohmann::json rows = nlohmann::json::array();
  double gemm_seconds = 0, other_seconds = 0;
  std::printf("%-34s %10s %10s %9s %7s %6s %9s\n", "kernel", "median us", "best us", "rate", "", "bound", "us/step");
  for (const Case& c : suite.cases) {
    const Timing t = time_kernel(c.call, options);
    const double rate = c.work / t.median, bound = c.bound == Bound::kCompute ? peak : bandwidth;
    const char* unit = c.bound == Bound::kCompute ? "GFLOP/s" : "GB/s";
    (c.is_gemm ? gemm_seconds : other_seconds) += t.median * c.per_step;
    std::printf("%-34s %10.1f %10.1f %9.1f %-7s %5.0f%% %9.0f\n", c.name.c_str(), t.median * 1e6, t.best * 1e6,
                rate / 1e9, unit, 100 * rate / bound, t.median * c.per_step * 1e6);
    rows.push_back({{"kernel", c.name},
                    {"median_us", t.median * 1e6},
                    {"best_us", t.best * 1e6},
                    {"rate", rate / 1e9},
                    {"unit", unit},
                    {"of_bound", rate / bound},
                    {"calls_per_step", c.per_step},
                    {"repetitions", t.repetitions}});
  }
  const double step = gemm_seconds + other_seconds;
  std::printf(
      "\none training step (B %ld, T %ld): GEMM %.1f ms, all else %.1f ms (%.0f%% of GEMM); kernels alone allow %.0f "
      "tokens/s\n",
      static_cast<long>(kB), static_cast<long>(kT), gemm_seconds * 1e3, other_seconds * 1e3,
      100 * other_seconds / gemm_seconds, static_cast<double>(kN) / step);
  if (!options.json.empty()) {
    std::ofstream(options.json) << nlohmann::json{{"isa", cpu::isa_name()},
                                                  {"gemm", cpu::gemm().library()},
                                                  {"dtype", name_of(options.dtype)},
                                                  {"threads", options.threads},
                                                  {"gemm_peak_gflops", peak / 1e9},
                                                  {"copy_gbs", bandwidth / 1e9},
                                                  {"step_gemm_ms", gemm_seconds * 1e3},
                                                  {"step_other_ms", other_seconds * 1e3},
                                                  {"kernels", rows}}
                                       .dump(2)
                                << "\n";
  }
  return 0;
}

}  // namespace
}  // namespace kintsugi::kernels

int main(int argc, char** argv) {
  kintsugi::kernels::Options options;
  std::string dtype = "fp32";
  CLI::App app("Times the CPU kernels at the benchmark model's shapes.");
  app.add_option("--seconds", options.seconds, "time spent on each kernel")->capture_default_str();
  app.add_option("--threads", options.threads, "threads of the kernels")
      ->capture_default_str()
      ->check(CLI::Range(1, 1024));
  app.add_option("--dtype", dtype, "storage of activations and matrices")
      ->capture_default_str()
      ->check(CLI::IsMember({"fp32", "bf16"}));
  app.add_option("--json", options.json, "also write the results to this file");
  CLI11_PARSE(app, argc, argv);
  options.dtype = dtype == "fp32" ? kintsugi::kernels::DType::kF32 : kintsugi::kernels::DType::kBF16;
  return kintsugi::kernels::run(options);
}
