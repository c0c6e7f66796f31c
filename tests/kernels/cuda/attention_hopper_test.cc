// Attention's kernels of our own against the reference loops, the backward pass in double, and against the plain
// kernels.
//   B batch   T tokens   H query heads   K key/value heads   D head size
#include "kernels/cuda/attention_hopper.h"

#include <optional>

#include "tests/kernels/cuda/attention_testing.h"

namespace kintsugi::kernels {
namespace {

constexpr int64_t kHeadSizes[] = {64, 128};

// Lengths on both sides of the blocks of 64 tokens and of pairs of them; groups of one, two and more query heads.
constexpr Sizes kSizes[] = {
    {1, 1, 2, 1, 64},    {2, 2, 2, 1, 64},    {1, 7, 3, 3, 64},    {2, 63, 3, 1, 64},   {2, 64, 1, 1, 64},
    {2, 65, 4, 2, 64},   {1, 127, 2, 2, 64},  {1, 128, 2, 1, 64},  {1, 129, 6, 2, 64},  {2, 192, 2, 2, 64},
    {1, 193, 2, 1, 64},  {2, 300, 4, 2, 64},  {1, 449, 2, 2, 64},  {1, 1, 2, 1, 128},   {2, 2, 2, 1, 128},
    {1, 31, 3, 3, 128},  {2, 63, 3, 1, 128},  {3, 64, 2, 2, 128},  {2, 65, 4, 2, 128},  {1, 127, 2, 2, 128},
    {1, 128, 2, 1, 128}, {1, 129, 6, 2, 128}, {2, 193, 2, 1, 128}, {1, 300, 4, 1, 128}, {1, 449, 2, 2, 128}};

// Of real models, too large for the reference.
constexpr Sizes kTrainingSizes[] = {{2, 1024, 12, 12, 64},
                                    {1, 2048, 8, 2, 64},
                                    {1, 1023, 5, 5, 64},
                                    {2, 515, 6, 2, 64},
                                    {1, 4096, 14, 2, 64},
                                    {9, 320, 25, 25, 64},
                                    {1, 4096, 8, 2, 128},
                                    {2, 1000, 16, 8, 128},
                                    {12, 200, 16, 4, 128},
                                    // More items than thread blocks in every kernel, of heads that share keys.
                                    {20, 320, 16, 8, 128},
                                    {20, 320, 12, 6, 64}};

class CudaHopperAttentionTest : public CudaAttentionTest {
 protected:
  // From the o and lse that `d` holds. Results and workspace are `poison` bytes first.
  void run(Outputs& out, const DeviceProblem& d, int poison = 0xff) {
    const AttentionShape& shape = d.p.shape;
    ASSERT_TRUE(cuda::hopper_attention_applies(shape, dtype())) << to_string(d.p.s);
    const DeviceMemory workspace(cuda::hopper_attention_workspace_bytes(shape));
    if (poisoned()) {
      d.d_qkv.fill(0xff);
      workspace.fill(poison);
    }
    ASSERT_EQ(backward_call(d, workspace, nullptr), kKernelOk) << to_string(d.p.s);
    download(out, d);
    const auto untouched = workspace.array(DType::kF32);  // looks behind its end
    EXPECT_TRUE(untouched.guards_intact());
  }

  static KernelError backward_call(const DeviceProblem& d, const DeviceMemory& workspace, cudaStream_t stream) {
    return cuda::hopper_attention_backward(d.d_qkv.data(), d.part(d.d_qkv, d.k_at()), d.part(d.d_qkv, d.v_at()),
                                           d.d_o.data(), d.o.data(), d.lse.as<float>(), d.qkv.data(),
                                           d.part(d.qkv, d.k_at()), d.part(d.qkv, d.v_at()), d.p.shape,
                                           workspace.data(), stream);
  }

  static KernelError forward_call(const DeviceProblem& d, float* lse, cudaStream_t stream) {
    return cuda::hopper_attention_forward(d.o.data(), lse, d.qkv.data(), d.part(d.qkv, d.k_at()),
                                          d.part(d.qkv, d.v_at()), d.p.shape, stream);
  }

