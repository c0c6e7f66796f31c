// Matrix products and attention of the four training shapes, as their libraries run them.
//   N rows   I input width   O output width   B batch   T tokens   H query heads   K key/value heads   D head size
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "experiments/kernels_cuda/bench.h"
#include "kernels/cuda/attention_cudnn.h"
#include "kernels/cuda/attention_hopper.h"
#include "kernels/cuda/attention_plain.h"
#include "kernels/cuda/gemm_tuning.h"
#include "kernels/cuda/libraries.h"

namespace kintsugi::kernels_cuda {
namespace {

using kernels::AttentionShape;
using kernels::cuda::GemmOp;
using kernels::cuda::GemmProblem;
using kernels::cuda::GemmTuning;

constexpr double kPeakTflops = 989.4;  // bf16, dense

struct ModelShape {
  const char* name;
  int64_t B, T, layers, C, H, K, D, F, V;
};
constexpr ModelShape kModels[] = {{"124M", 64, 1024, 12, 768, 12, 12, 64, 2048, 50304},
                                  {"1B", 4, 4096, 16, 2048, 32, 8, 64, 8192, 128256},
                                  {"XL", 16, 1024, 48, 1600, 25, 25, 64, 4352, 50304},
                                  {"8B slice", 1, 8192, 8, 4096, 32, 8, 128, 14336, 128256}};

struct Product {
  const char* name;
  int64_t I, O, times;  // how often a step runs it
};
std::vector<Product> products_of(const ModelShape& m) {
  return {{"qkv", m.C, (m.H + 2 * m.K) * m.D, m.layers},
          {"o", m.H * m.D, m.C, m.layers},
          {"up", m.C, 2 * m.F, m.layers},
          {"down", m.F, m.C, m.layers},
          {"head", m.C, m.V, 1}};
}

// The weight gradient of a step's second micro-batch accumulates; its first overwrites. The same time within noise.
std::vector<GemmProblem> problems_of(const ModelShape& m, const Product& p) {
  const int64_t N = m.B * m.T;
  return {
      {GemmOp::kForward, N, p.I, p.O}, {GemmOp::kBackwardInput, N, p.I, p.O}, {GemmOp::kBackwardWeight, N, p.I, p.O}};
}

const GemmTuning* find(const std::vector<GemmTuning>& report, const GemmProblem& problem) {
  for (const GemmTuning& t : report) {
    if (t.problem == problem) return &t;
  }
  return nullptr;
}

double tflops(const GemmProblem& p, double us) {
  return 2.0 * static_cast<double>(p.N) * static_cast<double>(p.I) * static_cast<double>(p.O) / us / 1e6;
}

AttentionShape attention_shape(const ModelShape& m, bool deterministic) {
  const int64_t stride = (m.H + 2 * m.K) * m.D;
  return {m.B,          m.T,    m.H,    m.K,       m.D,
          stride,       stride, stride, m.H * m.D, 1.0f / std::sqrt(static_cast<float>(m.D)),
          deterministic};
}

// Whichever implementation is timed.
int64_t backward_workspace_bytes(const AttentionShape& s) {
  return std::max({kernels::cuda::attention().backward_workspace_bytes(s, DType::kBF16),
                   kernels::cuda::cudnn_attention_workspace_bound(s), kernels::cuda::plain_attention_workspace_bytes(s),
                   kernels::cuda::hopper_attention_workspace_bytes(s)});
}

struct AttentionBuffers {
  AttentionBuffers(Pool& pool, const AttentionShape& s)
      : qkv(pool.take<char>(s.B * s.T * s.q_stride * 2)),
        d_qkv(pool.take<char>(s.B * s.T * s.q_stride * 2)),
        o(pool.take(s.B * s.T * s.o_stride * 2)),
        d_o(pool.take(s.B * s.T * s.o_stride * 2)),
        lse(pool.take<float>(s.B * s.H * s.T * 4)),
        workspace(pool.take(backward_workspace_bytes(s))),
        k_at(s.H * s.D * 2),
        v_at((s.H + s.K) * s.D * 2) {}
  char *qkv, *d_qkv;
  void *o, *d_o;
  float* lse;
  void* workspace;
  int64_t k_at, v_at;
};

// Passes of the library and of ours, called past the table that chooses between them.
struct AttentionForward {
  const char* name;
  KernelError (*call)(void* o, float* lse, const void* q, const void* k, const void* v, const AttentionShape& shape,
                      kernels::StreamHandle stream);
};
struct AttentionBackward {
  const char* name;
  bool deterministic;
  KernelError (*call)(void* dq, void* dk, void* dv, const void* d_o, const void* o, const float* lse, const void* q,
                      const void* k, const void* v, const AttentionShape& shape, void* workspace,
                      kernels::StreamHandle stream);
};

std::string shape_text(const ModelShape& m) {
  return std::string(m.name) + ", " + std::to_string(m.B) + " x " + std::to_string(m.T);
}

void add_backward(std::vector<Case>& cases, const ModelShape& m, const AttentionBackward& pass) {
  const double operations = 5.0 * static_cast<double>(m.B * m.H * m.T) * static_cast<double>(m.T * m.D);
  cases.push_back({pass.name, shape_text(m), 0, operations, [=](Pool& pool) -> Launch {
                     const AttentionShape s = attention_shape(m, pass.deterministic);
                     const AttentionBuffers b(pool, s);
                     return [=](cudaStream_t stream) {
                       return pass.call(b.d_qkv, b.d_qkv + b.k_at, b.d_qkv + b.v_at, b.d_o, b.o, b.lse, b.qkv,
                                        b.qkv + b.k_at, b.qkv + b.v_at, s, b.workspace, stream);
                     };
                   }});
}

void add_forward(std::vector<Case>& cases, const ModelShape& m, const AttentionForward& pass) {
  const double operations = 2.0 * static_cast<double>(m.B * m.H * m.T) * static_cast<double>(m.T * m.D);
  cases.push_back({pass.name, shape_text(m), 0, operations, [=](Pool& pool) -> Launch {
                     const AttentionShape s = attention_shape(m, true);
                     const AttentionBuffers b(pool, s);
                     return [=](cudaStream_t stream) {
                       return pass.call(b.o, b.lse, b.qkv, b.qkv + b.k_at, b.qkv + b.v_at, s, stream);
                     };
                   }});
}

void add_attention(std::vector<Case>& cases, const ModelShape& m) {
  add_forward(cases, m, {"attention cuDNN forward", kernels::cuda::cudnn_attention_forward});
  add_backward(cases, m, {"attention cuDNN backward", false, kernels::cuda::cudnn_attention_backward});
  add_backward(cases, m, {"attention cuDNN backward repeatable", true, kernels::cuda::cudnn_attention_backward});
  if (!kernels::cuda::hopper_attention_applies(attention_shape(m, true), DType::kBF16)) return;
  add_forward(cases, m, {"attention own forward", kernels::cuda::hopper_attention_forward});
  add_backward(cases, m, {"attention own backward repeatable", true, kernels::cuda::hopper_attention_backward});
}

void add_plain_attention(std::vector<Case>& cases, const ModelShape& m) {
  add_forward(cases, m,
              {"attention plain forward", [](void* o, float* lse, const void* q, const void* k, const void* v,
                                             const AttentionShape& s, kernels::StreamHandle stream) {
                 return kernels::cuda::plain_attention_forward(o, lse, q, k, v, s, DType::kBF16, stream);
               }});
  add_backward(
      cases, m,
      {"attention plain backward repeatable", true,
       [](void* dq, void* dk, void* dv, const void* d_o, const void* o, const float* lse, const void* q, const void* k,
          const void* v, const AttentionShape& s, void* workspace, kernels::StreamHandle stream) {
         return kernels::cuda::plain_attention_backward(dq, dk, dv, d_o, o, lse, q, k, v, s, workspace, DType::kBF16,
                                                        stream);
       }});
}

// Packed documents: the library's kernels with their mask, whose time does not depend on where the borders are, and
// what it takes to write the mask, once a batch.
void add_documents(std::vector<Case>& cases, const ModelShape& m) {
  const double operations = 2.0 * static_cast<double>(m.B * m.H * m.T) * static_cast<double>(m.T * m.D);
  const std::string shape = shape_text(m);
  const auto mask_bytes = kernels::cuda::attention().document_mask_bytes(attention_shape(m, true), DType::kBF16);
  const auto masked = [=](Pool& pool, bool deterministic) {
    AttentionShape s = attention_shape(m, deterministic);
    s.document_starts = pool.take<int32_t>(m.B * m.T * 4);
    s.document_mask = pool.take(mask_bytes);
    return s;
  };
  cases.push_back({"document mask", shape, static_cast<double>(mask_bytes), 0, [=](Pool& pool) -> Launch {
                     const AttentionShape s = masked(pool, true);
                     return [=](cudaStream_t stream) {
                       return kernels::cuda::attention().write_document_mask(const_cast<void*>(s.document_mask), s,
                                                                             DType::kBF16, stream);
                     };
                   }});
  cases.push_back({"attention documents forward", shape, 0, operations, [=](Pool& pool) -> Launch {
                     const AttentionShape s = masked(pool, true);
                     const AttentionBuffers b(pool, s);
                     return [=](cudaStream_t stream) {
                       return kernels::cuda::attention().forward(b.o, b.lse, b.qkv, b.qkv + b.k_at, b.qkv + b.v_at, s,
                                                                 DType::kBF16, stream);
                     };
                   }});
  for (const bool deterministic : {true, false}) {
    cases.push_back({std::string("attention documents backward") + (deterministic ? " repeatable" : ""), shape, 0,
                     2.5 * operations, [=](Pool& pool) -> Launch {
                       const AttentionShape s = masked(pool, deterministic);
                       const AttentionBuffers b(pool, s);
                       return [=](cudaStream_t stream) {
                         return kernels::cuda::attention().backward(b.d_qkv, b.d_qkv + b.k_at, b.d_qkv + b.v_at, b.d_o,
                                                                    b.o, b.lse, b.qkv, b.qkv + b.k_at, b.qkv + b.v_at,
                                                                    s, b.workspace, DType::kBF16, stream);
                       };
                     }});
  }
}

// The product in front of attention, whose heads are turned in it, and the library's product and then the rotation.
void add_rotary(std::vector<Case>& cases, const ModelShape& m) {
  const int64_t N = m.B * m.T, C = m.C, turned = m.H + m.K, heads = turned + m.K, D = m.D, T = m.T;
  const double operations = 2.0 * static_cast<double>(N) * static_cast<double>(C * heads * D);
  const std::string shape = std::string(m.name) + ", " + std::to_string(N) + " x " + std::to_string(C);
  for (const bool at_once : {true, false}) {
    cases.push_back(
        {at_once ? "linear and rope at once" : "linear and rope in a row", shape, 0, operations,
         [=](Pool& pool) -> Launch {
           void* y = pool.take(N * heads * D * 2);
           const void *x = pool.take(N * C * 2), *w = pool.take(heads * D * C * 2);
           const kernels::HeadRotation rotation{integers(pool, N, T, 1), pool.take<float>(T * D * 4), turned, heads, D};
           return [=](cudaStream_t stream) -> KernelError {
             const kernels::GemmKernels& k = kernels::cuda::gemm();
             if (at_once) {
               return k.linear_rotary_forward(y, x, w, nullptr, rotation, N, C, DType::kBF16, stream);
             }
             const KernelError error = k.linear_forward(y, x, w, nullptr, N, C, heads * D, DType::kBF16, stream);
             return error != kernels::kKernelOk
                        ? error
                        : kernels::cuda::rope().rotate(y, rotation.positions, rotation.cos_sin, N, turned, D, heads * D,
                                                       false, DType::kBF16, stream);
           };
         }});
  }
}

struct EpilogueCase {
  const char* what;
  GemmProblem problem;
};
// GPT-2's products of N rows: with what follows them fused into their epilogue, and without.
std::vector<EpilogueCase> epilogue_cases(int64_t N, int64_t C) {
  using enum kernels::cuda::GemmEpilogue;
  const int64_t F = 4 * C;
  constexpr DType t = DType::kBF16;
  return {{"up", {GemmOp::kForward, N, C, F, t, false, kNone}},
          {"up, bias", {GemmOp::kForward, N, C, F, t, false, kBias}},
          {"up, bias, gelu", {GemmOp::kForward, N, C, F, t, false, kBiasGelu}},
          {"down's input gradient", {GemmOp::kBackwardInput, N, F, C, t, false, kNone}},
          {"down's input gradient, gelu's", {GemmOp::kBackwardInput, N, F, C, t, false, kGeluGradient}},
          {"up's weight gradient", {GemmOp::kBackwardWeight, N, C, F, t, false, kNone}},
          {"up's weight gradient, bias's", {GemmOp::kBackwardWeight, N, C, F, t, false, kBiasGradient}},
          {"down's weight gradient", {GemmOp::kBackwardWeight, N, F, C, t, false, kNone}},
          {"down's weight gradient, bias's", {GemmOp::kBackwardWeight, N, F, C, t, false, kBiasGradient}},
          {"qkv's weight gradient", {GemmOp::kBackwardWeight, N, C, 3 * C, t, false, kNone}},
          {"qkv's weight gradient, bias's", {GemmOp::kBackwardWeight, N, C, 3 * C, t, false, kBiasGradient}}};
}

}  // namespace

std::vector<Case> bias_gradient_cases() {
  std::vector<Case> cases;
  for (const auto& [N, O] : {std::pair<int64_t, int64_t>{65536, 768}, {65536, 3072}, {16384, 1600}, {16384, 6400}}) {
    cases.push_back({"bias gradient", std::to_string(N) + " x " + std::to_string(O), 2.0 * static_cast<double>(N * O),
                     0, [N = N, O = O](Pool& pool) -> Launch {
                       float* dbias = pool.take<float>(O * 4);
                       const void* dy = pool.take(N * O * 2);
                       return [=](cudaStream_t stream) {
                         return kernels::cuda::gemm().linear_backward_bias(dbias, dy, N, O, false, DType::kBF16,
                                                                           stream);
                       };
                     }});
  }
  return cases;
}

nlohmann::json bench_epilogues(Pool& pool, cudaStream_t stream) {
  nlohmann::json rows = nlohmann::json::array();
  for (const auto& [N, C] : {std::pair<int64_t, int64_t>{65536, 768}, {16384, 1600}}) {
    for (const EpilogueCase& c : epilogue_cases(N, C)) {
      const std::vector<GemmProblem> problems = {c.problem};
      pool.reset();
      const int64_t scratch_bytes = kernels::cuda::gemm_tuning_scratch_bytes(problems);
      void* scratch = pool.take(scratch_bytes);
      kernels::cuda::GemmTable table;
      std::vector<GemmTuning> report;
      const KernelError error =
          kernels::cuda::tune_gemms(&table, problems, scratch, scratch_bytes, {}, stream, &report);
      if (error != kernels::kKernelOk) {
        std::printf("  %-32s N %lld C %lld: %s\n", c.what, static_cast<long long>(N), static_cast<long long>(C),
                    kernels::cuda::kernels().error_text(error).c_str());
        continue;
      }
      const GemmTuning& t = report.front();
      std::printf("  %-32s N %lld C %lld first %8.1f us, best %8.1f us %6.1f TFLOP/s (%d of %d)\n", c.what,
                  static_cast<long long>(N), static_cast<long long>(C), t.first_us, t.best_us,
                  tflops(t.problem, t.best_us), t.taken, t.candidates);
      rows.push_back({{"what", c.what}, {"N", N}, {"C", C}, {"first_us", t.first_us}, {"best_us", t.best_us}});
    }
  }
  return rows;
}

std::vector<Case> fused_product_cases() {
  std::vector<Case> cases;
  for (const ModelShape& m : kModels) {
    add_rotary(cases, m);
    const int64_t N = m.B * m.T, C = m.C, F = m.F;
    const double operations = 2.0 * static_cast<double>(N) * static_cast<double>(C * F);
    const std::string shape = std::string(m.name) + ", " + std::to_string(N) + " x " + std::to_string(C);
    cases.push_back({"linear and swiglu forward", shape, 0, 2 * operations, [=](Pool& pool) -> Launch {
                       void *y = pool.take(N * F * 2), *gate_up = pool.take(N * F * 4);
                       const void *x = pool.take(N * C * 2), *w = pool.take(F * C * 4);
                       return [=](cudaStream_t stream) {
                         return kernels::cuda::gemm().linear_swiglu_forward(y, gate_up, x, w, nullptr, N, C, F,
                                                                            DType::kBF16, stream);
                       };
                     }});
    cases.push_back({"linear and swiglu backward", shape, 0, operations, [=](Pool& pool) -> Launch {
                       void *d = pool.take(N * F * 4), *d_act = pool.take(N * F * 2);
                       const void *dy = pool.take(N * C * 2), *w = pool.take(F * C * 2),
                                  *gate_up = pool.take(N * F * 4);
                       return [=](cudaStream_t stream) {
                         return kernels::cuda::gemm().linear_swiglu_backward_input(d, d_act, dy, w, gate_up, N, F, C,
                                                                                   DType::kBF16, stream);
                       };
                     }});
  }
  return cases;
}

std::vector<Case> attention_cases() {
  std::vector<Case> cases;
  for (const ModelShape& m : kModels) add_attention(cases, m);
  for (const ModelShape& m : kModels) add_documents(cases, m);
  add_plain_attention(cases, kModels[0]);
  return cases;
}

nlohmann::json attention_builds() {
  nlohmann::json rows = nlohmann::json::array();
  for (const ModelShape& m : kModels) {
    for (const bool deterministic : {true, false}) {
      const AttentionShape s = attention_shape(m, deterministic);
      const auto begin = std::chrono::steady_clock::now();
      KernelError error = kernels::cuda::cudnn_attention_prepare(s, kernels::cuda::AttentionPass::kForwardWithLse);
      if (error == 0) error = kernels::cuda::cudnn_attention_prepare(s, kernels::cuda::AttentionPass::kBackward);
      const double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
      const auto bytes = [&](kernels::cuda::AttentionPass pass) {
        return kernels::cuda::cudnn_attention_scratch_bytes(s, pass);
      };
      const int64_t forward = bytes(kernels::cuda::AttentionPass::kForwardWithLse),
                    backward = bytes(kernels::cuda::AttentionPass::kBackward),
                    planned = kernels::cuda::cudnn_attention_workspace_bound(s);
      std::printf("attention graphs %-9s %-11s error %d, %6.0f ms, scratch forward %lld, backward %lld of %lld: %s\n",
                  m.name, deterministic ? "repeatable" : "", error, ms, static_cast<long long>(forward),
                  static_cast<long long>(backward), static_cast<long long>(planned),
                  kernels::cuda::attention().library(s, DType::kBF16));
      rows.push_back({{"shape", m.name},
                      {"repeatable", deterministic},
                      {"build_ms", ms},
                      {"forward_bytes", forward},
                      {"backward_bytes", backward},
                      {"planned_bytes", planned}});
    }
  }
  return rows;
}

void print_attention_plans(Pool& pool, cudaStream_t stream) {
  using enum kernels::cuda::AttentionPass;
  for (const ModelShape& m : kModels) {
    for (const auto& [pass, deterministic, name] : {std::tuple{kForwardWithLse, true, "forward"},
                                                    {kBackward, true, "backward repeatable"},
                                                    {kBackward, false, "backward"}}) {
      const AttentionShape s = attention_shape(m, deterministic);
      pool.reset();
      const AttentionBuffers b(pool, s);
      std::vector<void*> operands = {b.qkv, b.qkv + b.k_at, b.qkv + b.v_at, b.o, b.lse};
      if (pass == kBackward) {
        for (void* p : {b.d_o, static_cast<void*>(b.d_qkv), static_cast<void*>(b.d_qkv + b.k_at),
                        static_cast<void*>(b.d_qkv + b.v_at)}) {
          operands.push_back(p);
        }
      }
      for (const kernels::cuda::CudnnPlanTime& t : kernels::cuda::time_cudnn_attention_plans(
               s, pass, operands, b.workspace, backward_workspace_bytes(s), stream)) {
        std::printf("  %-9s %-20s %9.1f us %12lld bytes %s\n", m.name, name, t.microseconds,
                    static_cast<long long>(t.workspace_bytes), t.name.c_str());
      }
    }
  }
}

nlohmann::json bench_gemms(Pool& pool, cudaStream_t stream) {
  nlohmann::json rows = nlohmann::json::array();
  for (const ModelShape& m : kModels) {
    std::vector<GemmProblem> problems;
    for (const Product& p : products_of(m)) {
      for (const GemmProblem& problem : problems_of(m, p)) problems.push_back(problem);
    }
    pool.reset();
    const int64_t scratch_bytes = kernels::cuda::gemm_tuning_scratch_bytes(problems);
    void* scratch = pool.take(scratch_bytes);
    kernels::cuda::GemmTable table;
    std::vector<GemmTuning> report;
    const auto begin = std::chrono::steady_clock::now();
    const KernelError error =
        scratch == nullptr ? cudaErrorMemoryAllocation
                           : kernels::cuda::tune_gemms(&table, problems, scratch, scratch_bytes, {}, stream, &report);
    const double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
    std::printf("products of %s: error %d, tuned in %.0f ms\n", m.name, error, ms);
    double first_ms = 0, best_ms = 0, operations = 0;
    for (const Product& p : products_of(m)) {
      for (const GemmProblem& problem : problems_of(m, p)) {
        const GemmTuning* t = find(report, problem);
        if (t == nullptr) continue;
        const double first = tflops(problem, t->first_us), best = tflops(problem, t->best_us);
        std::printf(
            "  %-5s %-15s N %6lld I %5lld O %6lld  first %9.1f us %6.1f  best %9.1f us %6.1f TFLOP/s %5.1f %% "
            "(%d of %d)\n",
            p.name,
            problem.op == GemmOp::kForward         ? "forward"
            : problem.op == GemmOp::kBackwardInput ? "backward input"
                                                   : "backward weight",
            static_cast<long long>(problem.N), static_cast<long long>(problem.I), static_cast<long long>(problem.O),
            t->first_us, first, t->best_us, best, 100 * best / kPeakTflops, t->taken, t->candidates);
        const auto times = static_cast<double>(p.times);
        first_ms += times * t->first_us / 1000;
        best_ms += times * t->best_us / 1000;
        operations += times * tflops(problem, 1.0) * 1e6;
        rows.push_back({{"shape", m.name},
                        {"product", p.name},
                        {"problem", to_string(problem)},
                        {"first_us", t->first_us},
                        {"best_us", t->best_us},
                        {"tflop_per_s", best},
                        {"taken", t->taken}});
      }
    }
    std::printf("  a step's products: %.2f ms with the library's first choice, %.2f ms (%.1f TFLOP/s) tuned\n",
                first_ms, best_ms, operations / best_ms / 1e9);
    rows.push_back({{"shape", m.name}, {"tuning_ms", ms}, {"step_first_ms", first_ms}, {"step_best_ms", best_ms}});
  }
  return rows;
}

}  // namespace kintsugi::kernels_cuda
