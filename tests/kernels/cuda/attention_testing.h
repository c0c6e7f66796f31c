// What the tests of the device's attention share: problems on the device, how near results must be, and comparisons
// with the reference loops and between implementations.
//   B batch   T tokens   H query heads   K key/value heads   D head size
#pragma once

#include <algorithm>
#include <cmath>
#include <iostream>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/cuda/attention_cudnn.h"
#include "kernels/cuda/attention_plain.h"
#include "tests/kernels/attention_gradient.h"
#include "tests/kernels/cuda/recorded_graph.h"
#include "tests/kernels/cuda/rowwise_testing.h"

namespace kintsugi::kernels {

inline int64_t operations(const Sizes& s) { return s.B * s.H * s.T * s.T * s.D; }

// Gaps behind the rows keep them at multiples of 16 bytes, unless a test wants others.
inline Problem make_problem(Sizes sizes, DType dtype, std::mt19937& rng, int64_t gap = 8) {
  return Problem(sizes, dtype, rng, gap, gap);
}

// The inputs on the device, and calls of either implementation there.
struct DeviceProblem {
  explicit DeviceProblem(const Problem& problem)
      : p(problem),
        dtype(p.qkv.dtype()),
        qkv(p.qkv),
        d_o(p.d_o),
        o(p.d_o.size() * size_of(dtype)),
        lse(p.s.B * p.s.H * p.s.T * 4),
        d_qkv(p.qkv.size() * size_of(dtype)),
        workspace(cuda::attention().backward_workspace_bytes(p.shape, dtype)) {}
  void* part(const DeviceMemory& m, int64_t elements) const { return m.as<char>() + elements * size_of(dtype); }
  int64_t k_at() const { return p.s.H * p.s.D; }
  int64_t v_at() const { return (p.s.H + p.s.K) * p.s.D; }

  KernelError forward(bool plain, cudaStream_t stream = nullptr, bool with_lse = true) const {
    const auto call = plain ? cuda::plain_attention_forward : cuda::attention().forward;
    return call(o.data(), with_lse ? lse.as<float>() : nullptr, qkv.data(), part(qkv, k_at()), part(qkv, v_at()),
                p.shape, dtype, stream);
  }
  KernelError backward(bool plain, cudaStream_t stream = nullptr) const {
    const auto call = plain ? cuda::plain_attention_backward : cuda::attention().backward;
    return call(d_qkv.data(), part(d_qkv, k_at()), part(d_qkv, v_at()), d_o.data(), o.data(), lse.as<float>(),
                qkv.data(), part(qkv, k_at()), part(qkv, v_at()), p.shape, workspace.data(), dtype, stream);
  }
  void set_forward_results(const Outputs& out) const {
    o.upload(out.o);
    lse.upload(out.lse);
  }

