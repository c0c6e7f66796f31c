// The memory-bound families at training shapes.   N rows   C width   F hidden width   V vocabulary   D head size
#include <array>
#include <cmath>
#include <random>

#include "experiments/kernels_cuda/bench.h"

namespace kintsugi::kernels_cuda {

int32_t* integers(Pool& pool, int64_t n, int64_t bound, int64_t step) {
  std::vector<int32_t> values(static_cast<size_t>(n));
  std::mt19937 rng(2);
  for (int64_t i = 0; i < n; ++i) {
    values[static_cast<size_t>(i)] = static_cast<int32_t>(step > 0 ? i / step % bound : rng() % bound);
  }
  int32_t* device = pool.take<int32_t>(4 * n);
  if (!pool.exhausted()) cudaMemcpy(device, values.data(), static_cast<size_t>(4 * n), cudaMemcpyHostToDevice);
  return device;
}

namespace {

constexpr DType kType = DType::kBF16;
const kernels::KernelTable& table() { return kernels::cuda::kernels(); }
std::string rows_by(int64_t N, int64_t C) { return std::to_string(N) + " x " + std::to_string(C); }

void* bf16(Pool& pool, int64_t n) { return pool.take(2 * n); }
float* f32(Pool& pool, int64_t n) { return pool.take<float>(4 * n); }

double as_bytes(int64_t n) { return static_cast<double>(n); }

void add_norms(std::vector<Case>& cases, int64_t N, int64_t C) {
  cases.push_back({"rms_norm forward", rows_by(N, C), as_bytes(4 * N * C), 0, [=](Pool& p) -> Launch {
                     void *y = bf16(p, N * C), *x = bf16(p, N * C);
                     float *rstd = f32(p, N), *w = f32(p, C);
                     return [=](cudaStream_t s) {
                       return table().norm->rms_norm_forward(y, rstd, x, w, N, C, {}, 1e-5f, kType, s);
                     };
                   }});
  cases.push_back({"residual_rms_norm forward", rows_by(N, C), as_bytes(8 * N * C), 0, [=](Pool& p) -> Launch {
                     void *sum = bf16(p, N * C), *y = bf16(p, N * C), *x = bf16(p, N * C), *r = bf16(p, N * C);
                     float *rstd = f32(p, N), *w = f32(p, C);
                     return [=](cudaStream_t s) {
                       return table().norm->residual_rms_norm_forward(sum, y, rstd, x, r, w, N, C, 1e-5f, kType, s);
                     };
                   }});
  cases.push_back({"residual_layer_norm forward", rows_by(N, C), as_bytes(8 * N * C), 0, [=](Pool& p) -> Launch {
                     void *sum = bf16(p, N * C), *y = bf16(p, N * C), *x = bf16(p, N * C), *r = bf16(p, N * C);
                     float *mean = f32(p, N), *rstd = f32(p, N), *w = f32(p, C), *b = f32(p, C);
                     return [=](cudaStream_t s) {
                       return table().norm->residual_layer_norm_forward(sum, y, mean, rstd, x, r, w, b, N, C, 1e-5f,
                                                                        kType, s);
                     };
                   }});
  cases.push_back({"rms_norm backward", rows_by(N, C), as_bytes(8 * N * C), 0, [=](Pool& p) -> Launch {
                     void *dx = bf16(p, N * C), *dy = bf16(p, N * C), *x = bf16(p, N * C), *r = bf16(p, N * C);
                     float *rstd = f32(p, N), *w = f32(p, C), *dw = f32(p, C);
                     void* space = p.take(table().norm->backward_workspace_bytes(N, C));
                     return [=](cudaStream_t s) {
                       return table().norm->rms_norm_backward(dx, dw, dy, x, w, rstd, r, N, C, {}, true, space, kType,
                                                              s);
                     };
                   }});
  cases.push_back({"layer_norm backward", rows_by(N, C), as_bytes(8 * N * C), 0, [=](Pool& p) -> Launch {
                     void *dx = bf16(p, N * C), *dy = bf16(p, N * C), *x = bf16(p, N * C), *r = bf16(p, N * C);
                     float *mean = f32(p, N), *rstd = f32(p, N), *w = f32(p, C), *dw = f32(p, C), *db = f32(p, C);
                     void* space = p.take(table().norm->backward_workspace_bytes(N, C));
                     return [=](cudaStream_t s) {
                       return table().norm->layer_norm_backward(dx, dw, db, dy, x, w, mean, rstd, r, N, C, true, space,
                                                                kType, s);
                     };
                   }});
}

// QK-norm and rotation inside packed q, k and v: H query and K key heads.
void add_heads(std::vector<Case>& cases, int64_t N, int64_t H, int64_t K, int64_t D) {
  const int64_t stride = (H + 2 * K) * D, rows = N * H;
  const std::string shape = rows_by(N, H) + " heads of " + std::to_string(D);
  const kernels::RowLayout layout{H, stride};
  cases.push_back({"qk_norm forward", shape, as_bytes(4 * rows * D), 0, [=](Pool& p) -> Launch {
                     void *y = bf16(p, N * stride), *x = bf16(p, N * stride);
                     float *rstd = f32(p, rows), *w = f32(p, D);
                     return [=](cudaStream_t s) {
                       return table().norm->rms_norm_forward(y, rstd, x, w, rows, D, layout, 1e-5f, kType, s);
                     };
                   }});
  cases.push_back({"qk_norm backward", shape, as_bytes(6 * rows * D), 0, [=](Pool& p) -> Launch {
                     void *dy = bf16(p, N * stride), *x = bf16(p, N * stride);
                     float *rstd = f32(p, rows), *w = f32(p, D), *dw = f32(p, D);
                     void* space = p.take(table().norm->backward_workspace_bytes(rows, D));
                     return [=](cudaStream_t s) {
                       return table().norm->rms_norm_backward(dy, dw, dy, x, w, rstd, nullptr, rows, D, layout, true,
                                                              space, kType, s);
                     };
                   }});
  cases.push_back({"rope", rows_by(N, H + K) + " of " + std::to_string(D), as_bytes(4 * N * (H + K) * D), 0,
                   [=](Pool& p) -> Launch {
                     void* x = bf16(p, N * stride);
                     int32_t* positions = integers(p, N, 1024, 1);
                     float* cos_sin = f32(p, 1024 * D);
                     return [=](cudaStream_t s) {
                       return table().rope->rotate(x, positions, cos_sin, N, H + K, D, stride, false, kType, s);
                     };
                   }});
}

void add_activations(std::vector<Case>& cases, int64_t N, int64_t F) {
  cases.push_back({"swiglu forward", rows_by(N, F), as_bytes(6 * N * F), 0, [=](Pool& p) -> Launch {
                     void *y = bf16(p, N * F), *gate_up = bf16(p, 2 * N * F);
                     return
                         [=](cudaStream_t s) { return table().activation->swiglu_forward(y, gate_up, N, F, kType, s); };
                   }});
  cases.push_back({"swiglu backward", rows_by(N, F), as_bytes(10 * N * F), 0, [=](Pool& p) -> Launch {
                     void *d = bf16(p, 2 * N * F), *dy = bf16(p, N * F), *gate_up = bf16(p, 2 * N * F);
                     return [=](cudaStream_t s) {
                       return table().activation->swiglu_backward(d, dy, gate_up, N, F, kType, s);
                     };
                   }});
  cases.push_back({"gelu forward", rows_by(N, F), as_bytes(4 * N * F), 0, [=](Pool& p) -> Launch {
                     void *y = bf16(p, N * F), *x = bf16(p, N * F);
                     return [=](cudaStream_t s) { return table().activation->gelu_forward(y, x, N, F, kType, s); };
                   }});
  cases.push_back({"gelu backward", rows_by(N, F), as_bytes(6 * N * F), 0, [=](Pool& p) -> Launch {
                     void *dx = bf16(p, N * F), *dy = bf16(p, N * F), *x = bf16(p, N * F);
                     return
                         [=](cudaStream_t s) { return table().activation->gelu_backward(dx, dy, x, N, F, kType, s); };
                   }});
}

void add_loss(std::vector<Case>& cases, int64_t N, int64_t V) {
  if (table().cross_entropy->forward == nullptr) return;
  cases.push_back({"cross_entropy forward", rows_by(N, V), as_bytes(2 * N * V), 0, [=](Pool& p) -> Launch {
                     void* logits = bf16(p, N * V);
                     int32_t* targets = integers(p, N, V, 0);
                     float* losses = f32(p, N);
                     return [=](cudaStream_t s) {
                       return table().cross_entropy->forward(losses, logits, targets, N, V, kType, s);
                     };
                   }});
  cases.push_back({"cross_entropy fwd+bwd", rows_by(N, V), as_bytes(4 * N * V), 0, [=](Pool& p) -> Launch {
                     void* logits = bf16(p, N * V);
                     int32_t* targets = integers(p, N, V, 0);
                     float* losses = f32(p, N);
                     return [=](cudaStream_t s) {
                       return table().cross_entropy->forward_backward(losses, logits, targets, N, V, kType, s);
                     };
                   }});
}

void add_embedding(std::vector<Case>& cases, int64_t N, int64_t C, int64_t rows, int64_t id_step) {
  if (table().embedding->forward == nullptr) return;
  const std::string shape = rows_by(N, C) + " of " + std::to_string(rows);
  cases.push_back({"embedding forward", shape, as_bytes(4 * N * C), 0, [=](Pool& p) -> Launch {
                     void *y = bf16(p, N * C), *weights = bf16(p, rows * C);
                     int32_t* ids = integers(p, N, rows, id_step);
                     return [=](cudaStream_t s) {
                       return table().embedding->forward(y, ids, weights, nullptr, nullptr, N, C, kType, s);
                     };
                   }});
  const int64_t index_bytes = table().embedding->index_bytes(N, rows);
  cases.push_back({"embedding index", shape, as_bytes(8 * N), 0, [=](Pool& p) -> Launch {
                     int32_t* ids = integers(p, N, rows, id_step);
                     void* index = p.take(index_bytes);
                     return [=](cudaStream_t s) { return table().embedding->index(index, ids, N, rows, {}, s); };
                   }});
  enum class Rows { kAll, kAddedTo, kUsed };
  for (const Rows which : {Rows::kAll, Rows::kAddedTo, Rows::kUsed}) {
    // Rows that occur are read and written when they are added to; otherwise they, or all rows, are written.
    const double used = static_cast<double>(rows) * (1 - std::pow(1 - 1.0 / static_cast<double>(rows), N));
    const double written = which == Rows::kAll ? static_cast<double>(rows) : which == Rows::kUsed ? used : 2 * used;
    const double bytes = as_bytes(2 * N * C + 4 * N) + 4.0 * static_cast<double>(C) * written;
    const std::string name = which == Rows::kAll    ? "embedding backward"
                             : which == Rows::kUsed ? "embedding backward, used rows"
                                                    : "embedding backward, added";
    const auto add = [&](const std::string& what, bool with_index) {
      cases.push_back({what, shape, bytes, 0, [=](Pool& p) -> Launch {
                         void* dy = bf16(p, N * C);
                         float* dtable = f32(p, rows * C);
                         int32_t* ids = integers(p, N, rows, id_step);
                         void* index = p.take(index_bytes);
                         const kernels::TableUpdate update{which == Rows::kAddedTo,
                                                           which == Rows::kUsed ? p.take<int32_t>(4 * rows) : nullptr};
                         if (!p.exhausted()) table().embedding->index(index, ids, N, rows, update, nullptr);
                         cudaDeviceSynchronize();
                         return [=](cudaStream_t s) {
                           const kernels::EmbeddingKernels& k = *table().embedding;
                           if (with_index) {
                             const kernels::KernelError error = k.index(index, ids, N, rows, update, s);
                             if (error != kernels::kKernelOk) return error;
                           }
                           return k.backward(dtable, dy, ids, index, N, C, rows, update, kType, s);
                         };
                       }});
    };
    add(name, false);
    add(name + ", with its index", true);
  }
}

// n elements as rows of 4,096, of which every 16th is used where `table`.
constexpr int64_t kUsedOf = 16;
kernels::Gradient gradient_of(Pool& p, const float* x, int64_t n, bool table) {
  kernels::Gradient g(x);
  if (!table) return g;
  g.width = 4096;
  g.rows = n / g.width;
  std::vector<int32_t> used(static_cast<size_t>(g.rows));
  for (size_t row = 0; row < used.size(); row += kUsedOf) used[row] = 1;
  auto* marks = p.take<int32_t>(4 * g.rows);
  if (!p.exhausted()) cudaMemcpy(marks, used.data(), used.size() * 4, cudaMemcpyHostToDevice);
  g.used = marks;
  return g;
}

// Bytes an element: weight and moments in and out, the gradient in, the bf16 copy out.
void add_adamw(std::vector<Case>& cases, int64_t n, kernels::DType moments, bool table_rows) {
  const bool narrow = moments == kernels::DType::kBF16;
  const std::string name = narrow ? "adamw with bf16 copy and moments" : "adamw with bf16 copy";
  const int64_t gradient_bytes = table_rows ? 4 * n / kUsedOf : 4 * n;
  cases.push_back({name + (table_rows ? ", few rows used" : ""), std::to_string(n >> 20) + " Mi",
                   as_bytes((narrow ? 18 : 26) * n + gradient_bytes), 0, [=](Pool& p) -> Launch {
                     float *w = f32(p, n), *m = f32(p, n), *v = f32(p, n), *grad = f32(p, n);
                     void* copy = bf16(p, n);
                     auto* scalars = p.take<kernels::AdamWScalars>(sizeof(kernels::AdamWScalars));
                     std::vector<int64_t> edges;
                     for (int64_t i = 1; i <= 200; ++i) edges.push_back(n / 256 * i + 17);
                     auto* d_edges = p.take<int64_t>(1600);
                     const kernels::AdamWScalars values{1e-9f, 0.9f, 0.95f, 1e-8f, 0.1f, 1, 1, 1, 0};
                     if (!p.exhausted()) {
                       // As in a run: numbers that no case before has written, and second moments that are positive.
                       // Roots of negative numbers and quotients of what comes of them take a slower path through the
                       // processor.
                       for (float* x : {w, m, grad}) fill_with_normals(x, 4 * n);
                       cudaMemset(v, 0x3c, static_cast<size_t>(4 * n));
                       cudaMemcpy(scalars, &values, sizeof values, cudaMemcpyHostToDevice);
                       cudaMemcpy(d_edges, edges.data(), 1600, cudaMemcpyHostToDevice);
                     }
                     const kernels::Gradient g = gradient_of(p, grad, n, table_rows);
                     return [=](cudaStream_t s) {
                       return table().optimizer->adamw(w, {m, v, moments}, copy, g, n, scalars, d_edges, 200, kType, s);
                     };
                   }});
}

void add_flat(std::vector<Case>& cases, int64_t n) {
  const std::string shape = std::to_string(n >> 20) + " Mi";
  for (const bool table_rows : {false, true}) {
    add_adamw(cases, n, kernels::DType::kF32, table_rows);
    add_adamw(cases, n, kernels::DType::kBF16, table_rows);
    cases.push_back({table_rows ? "sum_squares, few rows used" : "sum_squares", shape,
                     as_bytes(table_rows ? 4 * n / kUsedOf : 4 * n), 0, [=](Pool& p) -> Launch {
                       const kernels::Gradient x = gradient_of(p, f32(p, n), n, table_rows);
                       const int64_t partials = table_rows ? 128 : n / 65536;  // a training step has 120 of a table
                       auto* out = p.take<double>(8 * partials);
                       return [=](cudaStream_t s) {
                         return table().reduce->sum_squares(out, x, 0, partials, n / partials, n, s);
                       };
                     }});
  }
  cases.push_back({"digest", shape, as_bytes(4 * n), 0, [=](Pool& p) -> Launch {
                     float* x = f32(p, n);
                     auto* out = p.take<uint64_t>(8);
                     return [=](cudaStream_t s) { return table().reduce->digest(out, x, n, 7, s); };
                   }});
  cases.push_back({"non_finite bf16", shape, as_bytes(2 * n), 0, [=](Pool& p) -> Launch {
                     void* x = bf16(p, n);
                     auto* flag = p.take<int32_t>(4);
                     return [=](cudaStream_t s) { return table().reduce->non_finite(flag, x, n, kType, s); };
                   }});
  cases.push_back({"convert to bf16", shape, as_bytes(6 * n), 0, [=](Pool& p) -> Launch {
                     float* x = f32(p, n);
                     void* y = bf16(p, n);
                     return [=](cudaStream_t s) { return table().reduce->convert(y, x, n, kType, s); };
                   }});
  cases.push_back({"add fp32", shape, as_bytes(12 * n), 0, [=](Pool& p) -> Launch {
                     float *a = f32(p, n), *b = f32(p, n), *c = f32(p, n);
                     return [=](cudaStream_t s) { return table().reduce->add(c, a, b, n, s); };
                   }});
  for (const int64_t count : {2, 3, 8}) {
    cases.push_back(
        {"tree_sum of " + std::to_string(count), shape, as_bytes(4 * (count + 1) * n), 0, [=](Pool& p) -> Launch {
           std::array<const float*, 8> srcs{};
           for (int64_t i = 0; i < count; ++i) srcs[static_cast<size_t>(i)] = f32(p, n);
           float* dst = f32(p, n);
           return [=](cudaStream_t s) { return table().reduce->tree_sum(dst, srcs.data(), count, n, s); };
         }});
  }
  cases.push_back({"add bf16", shape, as_bytes(6 * n), 0, [=](Pool& p) -> Launch {
                     void *a = bf16(p, n), *b = bf16(p, n), *c = bf16(p, n);
                     return [=](cudaStream_t s) { return table().activation->add(c, a, b, n, kType, s); };
                   }});
}

}  // namespace

std::vector<Case> rowwise_cases() {
  std::vector<Case> cases;
  add_norms(cases, 65536, 768);
  add_norms(cases, 16384, 1600);
  add_norms(cases, 16384, 2048);
  add_norms(cases, 8192, 4096);
  add_heads(cases, 65536, 12, 12, 64);
  add_heads(cases, 16384, 32, 8, 64);
  add_heads(cases, 8192, 32, 8, 128);
  add_heads(cases, 16384, 16, 8, 128);
  add_activations(cases, 65536, 2048);
  add_activations(cases, 16384, 4352);
  add_activations(cases, 16384, 8192);
  add_activations(cases, 8192, 14336);
  add_loss(cases, 65536, 256);
  add_loss(cases, 16384, 50304);
  add_loss(cases, 8192, 128256);
  add_embedding(cases, 65536, 768, 50304, 0);
  add_embedding(cases, 16384, 2048, 128256, 0);
  add_embedding(cases, 8192, 4096, 128256, 0);
  add_embedding(cases, 65536, 768, 256, 0);
  add_embedding(cases, 65536, 768, 1024, 1);
  add_flat(cases, int64_t{128} << 20);
  return cases;
}

}  // namespace kintsugi::kernels_cuda