  void check_forward(const Sizes& sizes, int64_t gap, float scale) {
    if (left_out(operations(sizes), to_string(sizes))) return;
    Problem p = make_problem(sizes, dtype(), rng_, gap);
    p.shape.scale = scale;
    Outputs expected(p), actual(p), without_lse(p);
    reference_forward(expected, p);
    clear_gaps(expected.o, p.o_width, sizes.H * sizes.D);
    const DeviceProblem d(p), other(p);
    const std::string what = to_string(sizes) + " gap " + std::to_string(gap) + " scale " + std::to_string(scale);
    ASSERT_EQ(forward_call(d, d.lse.as<float>(), nullptr), kKernelOk) << what;
    ASSERT_EQ(forward_call(other, nullptr, nullptr), kKernelOk) << what;
    download(actual, d);
    download(without_lse, other);
    expect_same_bits(without_lse.o, actual.o, "o without lse, " + what);
    clear_gaps(actual.o, p.o_width, sizes.H * sizes.D);
    expect_near_forward(actual, expected, p, 1, what);
  }

  void check_backward(const Sizes& sizes, int64_t gap, bool turned) {
    if (left_out(operations(sizes), to_string(sizes))) return;
    Problem p = make_problem(sizes, dtype(), rng_, gap);
    if (turned) p.shape.scale = 0.2f;  // no power of two
    Outputs expected(p), actual(p);
    reference_forward(expected, p);
    const DeviceRotation rotation(sizes, rng_);
    const ExactGradients exact = exact_gradients(p, expected, turned ? &rotation.host : nullptr);
    for (int64_t i = 0; i < expected.d_qkv.size(); ++i) {
      expected.d_qkv.set(i, static_cast<float>(exact.value[static_cast<size_t>(i)]));
    }
    if (turned) rotation.attach(p.shape);
    const DeviceProblem d(p);
    d.set_forward_results(expected);
    const std::string what = to_string(sizes) + " gap " + std::to_string(gap) + (turned ? " turned" : "");
    ASSERT_NO_FATAL_FAILURE(run(actual, d)) << what;
    clear_gaps(actual.d_qkv, p.qkv_width, (sizes.H + 2 * sizes.K) * sizes.D);
    expect_near_backward(actual, expected, p, 1, what, exact.sizes.fp32);
    expect_each_near(actual.d_qkv, exact, p, what);
  }