  const Problem& p;
  DType dtype;
  DeviceMemory qkv, d_o, o, lse, d_qkv, workspace;
};

// Angles of random positions on the device and on the host.
struct DeviceRotation {
  DeviceRotation(const Sizes& s, std::mt19937& rng) : host(s, rng), positions(host.positions), cos_sin(host.cos_sin) {}
  void attach(AttentionShape& shape) const {
    shape.positions = positions.as<int32_t>();
    shape.cos_sin = cos_sin.as<float>();
  }
  RandomRotation host;
  DeviceMemory positions, cos_sin;
};

inline void reference_forward(Outputs& out, const Problem& p) {
  reference::attention().forward(out.o.data(), out.lse.f32(), p.qkv.at(0), p.qkv.at(p.s.H * p.s.D),
                                 p.qkv.at((p.s.H + p.s.K) * p.s.D), p.shape, p.qkv.dtype(), nullptr);
}

inline void reference_backward(Outputs& out, const Problem& p) {
  const int64_t k = p.s.H * p.s.D, v = (p.s.H + p.s.K) * p.s.D;
  reference::attention().backward(out.d_qkv.at(0), out.d_qkv.at(k), out.d_qkv.at(v), p.d_o.data(), out.o.data(),
                                  out.lse.f32(), p.qkv.at(0), p.qkv.at(k), p.qkv.at(v), p.shape, nullptr, p.qkv.dtype(),
                                  nullptr);
}

// Elements between tokens' rows belong to nobody: outputs must have left them alone (NaN); make them comparable.
inline void clear_gaps(Array& a, int64_t width, int64_t used) {
  bool written = false;
  for (int64_t n = 0; n < a.size() / width; ++n) {
    for (int64_t i = used; i < width; ++i) {
      written |= !std::isnan(a.get(n * width + i));
      a.set(n * width + i, 0.0f);
    }
  }
  EXPECT_FALSE(written) << "gap written";
}
inline void clear_gaps(Outputs& out, const Problem& p) {
  clear_gaps(out.o, p.o_width, p.s.H * p.s.D);
  clear_gaps(out.d_qkv, p.qkv_width, (p.s.H + 2 * p.s.K) * p.s.D);
}

struct Distance {
  double apart, size;  // || a - b ||, || b ||
};
// Over columns [first, last) of rows of `width`.
inline Distance distance(const Array& a, const Array& b, int64_t width, int64_t first, int64_t last) {
  double difference = 0, norm = 0;
  for (int64_t n = 0; n < a.size() / width; ++n) {
    for (int64_t i = n * width + first; i < n * width + last; ++i) {
      const double x = a.get(i), y = b.get(i);
      difference += (x - y) * (x - y);
      norm += y * y;
    }
  }
  return {std::sqrt(difference), std::sqrt(norm)};
}

// Weights are rounded to the storage type before they meet v; as independent errors of the terms they stay below twice
// the type's unit roundoff in the whole, and fp32 sums of T terms add little. `paths`: two implementations that are
// compared err each.
inline double norm_tolerance(DType dtype, int64_t T, double paths) {
  return paths * (4 * unit_roundoff(dtype) + std::sqrt(static_cast<double>(T)) * 32 * kF32Round);
}

inline void expect_near_forward(const Outputs& actual, const Outputs& expected, const Problem& p, double paths,
                                const std::string& what) {
  const DType dtype = p.qkv.dtype();
  const Distance far = distance(actual.o, expected.o, p.o_width, 0, p.s.H * p.s.D);
  EXPECT_LE(far.apart, norm_tolerance(dtype, p.s.T, paths) * far.size) << "o, " << what;
  // A single element: a weight's error is relative, and weights add up to one.
  const double one = paths * (2 * unit_roundoff(dtype) + 1e-5);
  expect_close(actual.o, expected.o, one * static_cast<double>(p.qkv.max_abs()), 2 * unit_roundoff(dtype),
               "o, " + what);
  // Scores are sums of D exact products in fp32.
  expect_close(actual.lse, expected.lse, paths * 1e-5 * static_cast<double>(p.s.D), 1e-6, "lse, " + what);
}

// Weights and score gradients are rounded to the storage type before they meet do, k and q, which stays below twice its
// unit roundoff as above. What fp32 adds is counted four times: `fp32` is that of GradientSizes. Without it a tolerance
// holds for bf16 and hundreds of tokens, whose own roundings are hundreds of times as large, or for the same bits.
inline void expect_near_backward(const Outputs& actual, const Outputs& expected, const Problem& p, double paths,
                                 const std::string& what, const std::vector<double>& fp32 = {}) {
  const int64_t k = p.s.H * p.s.D, v = k + p.s.K * p.s.D, end = v + p.s.K * p.s.D;
  const double round = 4 * paths * unit_roundoff(p.qkv.dtype()), round_fp32 = 4 * paths * kF32Round;
  EXPECT_TRUE(actual.d_qkv.guards_intact()) << what;
  for (const auto& [name, first, last] : {std::tuple{"dq, ", int64_t{0}, k}, {"dk, ", k, v}, {"dv, ", v, end}}) {
    double size_fp32 = 0;
    for (size_t i = 0; i < fp32.size(); ++i) {
      const int64_t column = static_cast<int64_t>(i) % p.qkv_width;
      if (column >= first && column < last) size_fp32 += fp32[i] * fp32[i];
    }
    const Distance far = distance(actual.d_qkv, expected.d_qkv, p.qkv_width, first, last);
    EXPECT_LE(far.apart, round * far.size + round_fp32 * std::sqrt(size_fp32)) << name << what;
  }
  // A single element, far off only by a mistake: twenty times the average error of the largest.
  const double largest_fp32 = fp32.empty() ? 0.0 : *std::max_element(fp32.begin(), fp32.end());
  const double largest = static_cast<double>(expected.d_qkv.max_abs());
  expect_close(actual.d_qkv, expected.d_qkv, 20 * (round * largest + round_fp32 * largest_fp32), 0, "d_qkv, " + what);
}

// What the reference loops make of a problem, documents' starts in memory of the host.
struct ReferenceResults {
  explicit ReferenceResults(const Problem& p) : out(p) {
    reference_forward(out, p);
    sizes = gradient_sizes(p, out);
    reference_backward(out, p);
    clear_gaps(out, p);
  }
  Outputs out;
  GradientSizes sizes;
};

inline void download(Outputs& out, const DeviceProblem& d) {
  d.o.download(out.o.data());
  d.lse.download(out.lse.data());
  d.d_qkv.download(out.d_qkv.data());
}

class CudaAttentionTest : public CudaRowwiseTest {
 protected:
  static void SetUpTestSuite() { ASSERT_EQ(cuda::init_libraries({}), kKernelOk); }
  static std::string text(KernelError error) { return cuda::kernels().error_text(error); }

