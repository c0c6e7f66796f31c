// The device's matrix products against the reference loops.   N rows (tokens)   I input width   O output width
#include "kernels/gemm.h"

#include <iostream>

#include "kernels/cuda/gemm_tuning.h"
#include "kernels/cuda/libraries.h"
#include "kernels/cuda/library_handles.h"
#include "kernels/cuda/matmul.h"
#include "tests/kernels/cuda/recorded_graph.h"
#include "tests/kernels/cuda/rowwise_testing.h"

namespace kintsugi::kernels {
namespace {

struct Sizes {
  int64_t N, I, O;
};

std::string to_string(const Sizes& s) {
  return "N " + std::to_string(s.N) + " I " + std::to_string(s.I) + " O " + std::to_string(s.O);
}

constexpr Sizes kSizes[] = {{1, 1, 1},     {3, 7, 5},        {1, 24, 44},     {13, 44, 24},   {50, 24, 251},
                            {33, 251, 1},  {97, 256, 48},    {64, 600, 77},   {130, 48, 530}, {257, 31, 33},
                            {128, 64, 96}, {1000, 192, 576}, {2048, 64, 128}, {512, 768, 256}};

class CudaGemmTest : public CudaRowwiseTest {
 protected:
  static void SetUpTestSuite() { ASSERT_EQ(cuda::init_libraries({}), kKernelOk); }
  const GemmKernels& gemm() const { return cuda::gemm(); }
  std::string text(KernelError error) const { return cuda::kernels().error_text(error); }
};

// The elements of `host` from a device address that is no multiple of 16 bytes.
struct Shifted {
  explicit Shifted(const Array& host) : memory(host.size() * size_of(host.dtype()) + kBytes) {
    memory.upload(host, kBytes);
  }
  void* data() const { return memory.as<char>() + kBytes; }
  static constexpr int64_t kBytes = 4;
  DeviceMemory memory;
};

TEST_P(CudaGemmTest, ForwardMatchesTheReferenceWithAndWithoutBias) {
  for (const Sizes& s : kSizes) {
    const Array x = normal(s.N * s.I), w = normal(s.O * s.I), bias = normal_f32(s.O);
    const DeviceMemory dev_x(x), dev_w(w), dev_bias(bias);
    for (const bool with_bias : {false, true}) {
      const DeviceMemory y = space(s.N * s.O);
      const KernelError error =
          gemm().linear_forward(y.data(), dev_x.data(), dev_w.data(), with_bias ? dev_bias.as<float>() : nullptr, s.N,
                                s.I, s.O, dtype(), nullptr);
      EXPECT_EQ(error, kKernelOk) << text(error) << ", " << to_string(s) << " bias " << with_bias;
      if (error != kKernelOk) continue;
      Array expected(dtype(), s.N * s.O);
      reference::gemm().linear_forward(expected.data(), x.data(), w.data(), with_bias ? bias.f32() : nullptr, s.N, s.I,
                                       s.O, dtype(), nullptr);
      // The bias is rounded to the storage type first; so is the product, by the library's kernels for rows that are no
      // multiple of 16 bytes.
      const double product = s.I % 8 != 0 || s.O % 8 != 0 ? 8 * std::sqrt(static_cast<double>(s.I)) : 0.0;
      const double rounded = with_bias ? unit_roundoff(dtype()) * (static_cast<double>(bias.max_abs()) + product) : 0.0;
      expect_close(y.array(dtype()), expected, sum_error(s.I) + rounded, 2 * unit_roundoff(dtype()),
                   "y, " + to_string(s) + (with_bias ? " bias" : ""));
    }
  }
}

TEST_P(CudaGemmTest, BackwardInputMatchesTheReferenceAndAccumulates) {
  for (const Sizes& s : kSizes) {
    const Array dy = normal(s.N * s.O), w = normal(s.O * s.I), before = normal(s.N * s.I);
    const DeviceMemory dev_dy(dy), dev_w(w);
    for (const bool accumulate : {false, true}) {
      Array expected = accumulate ? before : Array(dtype(), s.N * s.I);
      const DeviceMemory dx(expected);
      const KernelError error = gemm().linear_backward_input(dx.data(), dev_dy.data(), dev_w.data(), s.N, s.I, s.O,
                                                             accumulate, dtype(), nullptr);
      EXPECT_EQ(error, kKernelOk) << text(error) << ", " << to_string(s);
      if (error != kKernelOk) continue;
      reference::gemm().linear_backward_input(expected.data(), dy.data(), w.data(), s.N, s.I, s.O, accumulate, dtype(),
                                              nullptr);
      // The library rounds the product to the storage type before it adds what was there.
      const double product = accumulate ? unit_roundoff(dtype()) * 8 * std::sqrt(static_cast<double>(s.O)) : 0.0;
      expect_close(dx.array(dtype()), expected, sum_error(s.O) + product, 2 * unit_roundoff(dtype()),
                   "dx, " + to_string(s));
    }
  }
}

TEST_P(CudaGemmTest, BackwardWeightMatchesTheReferenceAndAccumulates) {
  for (const Sizes& s : kSizes) {
    const Array dy = normal(s.N * s.O), x = normal(s.N * s.I), before = normal_f32(s.O * s.I);
    const DeviceMemory dev_dy(dy), dev_x(x);
    for (const bool accumulate : {false, true}) {
      Array expected = accumulate ? before : Array(DType::kF32, s.O * s.I);
      const DeviceMemory dw(expected);
      const KernelError error = gemm().linear_backward_weight(dw.as<float>(), dev_dy.data(), dev_x.data(), s.N, s.I,
                                                              s.O, accumulate, dtype(), nullptr);
      EXPECT_EQ(error, kKernelOk) << text(error) << ", " << to_string(s);
      if (error != kKernelOk) continue;
      reference::gemm().linear_backward_weight(expected.f32(), dy.data(), x.data(), s.N, s.I, s.O, accumulate, dtype(),
                                               nullptr);
      expect_close(dw.array(DType::kF32), expected, sum_error(s.N), 2 * kF32Round, "dw, " + to_string(s));
    }
  }
}

TEST_P(CudaGemmTest, BiasGradientMatchesTheReferenceAndAccumulates) {
  for (const Sizes& s : {Sizes{1, 1, 1}, Sizes{300, 1, 251}, Sizes{65, 1, 513}, Sizes{4099, 1, 768}, Sizes{20000, 1, 8},
                         Sizes{129, 1, 20001}}) {
    const Array dy = normal(s.N * s.O), before = normal_f32(s.O);
    const DeviceMemory dev_dy(dy);
    for (const bool accumulate : {false, true}) {
      Array expected = accumulate ? before : Array(DType::kF32, s.O);
      const DeviceMemory dbias(expected);
      ASSERT_EQ(gemm().linear_backward_bias(dbias.as<float>(), dev_dy.data(), s.N, s.O, accumulate, dtype(), nullptr),
                kKernelOk);
      reference::gemm().linear_backward_bias(expected.f32(), dy.data(), s.N, s.O, accumulate, dtype(), nullptr);
      expect_close(dbias.array(DType::kF32), expected, sum_error(s.N), 2 * kF32Round, "dbias, " + to_string(s));
    }
  }
}

// GELU's slope is at most 1.13, so an error of what goes in comes out little larger; what is kept for the backward pass
// was rounded to the storage type.
TEST_P(CudaGemmTest, GeluBehindALayerMatchesTheReferenceBothWays) {
  for (const Sizes& s : {Sizes{1, 8, 8}, Sizes{40, 64, 256}, Sizes{257, 31, 33}, Sizes{1000, 192, 768}}) {
    const Array x = normal(s.N * s.I), w = normal(s.O * s.I), bias = normal_f32(s.O);
    const DeviceMemory dev_x(x), dev_w(w), dev_bias(bias), y = space(s.N * s.O), up = space(s.N * s.O);
    KernelError error = gemm().linear_gelu_forward(y.data(), up.data(), dev_x.data(), dev_w.data(),
                                                   dev_bias.as<float>(), s.N, s.I, s.O, dtype(), nullptr);
    EXPECT_EQ(error, kKernelOk) << text(error) << ", " << to_string(s);
    if (error != kKernelOk) continue;
    Array expected_y(dtype(), s.N * s.O), expected_up(dtype(), s.N * s.O);
    reference::gemm().linear_gelu_forward(expected_y.data(), expected_up.data(), x.data(), w.data(), bias.f32(), s.N,
                                          s.I, s.O, dtype(), nullptr);
    const double round = unit_roundoff(dtype());
    const double sum = 2 * (sum_error(s.I) + round * static_cast<double>(bias.max_abs()) + 4 * kF32Round);
    expect_close(up.array(dtype()), expected_up, sum, 2 * round, "up, " + to_string(s));
    expect_close(y.array(dtype()), expected_y, sum + 2 * round * static_cast<double>(expected_up.max_abs()), 2 * round,
                 "y, " + to_string(s));

    // The layer behind: from O' = s.I to the GELU's width.
    const Array dy = normal(s.N * s.I), w2 = normal(s.I * s.O);
    const DeviceMemory dev_dy(dy), dev_w2(w2), dev_up(expected_up), d_up = space(s.N * s.O);
    error = gemm().linear_gelu_backward_input(d_up.data(), dev_dy.data(), dev_w2.data(), dev_up.data(), s.N, s.O, s.I,
                                              dtype(), nullptr);
    EXPECT_EQ(error, kKernelOk) << text(error) << ", " << to_string(s);
    if (error != kKernelOk) continue;
    Array expected_d_up(dtype(), s.N * s.O);
    reference::gemm().linear_gelu_backward_input(expected_d_up.data(), dy.data(), w2.data(), expected_up.data(), s.N,
                                                 s.O, s.I, dtype(), nullptr);
    // The reference rounds the product, too, before GELU's slope; slope and tanh in fp32 err by a few roundings of it.
    const double product = 8 * std::sqrt(static_cast<double>(s.I));
    expect_close(d_up.array(dtype()), expected_d_up, 2 * sum_error(s.I) + 2 * (round + 1e-5) * product, 2 * round,
                 "d_up, " + to_string(s));
  }
}

TEST_P(CudaGemmTest, WeightAndBiasGradientsAtOnceMatchTheReference) {
  for (const Sizes& s : {Sizes{1, 8, 8}, Sizes{97, 256, 48}, Sizes{33, 251, 1}, Sizes{4099, 64, 192}}) {
    const Array dy = normal(s.N * s.O), x = normal(s.N * s.I);
    const Array before_w = normal_f32(s.O * s.I), before_b = normal_f32(s.O);
    const DeviceMemory dev_dy(dy), dev_x(x);
    for (const bool accumulate : {false, true}) {
      Array dw = accumulate ? before_w : Array(DType::kF32, s.O * s.I);
      Array db = accumulate ? before_b : Array(DType::kF32, s.O);
      const DeviceMemory dev_dw(dw), dev_db(db), again_w(dw), again_b(db);
      for (const auto& [to_w, to_b] : {std::pair{&dev_dw, &dev_db}, std::pair{&again_w, &again_b}}) {
        const KernelError error =
            gemm().linear_backward_weight_bias(to_w->as<float>(), to_b->as<float>(), dev_dy.data(), dev_x.data(), s.N,
                                               s.I, s.O, accumulate, dtype(), nullptr);
        EXPECT_EQ(error, kKernelOk) << text(error) << ", " << to_string(s);
      }
      reference::gemm().linear_backward_weight_bias(dw.f32(), db.f32(), dy.data(), x.data(), s.N, s.I, s.O, accumulate,
                                                    dtype(), nullptr);
      expect_close(dev_dw.array(DType::kF32), dw, sum_error(s.N), 2 * kF32Round, "dw, " + to_string(s));
      expect_close(dev_db.array(DType::kF32), db, sum_error(s.N), 2 * kF32Round, "dbias, " + to_string(s));
      expect_same_bits(again_w.array(DType::kF32), dev_dw.array(DType::kF32), "dw again, " + to_string(s));
      expect_same_bits(again_b.array(DType::kF32), dev_db.array(DType::kF32), "dbias again, " + to_string(s));
    }
  }
}

TEST_P(CudaGemmTest, OperandsMayStartAnywhere) {
  const Sizes s{70, 64, 48};
  const Array x = normal(s.N * s.I), w = normal(s.O * s.I), bias = normal_f32(s.O);
  const Shifted dev_x(x), dev_w(w), dev_bias(bias);
  Array nothing(dtype(), s.N * s.O);
  const Shifted y(nothing);
  const KernelError error =
      gemm().linear_forward(y.data(), dev_x.data(), dev_w.data(), static_cast<const float*>(dev_bias.data()), s.N, s.I,
                            s.O, dtype(), nullptr);
  ASSERT_EQ(error, kKernelOk) << text(error);
  Array expected(dtype(), s.N * s.O), actual(dtype(), s.N * s.O);
  reference::gemm().linear_forward(expected.data(), x.data(), w.data(), bias.f32(), s.N, s.I, s.O, dtype(), nullptr);
  ASSERT_EQ(cudaMemcpy(actual.data(), y.data(), static_cast<size_t>(actual.size() * size_of(dtype())),
                       cudaMemcpyDeviceToHost),
            cudaSuccess);
  // As above: where 16-byte rows are out of reach, the library rounds the product before it adds the bias.
  const double product = 8 * std::sqrt(static_cast<double>(s.I));
  expect_close(actual, expected,
               sum_error(s.I) + unit_roundoff(dtype()) * (static_cast<double>(bias.max_abs()) + product),
               2 * unit_roundoff(dtype()), "y");
}

TEST_P(CudaGemmTest, NoTokensGiveZeroWeightGradients) {
  const DeviceMemory dw(15 * 4), db(3 * 4), x = space(1);
  ASSERT_EQ(gemm().linear_backward_weight(dw.as<float>(), x.data(), x.data(), 0, 5, 3, false, dtype(), nullptr),
            kKernelOk);
  ASSERT_EQ(gemm().linear_backward_bias(db.as<float>(), x.data(), 0, 3, false, dtype(), nullptr), kKernelOk);
  const Array weights = dw.array(DType::kF32), biases = db.array(DType::kF32);
  for (int64_t i = 0; i < weights.size(); ++i) EXPECT_EQ(weights.get(i), 0.0f);
  for (int64_t i = 0; i < biases.size(); ++i) EXPECT_EQ(biases.get(i), 0.0f);
}

// Few outputs and long sums: where splitting the sum over blocks pays.
TEST_P(CudaGemmTest, TheSameCallGivesTheSameBitsAgainAndInsideAGraph) {
  const Sizes s{16384, 256, 128};
  const DeviceMemory dy(normal(s.N * s.O)), x(normal(s.N * s.I));
  const TestStream stream;
  const auto multiply = [&](const DeviceMemory& dw, const DeviceMemory& db) {
    const KernelError error =
        gemm().linear_backward_weight(dw.as<float>(), dy.data(), x.data(), s.N, s.I, s.O, false, dtype(), stream);
    return error != kKernelOk
               ? error
               : gemm().linear_backward_bias(db.as<float>(), dy.data(), s.N, s.O, false, dtype(), stream);
  };
  const DeviceMemory first(s.O * s.I * 4), again(s.O * s.I * 4), recorded(s.O * s.I * 4);
  const DeviceMemory first_bias(s.O * 4), again_bias(s.O * 4), recorded_bias(s.O * 4);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  ASSERT_EQ(multiply(first, first_bias), kKernelOk);
  ASSERT_EQ(multiply(again, again_bias), kKernelOk);
  RecordedGraph(stream, [&] { EXPECT_EQ(multiply(recorded, recorded_bias), kKernelOk); }).run();
  expect_same_bits(again.array(DType::kF32), first.array(DType::kF32), "dw, second call");
  expect_same_bits(recorded.array(DType::kF32), first.array(DType::kF32), "dw, in a graph");
  expect_same_bits(again_bias.array(DType::kF32), first_bias.array(DType::kF32), "dbias, second call");
  expect_same_bits(recorded_bias.array(DType::kF32), first_bias.array(DType::kF32), "dbias, in a graph");
}

TEST_P(CudaGemmTest, SizesBelowOneAreRefused) {
  const DeviceMemory m = space(16);
  EXPECT_NE(gemm().linear_forward(m.data(), m.data(), m.data(), nullptr, 1, 0, 1, dtype(), nullptr), kKernelOk);
  EXPECT_NE(gemm().linear_backward_input(m.data(), m.data(), m.data(), -1, 1, 1, false, dtype(), nullptr), kKernelOk);
}

TEST_P(CudaGemmTest, TunedAlgorithmsTravelAsTextAndGiveRightResults) {
  const Sizes s{1024, 512, 256};
  std::vector<cuda::GemmProblem> problems;
  for (const cuda::GemmOp op : {cuda::GemmOp::kForward, cuda::GemmOp::kBackwardInput, cuda::GemmOp::kBackwardWeight}) {
    problems.push_back({op, s.N, s.I, s.O, dtype()});
    problems.push_back({op, s.N, s.I, s.O, dtype(), op == cuda::GemmOp::kBackwardWeight});
    problems.push_back({op, 33, 40, 72, dtype()});
  }
  const int64_t scratch_bytes = cuda::gemm_tuning_scratch_bytes(problems);
  const DeviceMemory scratch(scratch_bytes);
  cuda::GemmTable table;
  table.environment = cuda::gemm_environment();
  std::vector<cuda::GemmTuning> report;
  const KernelError error =
      cuda::tune_gemms(&table, table.missing(problems), scratch.data(), scratch_bytes, {}, nullptr, &report);
  ASSERT_EQ(error, kKernelOk) << text(error);
  EXPECT_TRUE(table.missing(problems).empty());
  for (const cuda::GemmTuning& t : report) {
    EXPECT_GT(t.candidates, 0);
    EXPECT_GT(t.best_us, 0) << to_string(t.problem);
    EXPECT_GT(t.first_us, 0) << to_string(t.problem);
  }
  cuda::GemmTable read;
  std::string why;
  ASSERT_TRUE(cuda::parse_gemm_table(cuda::to_text(table), &read, &why)) << why;
  ASSERT_TRUE(cuda::use_gemm_table(read, &why)) << why;
  const Array dy = normal(s.N * s.O), x = normal(s.N * s.I);
  const DeviceMemory dev_dy(dy), dev_x(x), dw(s.O * s.I * 4);
  ASSERT_EQ(gemm().linear_backward_weight(dw.as<float>(), dev_dy.data(), dev_x.data(), s.N, s.I, s.O, false, dtype(),
                                          nullptr),
            kKernelOk);
  Array expected(DType::kF32, s.O * s.I);
  reference::gemm().linear_backward_weight(expected.f32(), dy.data(), x.data(), s.N, s.I, s.O, false, dtype(), nullptr);
  expect_close(dw.array(DType::kF32), expected, sum_error(s.N), 2 * kF32Round, "dw");
  EXPECT_TRUE(cuda::use_gemm_table({cuda::gemm_environment(), {}}, &why)) << why;
}

// Those with tiles of our choosing, too: the library has checked them, nobody has run them.
TEST_P(CudaGemmTest, EveryAlgorithmThatIsProposedGivesRightResults) {
  const Sizes s{1032, 328, 776};
  const Array x = normal(s.N * s.I), w = normal(s.O * s.I), dy = normal(s.N * s.O);
  const DeviceMemory dev_x(x), dev_w(w), dev_dy(dy);
  void* scratch = nullptr;
  ASSERT_EQ(cuda::stream_scratch(&scratch, nullptr), kKernelOk);
  for (const cuda::GemmOp op : {cuda::GemmOp::kForward, cuda::GemmOp::kBackwardInput, cuda::GemmOp::kBackwardWeight}) {
    const bool forward = op == cuda::GemmOp::kForward, weight = op == cuda::GemmOp::kBackwardWeight;
    const DType out = weight ? DType::kF32 : dtype();
    const int64_t size = weight ? s.O * s.I : forward ? s.N * s.O : s.N * s.I;
    const int64_t terms = weight ? s.N : forward ? s.I : s.O;
    Array expected(out, size);
    if (weight) {
      reference::gemm().linear_backward_weight(expected.f32(), dy.data(), x.data(), s.N, s.I, s.O, false, dtype(),
                                               nullptr);
    } else if (forward) {
      reference::gemm().linear_forward(expected.data(), x.data(), w.data(), nullptr, s.N, s.I, s.O, dtype(), nullptr);
    } else {
      reference::gemm().linear_backward_input(expected.data(), dy.data(), w.data(), s.N, s.I, s.O, false, dtype(),
                                              nullptr);
    }
    const cuda::GemmProblem problem{op, s.N, s.I, s.O, dtype()};
    const DeviceMemory d(size * size_of(out));
    const cuda::Operands operands{d.data(), weight ? dev_x.data() : dev_w.data(),
                                  forward ? dev_x.data() : dev_dy.data()};
    cuda::Matmul matmul;
    ASSERT_EQ(matmul.init(problem, operands), CUBLAS_STATUS_SUCCESS);
    std::vector<cublasLtMatmulAlgo_t> algorithms;
    ASSERT_EQ(cuda::propose_widely(&algorithms, matmul, problem, operands, 40), CUBLAS_STATUS_SUCCESS);
    EXPECT_GT(algorithms.size(), dtype() == DType::kBF16 ? 8u : 0u) << to_string(problem);
    for (size_t i = 0; i < algorithms.size(); ++i) {
      d.fill(0xff);
      EXPECT_EQ(matmul.run(operands, algorithms[i], scratch, cuda::stream_scratch_bytes(), nullptr),
                CUBLAS_STATUS_SUCCESS)
          << to_string(problem) << ", " << i;
      expect_close(d.array(out), expected, sum_error(terms), 2 * unit_roundoff(out), to_string(problem).c_str());
    }
  }
}

KTG_FOR_BOTH_TYPES(CudaGemmTest);

TEST(CudaGemmLibraryTest, StreamsGetScratchOfTheirOwnAndGiveItBack) {
  ASSERT_EQ(cuda::init_libraries({}), kKernelOk);
  const DeviceMemory m(256);
  const auto use = [&](cudaStream_t stream) {
    return cuda::gemm().linear_forward(m.data(), m.data(), m.data(), nullptr, 2, 2, 2, DType::kF32, stream);
  };
  int64_t most = 0;
  for (int round = 0; round < 2; ++round) {
    std::vector<cudaStream_t> streams(3);
    for (cudaStream_t& stream : streams) {
      ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
      ASSERT_EQ(use(stream), kKernelOk);
    }
    const int64_t held = cuda::library_scratch_bytes();
    if (round == 1) {
      EXPECT_EQ(held, most) << "new streams take what old ones gave back";
    }
    most = held;
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    for (cudaStream_t stream : streams) {
      cuda::release_library_stream(stream);
      cudaStreamDestroy(stream);
    }
  }
}

TEST(CudaGemmLibraryTest, TablesOfOtherMachinesAndStrangeAlgorithmsAreRefused) {
  ASSERT_EQ(cuda::init_libraries({}), kKernelOk);
  std::string why;
  cuda::GemmTable table;
  table.environment = cuda::gemm_environment();
  table.environment.cublaslt += 1;
  EXPECT_FALSE(cuda::use_gemm_table(table, &why));
  EXPECT_NE(why.find("made on"), std::string::npos) << why;
  table.environment = cuda::gemm_environment();
  cuda::TunedGemm strange{{cuda::GemmOp::kForward, 64, 64, 64}, 1.0, {}};
  strange.algorithm.fill(0x0123456789abcdefu);
  table.put(strange);
  EXPECT_FALSE(cuda::use_gemm_table(table, &why));
  EXPECT_NE(why.find("refuses"), std::string::npos) << why;
}

TEST(CudaGemmLibraryTest, NamesWhatServesTheProducts) {
  std::cout << cuda::gemm().library() << std::endl;
  EXPECT_TRUE(std::string(cuda::gemm().library()).starts_with("cuBLASLt ")) << cuda::gemm().library();
}

}  // namespace
}  // namespace kintsugi::kernels
