// The device's attention against the reference loops, and cuDNN's against our own.
//   B batch   T tokens   H query heads   K key/value heads   D head size
#include "kernels/attention.h"

#include <chrono>
#include <iostream>

#include "kernels/cuda/attention_cudnn.h"
#include "kernels/cuda/attention_plain.h"
#include "kernels/cuda/libraries.h"
#include "tests/kernels/attention_problem.h"
#include "tests/kernels/cuda/rowwise_testing.h"

namespace kintsugi::kernels {
namespace {

constexpr Sizes kSizes[] = {{1, 1, 1, 1, 64},   {2, 2, 2, 1, 64},    {1, 7, 3, 3, 80},    {2, 64, 4, 2, 64},
                            {1, 65, 8, 2, 96},  {2, 128, 4, 4, 128}, {1, 129, 3, 1, 128}, {1, 257, 2, 2, 80},
                            {2, 300, 4, 2, 64}, {1, 384, 2, 1, 128}, {3, 200, 2, 2, 96}};
constexpr Sizes kOddSizes[] = {{1, 1, 1, 1, 8},     {1, 33, 2, 2, 20},  {2, 70, 3, 3, 13},
                               {1, 100, 2, 1, 200}, {1, 67, 1, 1, 256}, {1, 130, 2, 1, 129}};

int64_t operations(const Sizes& s) { return s.B * s.H * s.T * s.T * s.D; }

// Gaps behind the rows keep them at multiples of 16 bytes, unless a test wants others.
Problem make_problem(Sizes sizes, DType dtype, std::mt19937& rng, int64_t gap = 8) {
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

void reference_forward(Outputs& out, const Problem& p) {
  reference::attention().forward(out.o.data(), out.lse.f32(), p.qkv.at(0), p.qkv.at(p.s.H * p.s.D),
                                 p.qkv.at((p.s.H + p.s.K) * p.s.D), p.shape, p.qkv.dtype(), nullptr);
}

void reference_backward(Outputs& out, const Problem& p) {
  const int64_t k = p.s.H * p.s.D, v = (p.s.H + p.s.K) * p.s.D;
  reference::attention().backward(out.d_qkv.at(0), out.d_qkv.at(k), out.d_qkv.at(v), p.d_o.data(), out.o.data(),
                                  out.lse.f32(), p.qkv.at(0), p.qkv.at(k), p.qkv.at(v), p.shape, nullptr, p.qkv.dtype(),
                                  nullptr);
}

// Elements between tokens' rows belong to nobody: outputs must have left them alone (NaN); make them comparable.
void clear_gaps(Array& a, int64_t width, int64_t used) {
  bool written = false;
  for (int64_t n = 0; n < a.size() / width; ++n) {
    for (int64_t i = used; i < width; ++i) {
      written |= !std::isnan(a.get(n * width + i));
      a.set(n * width + i, 0.0f);
    }
  }
  EXPECT_FALSE(written) << "gap written";
}
void clear_gaps(Outputs& out, const Problem& p) {
  clear_gaps(out.o, p.o_width, p.s.H * p.s.D);
  clear_gaps(out.d_qkv, p.qkv_width, (p.s.H + 2 * p.s.K) * p.s.D);
}

// || a - b || / || b || over columns [first, last) of rows of `width`.
double distance(const Array& a, const Array& b, int64_t width, int64_t first, int64_t last) {
  double difference = 0, norm = 1e-30;
  for (int64_t n = 0; n < a.size() / width; ++n) {
    for (int64_t i = n * width + first; i < n * width + last; ++i) {
      const double x = a.get(i), y = b.get(i);
      difference += (x - y) * (x - y);
      norm += y * y;
    }
  }
  return std::sqrt(difference / norm);
}

// Weights and score gradients are rounded to the storage type before they meet v, k and q; as independent errors of the
// terms they stay below twice the type's unit roundoff in the whole, and fp32 sums of T terms add little. `paths`: two
// implementations that are compared err each.
double norm_tolerance(DType dtype, int64_t T, double paths) {
  return paths * (4 * unit_roundoff(dtype) + std::sqrt(static_cast<double>(T)) * 32 * kF32Round);
}

void expect_near_forward(const Outputs& actual, const Outputs& expected, const Problem& p, double paths,
                         const std::string& what) {
  const DType dtype = p.qkv.dtype();
  const double far = distance(actual.o, expected.o, p.o_width, 0, p.s.H * p.s.D);
  EXPECT_LE(far, norm_tolerance(dtype, p.s.T, paths)) << "o, " << what;
  // A single element: a weight's error is relative, and weights add up to one.
  const double one = paths * (2 * unit_roundoff(dtype) + 1e-5);
  expect_close(actual.o, expected.o, one * static_cast<double>(p.qkv.max_abs()), 2 * unit_roundoff(dtype),
               "o, " + what);
  // Scores are sums of D exact products in fp32.
  expect_close(actual.lse, expected.lse, paths * 1e-5 * static_cast<double>(p.s.D), 1e-6, "lse, " + what);
}

void expect_near_backward(const Outputs& actual, const Outputs& expected, const Problem& p, double paths,
                          const std::string& what) {
  const int64_t k = p.s.H * p.s.D, v = k + p.s.K * p.s.D, end = v + p.s.K * p.s.D;
  const double tolerance = norm_tolerance(p.qkv.dtype(), p.s.T, paths);
  const bool one_token = p.s.T == 1;  // then dq and dk are zero up to roundings
  EXPECT_TRUE(actual.d_qkv.guards_intact()) << what;
  if (!one_token) {
    EXPECT_LE(distance(actual.d_qkv, expected.d_qkv, p.qkv_width, 0, k), tolerance) << "dq, " << what;
    EXPECT_LE(distance(actual.d_qkv, expected.d_qkv, p.qkv_width, k, v), tolerance) << "dk, " << what;
  }
  EXPECT_LE(distance(actual.d_qkv, expected.d_qkv, p.qkv_width, v, end), tolerance) << "dv, " << what;
  // A single element, far off only by a mistake: twenty times the average error of the largest.
  float largest = 0;
  for (int64_t i = 0; i < expected.d_qkv.size(); ++i) largest = std::fmax(largest, std::fabs(expected.d_qkv.get(i)));
  expect_close(actual.d_qkv, expected.d_qkv, 20 * tolerance * static_cast<double>(largest), 0, "d_qkv, " + what);
}

void download(Outputs& out, const DeviceProblem& d) {
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
    Outputs expected(p);
    reference_forward(expected, p);
    reference_backward(expected, p);
    clear_gaps(expected, p);
    const std::string what = to_string(sizes) + (plain ? " plain" : " table") + (deterministic ? " deterministic" : "");
    if (!check_against(expected, p, d, plain, what)) return;
    if (!plain && dtype() == DType::kBF16) {
      const std::string library = cuda::attention().library(p.shape, dtype());
      if (library.find("plain") != std::string::npos) std::cout << what << ": " << library << std::endl;
    }
  }

  // False: a call failed, and nothing after it was compared.
  bool check_against(const Outputs& expected, const Problem& p, const DeviceProblem& d, bool plain,
                     const std::string& what) {
    KernelError error = d.forward(plain);
    EXPECT_EQ(error, kKernelOk) << text(error) << ", " << what;
    if (error != kKernelOk) return false;
    Outputs forward_only(p), actual(p);
    download(forward_only, d);
    clear_gaps(forward_only.o, p.o_width, p.s.H * p.s.D);
    expect_near_forward(forward_only, expected, p, 1, what);
    d.set_forward_results(expected);
    error = d.backward(plain);
    EXPECT_EQ(error, kKernelOk) << text(error) << ", " << what;
    if (error != kKernelOk) return false;
    download(actual, d);
    clear_gaps(actual.d_qkv, p.qkv_width, (p.s.H + 2 * p.s.K) * p.s.D);
    expect_near_backward(actual, expected, p, 1, what);
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

TEST_P(CudaAttentionTest, PlainKernelsMatchTheReferenceOverOddSizes) {
  for (const Sizes& sizes : kSizes) check(sizes, true, true, 8);
  for (const Sizes& sizes : kOddSizes) check(sizes, true, true, 3);
}

TEST_P(CudaAttentionTest, WhatTheTableServesMatchesTheReferenceOverOddSizes) {
  for (const Sizes& sizes : kSizes) {
    check(sizes, false, true, 8);
    check(sizes, false, false, 8);
  }
  for (const Sizes& sizes : kOddSizes) check(sizes, false, true, 3);
}

// Deterministic, so that the calls of the two families in a row have the same bits.
TEST_P(CudaAttentionTest, GradientsOfTurnedQueriesAndKeysAreTurnedBack) {
  for (const Sizes& sizes : {Sizes{2, 64, 4, 2, 64}, {1, 129, 3, 1, 128}, {1, 33, 2, 2, 20}}) {
    Problem p = make_problem(sizes, dtype(), rng_);
    const RandomRotation rotation(sizes, rng_);
    const DeviceMemory positions(sizes.B * sizes.T * 4), cos_sin(sizes.T * sizes.D * 4);
    ASSERT_EQ(
        cudaMemcpy(positions.data(), rotation.positions.data(), rotation.positions.size() * 4, cudaMemcpyHostToDevice),
        cudaSuccess);
    ASSERT_EQ(cudaMemcpy(cos_sin.data(), rotation.cos_sin.data(), rotation.cos_sin.size() * 4, cudaMemcpyHostToDevice),
              cudaSuccess);
    const DeviceProblem d(p);
    Outputs apart(p), together(p);
    ASSERT_EQ(d.forward(false), kKernelOk);
    ASSERT_EQ(d.backward(false), kKernelOk);
    ASSERT_EQ(cuda::rope().rotate(d.d_qkv.data(), positions.as<int32_t>(), cos_sin.as<float>(), sizes.B * sizes.T,
                                  sizes.H + sizes.K, sizes.D, p.qkv_width, true, dtype(), nullptr),
              kKernelOk);
    download(apart, d);
    p.shape.positions = positions.as<int32_t>();
    p.shape.cos_sin = cos_sin.as<float>();
    ASSERT_EQ(d.backward(false), kKernelOk);
    download(together, d);
    expect_same_bits(together.d_qkv, apart.d_qkv, to_string(sizes));
  }
}

// Sizes of real models, too large for the reference: the library's graphs against the plain kernels.
TEST_P(CudaAttentionTest, LibraryAndPlainKernelsAgreeAtTrainingSizes) {
  for (const Sizes& sizes : {Sizes{2, 1024, 12, 12, 64}, Sizes{1, 2048, 8, 2, 64}, Sizes{1, 1024, 5, 5, 64},
                             Sizes{1, 2048, 4, 1, 128}, Sizes{2, 515, 6, 2, 80}, Sizes{1, 1023, 4, 4, 96}}) {
    for (const bool deterministic : {true, false}) {
      Problem p = make_problem(sizes, dtype(), rng_);
      p.shape.deterministic = deterministic;
      const DeviceProblem d(p);
      const std::string what = to_string(sizes) + (deterministic ? " deterministic" : "");
      const auto begin = std::chrono::steady_clock::now();
      ASSERT_EQ(cuda::attention().prepare(p.shape, dtype(), true), kKernelOk) << what;
      const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
      if (dtype() == DType::kBF16) {
        std::cout << what << ": " << cuda::attention().library(p.shape, dtype()) << ", built in " << took.count()
                  << " ms, forward scratch "
                  << cuda::cudnn_attention_scratch_bytes(p.shape, cuda::AttentionPass::kForwardWithLse) << ", backward "
                  << cuda::cudnn_attention_scratch_bytes(p.shape, cuda::AttentionPass::kBackward) << " bytes, bound "
                  << cuda::attention().backward_workspace_bytes(p.shape, dtype()) << std::endl;
      }
      ASSERT_NO_FATAL_FAILURE(check_library_against_plain(p, d, what));
    }
  }
}

TEST_P(CudaAttentionTest, PlansChosenByTimingTravelAsTextAndGiveTheSameNumbers) {
  if (dtype() != DType::kBF16 || std::string(cuda::cudnn_version()).empty()) return;
  const DeviceMemory scratch(int64_t{256} << 20);
  for (const bool deterministic : {true, false}) {
    Problem p = make_problem({2, 1024, 12, 6, 64}, dtype(), rng_, /*gap=*/0);
    p.shape.deterministic = deterministic;
    cuda::AttentionTable table = cuda::attention_table_here(), read;
    const KernelError error = cuda::tune_attention(&table, p.shape, scratch.data(), int64_t{256} << 20, nullptr);
    ASSERT_EQ(error, kKernelOk) << text(error);
    EXPECT_LE(table.entries.size(), 2u);  // where there is a choice
    std::cout << to_text(table);
    std::string why;
    ASSERT_TRUE(cuda::parse_attention_table(to_text(table), &read, &why)) << why;
    ASSERT_TRUE(cuda::use_attention_table(read, &why)) << why;
    const DeviceProblem d(p), without_lse(p);
    Outputs plain(p), library(p), o_alone(p);
    ASSERT_EQ(d.forward(true), kKernelOk);
    ASSERT_EQ(d.backward(true), kKernelOk);
    download(plain, d);
    ASSERT_EQ(d.forward(false), kKernelOk);
    ASSERT_EQ(d.backward(false), kKernelOk);
    download(library, d);
    ASSERT_EQ(without_lse.forward(false, nullptr, false), kKernelOk);
    download(o_alone, without_lse);
    const std::string what = deterministic ? "chosen, deterministic" : "chosen";
    EXPECT_EQ(std::string(cuda::attention().library(p.shape, dtype())), cuda::cudnn_version());
    expect_near_forward(library, plain, p, 2, what);
    expect_near_backward(library, plain, p, 2, what);
    expect_same_bits(o_alone.o, library.o, "o without lse, " + what);
    // What is known is not timed again, and what was made elsewhere is refused.
    const std::string before = to_text(read);
    ASSERT_EQ(cuda::tune_attention(&read, p.shape, scratch.data(), 0, nullptr), kKernelOk);
    EXPECT_EQ(to_text(read), before);
    ++read.cudnn;
    EXPECT_FALSE(cuda::use_attention_table(read, &why));
  }
}

TEST_P(CudaAttentionTest, LseMayBeNull) {
  const Problem p = make_problem({2, 70, 4, 2, 64}, dtype(), rng_);
  const DeviceProblem with(p), without(p);
  ASSERT_EQ(with.forward(false), kKernelOk);
  ASSERT_EQ(without.forward(false, nullptr, false), kKernelOk);
  Outputs a(p), b(p);
  download(a, with);
  download(b, without);
  clear_gaps(a.o, p.o_width, p.s.H * p.s.D);
  clear_gaps(b.o, p.o_width, p.s.H * p.s.D);
  expect_close(b.o, a.o, 2 * unit_roundoff(dtype()) * static_cast<double>(p.qkv.max_abs()), 2 * unit_roundoff(dtype()),
               "o without lse");
}

TEST_P(CudaAttentionTest, ARecordedGraphGivesTheSameBits) {
  for (const Sizes& sizes : {Sizes{2, 256, 4, 2, 64}, Sizes{1, 190, 4, 4, 128}}) {
    const Problem p = make_problem(sizes, dtype(), rng_);
    const DeviceProblem d(p), recorded(p);
    cudaStream_t stream = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    ASSERT_EQ(d.forward(false, stream), kKernelOk);
    ASSERT_EQ(d.backward(false, stream), kKernelOk);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    EXPECT_EQ(recorded.forward(false, stream), kKernelOk);
    EXPECT_EQ(recorded.backward(false, stream), kKernelOk);
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
    for (int i = 0; i < 2; ++i) ASSERT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    Outputs a(p), b(p);
    download(a, d);
    download(b, recorded);
    expect_same_bits(b.o, a.o, "o, " + to_string(sizes));
    expect_same_bits(b.d_qkv, a.d_qkv, "d_qkv, " + to_string(sizes));
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    cuda::release_library_stream(stream);
    cudaStreamDestroy(stream);
  }
}

TEST_P(CudaAttentionTest, PlainRowsDoNotDependOnLengthOrBatch) {
  const Problem p = make_problem({2, 300, 4, 2, 32}, dtype(), rng_);
  const DeviceProblem d(p);
  ASSERT_EQ(d.forward(true), kKernelOk);
  Outputs all(p);
  download(all, d);
  const int64_t row_bytes = p.s.H * p.s.D * size_of(dtype());
  for (const int64_t T : {1, 31, 64, 65, 200, 299}) {
    AttentionShape shape = p.shape;
    shape.B = 1;
    shape.T = T;
    const DeviceMemory o(T * p.o_width * size_of(dtype()));
    const int64_t second = p.s.T * p.qkv_width;
    ASSERT_EQ(cuda::plain_attention_forward(o.data(), nullptr, d.part(d.qkv, second), d.part(d.qkv, second + d.k_at()),
                                            d.part(d.qkv, second + d.v_at()), shape, dtype(), nullptr),
              kKernelOk);
    const Array part = o.array(dtype());
    int64_t wrong = 0;
    for (int64_t t = 0; t < T; ++t) {
      wrong +=
          std::memcmp(part.at(t * p.o_width), all.o.at((p.s.T + t) * p.o_width), static_cast<size_t>(row_bytes)) != 0;
    }
    EXPECT_EQ(wrong, 0) << "rows differ, T " << T;
  }
}

// Where documents begin, on the device, with the mask that the library reads.
struct DeviceDocuments {
  DeviceDocuments(const Problem& p, const std::vector<int32_t>& host_starts)
      : starts(host_starts),
        mask(std::max<int64_t>(cuda::attention().document_mask_bytes(p.shape, p.qkv.dtype()), 16)) {}
  void attach(Problem& p, bool masked) const {
    p.shape.document_starts = starts.as<int32_t>();
    p.shape.document_mask = masked ? mask.data() : nullptr;
    EXPECT_EQ(masked ? write(p) : kKernelOk, kKernelOk);
  }
  KernelError write(const Problem& p, cudaStream_t stream = nullptr) const {
    return cuda::attention().write_document_mask(mask.data(), p.shape, p.qkv.dtype(), stream);
  }
  DeviceMemory starts, mask;
};

TEST_P(CudaAttentionTest, DocumentsPackedInASequenceMatchTheReference) {
  for (const Sizes& sizes : {Sizes{2, 300, 4, 2, 64}, Sizes{1, 129, 3, 1, 128}, Sizes{1, 200, 2, 2, 80},
                             Sizes{3, 256, 2, 2, 96}, Sizes{2, 97, 2, 1, 200}, Sizes{1, 1, 1, 1, 64}}) {
    if (left_out(operations(sizes), to_string(sizes))) continue;
    Problem p = make_problem(sizes, dtype(), rng_);
    const std::vector<int32_t> starts = random_document_starts(sizes.B, sizes.T, rng_);
    const DeviceDocuments documents(p, starts);
    p.shape.document_starts = starts.data();
    Outputs expected(p);
    reference_forward(expected, p);
    reference_backward(expected, p);
    clear_gaps(expected, p);
    for (const auto& [masked, deterministic] : {std::pair{false, true}, {true, true}, {true, false}}) {
      documents.attach(p, masked);
      p.shape.deterministic = deterministic;
      const DeviceProblem d(p);
      const std::string what =
          to_string(sizes) + " documents" + (masked ? " masked" : " plain") + (deterministic ? " deterministic" : "");
      if (!check_against(expected, p, d, false, what)) continue;
      if (masked && dtype() == DType::kBF16) {
        std::cout << what << ": " << cuda::attention().library(p.shape, dtype()) << std::endl;
      }
    }
  }
}

TEST_P(CudaAttentionTest, LibraryAndPlainKernelsAgreeOnDocumentsAtTrainingSizes) {
  if (dtype() != DType::kBF16 || std::string(cuda::cudnn_version()).empty()) return;
  for (const Sizes& sizes :
       {Sizes{2, 1024, 12, 12, 64}, Sizes{1, 2048, 4, 1, 128}, Sizes{1, 1023, 4, 2, 96}, Sizes{2, 515, 6, 2, 80}}) {
    for (const bool deterministic : {true, false}) {
      Problem p = make_problem(sizes, dtype(), rng_);
      const DeviceDocuments documents(p, random_document_starts(sizes.B, sizes.T, rng_));
      documents.attach(p, true);
      p.shape.deterministic = deterministic;
      const DeviceProblem d(p);
      const std::string what = to_string(sizes) + " documents" + (deterministic ? " deterministic" : "");
      ASSERT_NO_FATAL_FAILURE(check_library_against_plain(p, d, what));
      EXPECT_EQ(std::string(cuda::attention().library(p.shape, dtype())), cuda::cudnn_version()) << what;
    }
  }
}

// One recorded graph serves every batch: borders are read when it runs.
TEST_P(CudaAttentionTest, ARecordedGraphTakesTheBordersOfEachBatch) {
  const Sizes sizes{2, 256, 4, 2, 64};
  Problem p = make_problem(sizes, dtype(), rng_);
  const std::vector<int32_t> first = random_document_starts(sizes.B, sizes.T, rng_),
                             second = random_document_starts(sizes.B, sizes.T, rng_);
  const DeviceDocuments now(p, first), then(p, second);
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  then.attach(p, true);
  const DeviceProblem d(p);
  Outputs want(p), got(p);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  ASSERT_EQ(d.forward(false, stream), kKernelOk);
  ASSERT_EQ(d.backward(false, stream), kKernelOk);
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  download(want, d);
  now.attach(p, true);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  EXPECT_EQ(now.write(p, stream), kKernelOk);
  EXPECT_EQ(d.forward(false, stream), kKernelOk);
  EXPECT_EQ(d.backward(false, stream), kKernelOk);
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
  for (const std::vector<int32_t>* starts : {&first, &second}) {
    now.starts.upload(starts->data(), static_cast<int64_t>(starts->size()) * 4);
    ASSERT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  }
  download(got, d);
  expect_same_bits(got.o, want.o, "o");
  expect_same_bits(got.d_qkv, want.d_qkv, "d_qkv");
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cuda::release_library_stream(stream);
  cudaStreamDestroy(stream);
}

TEST_P(CudaAttentionTest, ShapesOutOfRangeAreRefused) {
  Problem p = make_problem({1, 4, 3, 1, 8}, dtype(), rng_);
  const DeviceProblem d(p);
  for (const auto& [H, K, D] : {std::tuple{3, 2, 8}, {3, 1, 0}, {3, 1, 257}, {0, 1, 8}}) {
    p.shape.H = H, p.shape.K = K, p.shape.D = D;
    EXPECT_NE(d.forward(false), kKernelOk) << H << " " << K << " " << D;
    EXPECT_NE(d.backward(false), kKernelOk) << H << " " << K << " " << D;
  }
}

KTG_FOR_BOTH_TYPES(CudaAttentionTest);

}  // namespace
}  // namespace kintsugi::kernels