  // Every element by what it is made of, so that a key too many or too few is seen. Its terms are off by half a unit
  // roundoff each at most and each on its own: five times the root of the sum of the squares is next to impossible. An
  // error of fp32 in a single element may be five times that of the whole.
  static void expect_each_near(const Array& actual, const ExactGradients& exact, const Problem& p,
                               const std::string& what) {
    for (int64_t i = 0; i < actual.size(); ++i) {
      const auto at = static_cast<size_t>(i);
      const double tolerance = kBF16Round * (2.5 * exact.sizes.terms[at] + std::fabs(exact.value[at])) +
                               20 * kF32Round * exact.sizes.fp32[at];
      ASSERT_LE(std::fabs(static_cast<double>(actual.get(i)) - exact.value[at]), tolerance)
          << actual.get(i) << ", reference " << exact.value[at] << ", token " << i / p.qkv_width << " head "
          << i % p.qkv_width / p.s.D << " (queries', keys', values') element " << i % p.qkv_width % p.s.D << ", "
          << what;
    }
  }
};

TEST_P(CudaHopperAttentionTest, ForwardMatchesTheReferenceOverOddSizes) {
  for (const Sizes& sizes : kSizes) {
    ASSERT_NO_FATAL_FAILURE(check_forward(sizes, /*gap=*/8, 0.125f));
    ASSERT_NO_FATAL_FAILURE(check_forward(sizes, /*gap=*/0, 0.2f));
  }
}

TEST_P(CudaHopperAttentionTest, ForwardAgreesWithThePlainKernelsAtTrainingSizesAndGivesTheSameBitsTwice) {
  for (const Sizes& sizes : kTrainingSizes) {
    if (left_out(operations(sizes), to_string(sizes))) continue;
    const Problem p = make_problem(sizes, dtype(), rng_);
    const DeviceProblem d(p);
    Outputs plain(p), own(p), again(p);
    ASSERT_EQ(d.forward(true), kKernelOk);
    download(plain, d);
    for (Outputs* out : {&own, &again}) {
      if (poisoned()) d.o.fill(0xff), d.lse.fill(0xff);
      ASSERT_EQ(forward_call(d, d.lse.as<float>(), nullptr), kKernelOk) << to_string(sizes);
      download(*out, d);
    }
    expect_same_bits(again.o, own.o, "o again, " + to_string(sizes));
    expect_same_bits(again.lse, own.lse, "lse again, " + to_string(sizes));
    for (Outputs* out : {&plain, &own}) clear_gaps(out->o, p.o_width, sizes.H * sizes.D);
    expect_near_forward(own, plain, p, 1, to_string(sizes));
  }
}

// As kernels/attention.h says.
TEST_P(CudaHopperAttentionTest, ForwardRowsDoNotDependOnLengthOrBatch) {
  for (const int64_t D : kHeadSizes) {
    const Problem p = make_problem({2, 300, 4, 2, D}, dtype(), rng_);
    const DeviceProblem d(p);
    Outputs all(p);
    ASSERT_EQ(forward_call(d, d.lse.as<float>(), nullptr), kKernelOk);
    download(all, d);
    const auto row_bytes = static_cast<size_t>(p.s.H * D * 2);
    for (const int64_t T : {1, 31, 64, 65, 129, 200, 299}) {
      AttentionShape shape = p.shape;
      shape.B = 1;
      shape.T = T;
      const DeviceMemory o(T * p.o_width * 2);
      const int64_t second = p.s.T * p.qkv_width;
      ASSERT_EQ(
          cuda::hopper_attention_forward(o.data(), nullptr, d.part(d.qkv, second), d.part(d.qkv, second + d.k_at()),
                                         d.part(d.qkv, second + d.v_at()), shape, nullptr),
          kKernelOk);
      const Array part = o.array(dtype());
      int64_t wrong = 0;
      for (int64_t t = 0; t < T; ++t) {
        wrong += std::memcmp(part.at(t * p.o_width), all.o.at((p.s.T + t) * p.o_width), row_bytes) != 0;
      }
      EXPECT_EQ(wrong, 0) << "rows differ, T " << T << ", D " << D;
    }
  }
}

TEST_P(CudaHopperAttentionTest, BackwardMatchesTheReferenceOverOddSizes) {
  for (const Sizes& sizes : kSizes) {
    for (const bool turned : {false, true}) {
      ASSERT_NO_FATAL_FAILURE(check_backward(sizes, /*gap=*/8, turned));
      ASSERT_NO_FATAL_FAILURE(check_backward(sizes, /*gap=*/0, turned));
    }
  }
}

// Scores so large that each row looks at one key, and so small that it looks at all alike.
TEST_P(CudaHopperAttentionTest, ScoresMayBeLargeAndSmall) {
  for (const auto& [D, scale] : {std::pair{64, 3.0f}, {64, 1e-3f}, {128, 2.0f}, {128, 1e-3f}}) {
    const Sizes sizes{1, 200, 2, 1, D};
    if (left_out(operations(sizes), to_string(sizes))) continue;
    Problem p = make_problem(sizes, dtype(), rng_);
    p.shape.scale = scale;
    Outputs expected(p), actual(p);
    reference_forward(expected, p);
    const ExactGradients exact = exact_gradients(p, expected, nullptr);
    const DeviceProblem d(p);
    d.set_forward_results(expected);
    ASSERT_NO_FATAL_FAILURE(run(actual, d));
    clear_gaps(actual.d_qkv, p.qkv_width, (sizes.H + 2 * sizes.K) * sizes.D);
    expect_each_near(actual.d_qkv, exact, p, "scale " + std::to_string(scale));
  }
}

// The plain kernels round their results only.
TEST_P(CudaHopperAttentionTest, BackwardAgreesWithThePlainKernelsAtTrainingSizesAndGivesTheSameBitsTwice) {
  for (const Sizes& sizes : kTrainingSizes) {
    if (left_out(operations(sizes), to_string(sizes))) continue;
    for (const bool turned : {false, true}) {
      Problem p = make_problem(sizes, dtype(), rng_);
      const DeviceRotation rotation(sizes, rng_);
      if (turned) rotation.attach(p.shape);
      const DeviceProblem d(p);
      const std::string what = to_string(sizes) + (turned ? " turned" : "");
      Outputs plain(p), own(p), again(p);
      ASSERT_EQ(d.forward(true), kKernelOk);
      ASSERT_EQ(d.backward(true), kKernelOk);
      // The plain kernels' own entry leaves the rotation to its caller.
      if (turned) {
        ASSERT_EQ(cuda::rope().rotate(d.d_qkv.data(), p.shape.positions, p.shape.cos_sin, sizes.B * sizes.T,
                                      sizes.H + sizes.K, sizes.D, p.qkv_width, true, dtype(), nullptr),
                  kKernelOk);
      }
      download(plain, d);
      ASSERT_NO_FATAL_FAILURE(run(own, d)) << what;
      p.shape.deterministic = false;  // changes nothing
      ASSERT_NO_FATAL_FAILURE(run(again, d, /*poison=*/0x3c)) << what;
      expect_same_bits(again.d_qkv, own.d_qkv, "again, " + what);
      clear_gaps(plain, p);
      clear_gaps(own.d_qkv, p.qkv_width, (sizes.H + 2 * sizes.K) * sizes.D);
      expect_near_backward(own, plain, p, 1, what);
    }
  }
}

// A sequence's gradients do not depend on what it lies beside.
TEST_P(CudaHopperAttentionTest, BackwardOfASequenceAloneHasTheBitsThatItHasInABatch) {
  for (const int64_t D : kHeadSizes) {
    const Sizes sizes{3, 200, 4, 2, D};
    const Problem p = make_problem(sizes, dtype(), rng_);
    const DeviceProblem d(p);
    Outputs all(p);
    ASSERT_EQ(d.forward(true), kKernelOk);
    ASSERT_NO_FATAL_FAILURE(run(all, d));
    AttentionShape one = p.shape;
    one.B = 1;
    const int64_t qkv_row = sizes.T * p.qkv_width, o_row = sizes.T * p.o_width;
    for (int64_t b = 0; b < sizes.B; ++b) {
      const DeviceMemory alone(qkv_row * 2), workspace(cuda::hopper_attention_workspace_bytes(one));
      ASSERT_EQ(cuda::hopper_attention_backward(alone.data(), d.part(alone, d.k_at()), d.part(alone, d.v_at()),
                                                d.part(d.d_o, b * o_row), d.part(d.o, b * o_row),
                                                d.lse.as<float>() + b * sizes.H * sizes.T, d.part(d.qkv, b * qkv_row),
                                                d.part(d.qkv, b * qkv_row + d.k_at()),
                                                d.part(d.qkv, b * qkv_row + d.v_at()), one, workspace.data(), nullptr),
                kKernelOk);
      const Array bits = alone.array(dtype());
      EXPECT_EQ(std::memcmp(bits.data(), all.d_qkv.at(b * qkv_row), static_cast<size_t>(qkv_row * 2)), 0)
          << b << ", D " << D;
    }
  }
}

TEST_P(CudaHopperAttentionTest, GradientsInArraysOfTheirOwnHaveTheSameBits) {
  for (const int64_t D : kHeadSizes) {
    const Sizes sizes{2, 150, 6, 2, D};
    Problem p = make_problem(sizes, dtype(), rng_);
    const DeviceRotation rotation(sizes, rng_);
    rotation.attach(p.shape);
    const DeviceProblem d(p);
    Outputs packed(p);
    ASSERT_EQ(d.forward(true), kKernelOk);
    ASSERT_NO_FATAL_FAILURE(run(packed, d));

    struct Part {
      int64_t first, heads, stride;  // of the packed rows; of its own
    };
    const Part parts[] = {
        {0, sizes.H, sizes.H * D + 8}, {d.k_at(), sizes.K, sizes.K * D}, {d.v_at(), sizes.K, sizes.K * D + 72}};
    const int64_t N = sizes.B * sizes.T;
    std::optional<DeviceMemory> in[3], out[3];
    for (int i = 0; i < 3; ++i) {
      Array rows(dtype(), N * parts[i].stride);
      const auto bytes = static_cast<size_t>(parts[i].heads * D * 2);
      for (int64_t n = 0; n < N; ++n)
        std::memcpy(rows.at(n * parts[i].stride), p.qkv.at(n * p.qkv_width + parts[i].first), bytes);
      in[i].emplace(rows);
      out[i].emplace(N * parts[i].stride * 2);
    }
    AttentionShape shape = p.shape;
    shape.q_stride = parts[0].stride, shape.k_stride = parts[1].stride, shape.v_stride = parts[2].stride;
    const DeviceMemory workspace(cuda::hopper_attention_workspace_bytes(shape));
    ASSERT_EQ(cuda::hopper_attention_backward(out[0]->data(), out[1]->data(), out[2]->data(), d.d_o.data(), d.o.data(),
                                              d.lse.as<float>(), in[0]->data(), in[1]->data(), in[2]->data(), shape,
                                              workspace.data(), nullptr),
              kKernelOk);
    for (int i = 0; i < 3; ++i) {
      Array rows = out[i]->array(dtype());
      const int64_t used = parts[i].heads * D;
      int64_t wrong = 0;
      for (int64_t n = 0; n < N; ++n) {
        wrong += std::memcmp(rows.at(n * parts[i].stride), packed.d_qkv.at(n * p.qkv_width + parts[i].first),
                             static_cast<size_t>(used * 2)) != 0;
      }
      EXPECT_EQ(wrong, 0) << "rows of array " << i << ", D " << D;
      clear_gaps(rows, parts[i].stride, used);
    }
  }
}

TEST_P(CudaHopperAttentionTest, ARecordedGraphGivesTheSameBits) {
  for (const Sizes& sizes : {Sizes{2, 256, 4, 2, 64}, Sizes{1, 190, 4, 4, 64}, Sizes{2, 190, 4, 2, 128}}) {
    const Problem p = make_problem(sizes, dtype(), rng_);
    const DeviceProblem d(p);
    Outputs direct(p), recorded(p);
    ASSERT_EQ(forward_call(d, d.lse.as<float>(), nullptr), kKernelOk);
    ASSERT_NO_FATAL_FAILURE(run(direct, d));
    const DeviceMemory workspace(cuda::hopper_attention_workspace_bytes(p.shape));
    const TestStream stream;
    ASSERT_EQ(forward_call(d, d.lse.as<float>(), stream), kKernelOk);  // a stream's first call makes its scratch
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    const RecordedGraph graph(stream, [&] {
      EXPECT_EQ(forward_call(d, d.lse.as<float>(), stream), kKernelOk);
      EXPECT_EQ(backward_call(d, workspace, stream), kKernelOk);
    });
    for (const DeviceMemory* memory : {&d.o, &d.lse, &d.d_qkv}) memory->fill(0xff);
    ASSERT_NO_FATAL_FAILURE(graph.run(3));
    download(recorded, d);
    expect_same_bits(recorded.o, direct.o, "o, " + to_string(sizes));
    expect_same_bits(recorded.d_qkv, direct.d_qkv, to_string(sizes));
  }
}

TEST_P(CudaHopperAttentionTest, TakesWhatItCanAndNothingElse) {
  const Problem p = make_problem({2, 70, 4, 2, 64}, dtype(), rng_);
  EXPECT_FALSE(cuda::hopper_attention_applies(p.shape, DType::kF32));
  for (const int64_t D : {8, 64, 80, 96, 128, 256}) {
    const bool applies =
        cuda::hopper_attention_applies(make_problem({2, 70, 4, 2, D}, dtype(), rng_).shape, DType::kBF16);
    EXPECT_EQ(applies, D == 64 || D == 128) << D;
  }
  for (int64_t AttentionShape::*const stride :
       {&AttentionShape::q_stride, &AttentionShape::k_stride, &AttentionShape::v_stride, &AttentionShape::o_stride}) {
    AttentionShape odd = p.shape;
    odd.*stride += 4;
    EXPECT_FALSE(cuda::hopper_attention_applies(odd, DType::kBF16));
  }
  AttentionShape documents = p.shape;
  const int32_t starts = 0;
  documents.document_starts = &starts;
  EXPECT_FALSE(cuda::hopper_attention_applies(documents, DType::kBF16));
}

INSTANTIATE_TEST_SUITE_P(Cuda, CudaHopperAttentionTest, ::testing::Values(DType::kBF16), dtype_name);

}  // namespace
}  // namespace kintsugi::kernels