  // Forward against the reference, then backward from the reference's o and lse.
  void check(const Sizes& sizes, bool plain, bool deterministic, int64_t gap) {
    if (left_out(operations(sizes), to_string(sizes))) return;
    Problem p = make_problem(sizes, dtype(), rng_, gap);
    p.shape.deterministic = deterministic;
    const DeviceProblem d(p);
    const ReferenceResults expected(p);
    const std::string what = to_string(sizes) + (plain ? " plain" : " table") + (deterministic ? " deterministic" : "");
    if (!check_against(expected, p, d, plain, what)) return;
    if (!plain && dtype() == DType::kBF16) {
      const std::string library = cuda::attention().library(p.shape, dtype());
      if (library.find("plain") != std::string::npos) std::cout << what << ": " << library << std::endl;
    }
  }

  // False: a call failed, and nothing after it was compared.
  bool check_against(const ReferenceResults& expected, const Problem& p, const DeviceProblem& d, bool plain,
                     const std::string& what) {
    KernelError error = d.forward(plain);
    EXPECT_EQ(error, kKernelOk) << text(error) << ", " << what;
    if (error != kKernelOk) return false;
    Outputs forward_only(p), actual(p);
    download(forward_only, d);
    clear_gaps(forward_only.o, p.o_width, p.s.H * p.s.D);
    expect_near_forward(forward_only, expected.out, p, 1, what);
    d.set_forward_results(expected.out);
    error = d.backward(plain);
    EXPECT_EQ(error, kKernelOk) << text(error) << ", " << what;
    if (error != kKernelOk) return false;
    download(actual, d);
    clear_gaps(actual.d_qkv, p.qkv_width, (p.s.H + 2 * p.s.K) * p.s.D);
    expect_near_backward(actual, expected.out, p, 1, what, expected.sizes.fp32);
    return true;
  }

  // The library's graphs against the plain kernels, and against themselves in a second run.
  void check_library_against_plain(const Problem& p, const DeviceProblem& d, const std::string& what) {
    Outputs plain(p), library(p), again(p);
    ASSERT_EQ(d.forward(true), kKernelOk);
    ASSERT_EQ(d.backward(true), kKernelOk);
    download(plain, d);
    for (Outputs* out : {&library, &again}) {
      KernelError error = d.forward(false);
      ASSERT_EQ(error, kKernelOk) << text(error) << ", " << what;
      error = d.backward(false);
      ASSERT_EQ(error, kKernelOk) << text(error) << ", " << what;
      download(*out, d);
    }
    expect_same_bits(again.o, library.o, "o again, " + what);
    if (p.shape.deterministic) expect_same_bits(again.d_qkv, library.d_qkv, "d_qkv again, " + what);
    clear_gaps(plain, p);
    clear_gaps(library, p);
    expect_near_forward(library, plain, p, 2, what);
    expect_near_backward(library, plain, p, 2, what);
  }
};

}  // namespace kintsugi::kernels
