// The device's attention against the reference loops, and what serves a shape against the plain kernels.
//   B batch   T tokens   H query heads   K key/value heads   D head size
#include "kernels/attention.h"

#include <chrono>
#include <iostream>

#include "kernels/cuda/attention_hopper.h"
#include "tests/kernels/cuda/attention_testing.h"

namespace kintsugi::kernels {
namespace {

// dq and dk turned once they were rounded, and before.
void expect_near_turned(Outputs& before, Outputs& after, const Problem& p, const std::string& what) {
  clear_gaps(before.d_qkv, p.qkv_width, (p.s.H + 2 * p.s.K) * p.s.D);
  clear_gaps(after.d_qkv, p.qkv_width, (p.s.H + 2 * p.s.K) * p.s.D);
  const int64_t half = p.s.D / 2, turned = (p.s.H + p.s.K) * p.s.D, end = turned + p.s.K * p.s.D;
  const double round = unit_roundoff(p.qkv.dtype());
  for (int64_t n = 0; n < p.s.B * p.s.T; ++n) {
    for (int64_t column = 0; column < end; ++column) {
      const int64_t i = n * p.qkv_width + column, other = column % p.s.D < half ? i + half : i - half;
      const double x = before.d_qkv.get(i), y = after.d_qkv.get(i);
      const double pair = std::hypot(x, static_cast<double>(before.d_qkv.get(other)));
      ASSERT_LE(std::fabs(x - y), column < turned ? round * (pair + std::fabs(x) + std::fabs(y)) : 0.0)
          << "token " << n << " column " << column << ", " << what;
    }
  }
}

constexpr Sizes kSizes[] = {{1, 1, 1, 1, 64},   {2, 2, 2, 1, 64},    {1, 7, 3, 3, 80},    {2, 64, 4, 2, 64},
                            {1, 65, 8, 2, 96},  {2, 128, 4, 4, 128}, {1, 129, 3, 1, 128}, {1, 257, 2, 2, 80},
                            {2, 300, 4, 2, 64}, {1, 384, 2, 1, 128}, {3, 200, 2, 2, 96}};
constexpr Sizes kOddSizes[] = {{1, 1, 1, 1, 8},     {1, 33, 2, 2, 20},  {2, 70, 3, 3, 13},
                               {1, 100, 2, 1, 200}, {1, 67, 1, 1, 256}, {1, 130, 2, 1, 129}};

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

// Turned by the rotation's own kernel the results have the same bits as calls of the two families in a row, which are
// deterministic here. Where the backward pass turns them before it rounds them, they differ by the roundings in front
// of the rotation, of two elements that are no larger than their pair, and by the last ones.
TEST_P(CudaAttentionTest, GradientsOfTurnedQueriesAndKeysAreTurnedBack) {
  for (const Sizes& sizes : {Sizes{2, 64, 4, 2, 64}, {1, 129, 3, 1, 128}, {1, 200, 2, 2, 80}, {1, 33, 2, 2, 20}}) {
    Problem p = make_problem(sizes, dtype(), rng_);
    const DeviceRotation rotation(sizes, rng_);
    const DeviceProblem d(p);
    Outputs apart(p), together(p);
    ASSERT_EQ(d.forward(false), kKernelOk);
    ASSERT_EQ(d.backward(false), kKernelOk);
    ASSERT_EQ(cuda::rope().rotate(d.d_qkv.data(), rotation.positions.as<int32_t>(), rotation.cos_sin.as<float>(),
                                  sizes.B * sizes.T, sizes.H + sizes.K, sizes.D, p.qkv_width, true, dtype(), nullptr),
              kKernelOk);
    download(apart, d);
    rotation.attach(p.shape);
    ASSERT_EQ(d.backward(false), kKernelOk);
    download(together, d);
    if (cuda::hopper_attention_applies(p.shape, dtype())) {
      expect_near_turned(together, apart, p, to_string(sizes));
    } else {
      expect_same_bits(together.d_qkv, apart.d_qkv, to_string(sizes));
    }
  }
}

// Sizes of real models, too large for the reference: what the table serves against the plain kernels.
TEST_P(CudaAttentionTest, LibraryAndPlainKernelsAgreeAtTrainingSizes) {
  for (const Sizes& sizes :
       {Sizes{2, 1024, 12, 12, 64}, Sizes{1, 2048, 8, 2, 64}, Sizes{1, 1024, 5, 5, 64}, Sizes{1, 2048, 4, 1, 128},
        Sizes{2, 515, 6, 2, 80}, Sizes{1, 1023, 4, 4, 96}, Sizes{1, 2048, 4, 1, 96}}) {
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

// Of heads that are the library's in both passes, whose plans are built by the call or were before it.
TEST_P(CudaAttentionTest, PlansChosenByTimingTravelAsTextAndGiveTheSameNumbers) {
  if (dtype() != DType::kBF16 || std::string(cuda::cudnn_version()).empty()) return;
  const DeviceMemory scratch(int64_t{256} << 20);
  for (const auto& [D, deterministic, begun] :
       {std::tuple{96, true, false}, {96, false, true}, {80, true, true}, {80, false, false}}) {
    Problem p = make_problem({2, 1024, 12, 6, D}, dtype(), rng_, /*gap=*/0);
    p.shape.deterministic = deterministic;
    cuda::AttentionTable table = cuda::attention_table_here(), read;
    for (const cuda::AttentionPass pass : {cuda::AttentionPass::kForwardWithLse, cuda::AttentionPass::kBackward}) {
      if (begun) cuda::begin_cudnn_attention(p.shape, pass, /*compared=*/true);
    }
    ASSERT_TRUE(cuda::wait_for_cudnn_attention(std::chrono::minutes(1)));
    const KernelError error = cuda::tune_attention(&table, p.shape, scratch.data(), int64_t{256} << 20, nullptr);
    ASSERT_EQ(error, kKernelOk) << text(error);
    EXPECT_EQ(table.entries.size(), 2u);
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
    const std::string what = "chosen, D " + std::to_string(D) + (deterministic ? ", deterministic" : "");
    EXPECT_EQ(std::string(cuda::attention().library(p.shape, dtype())), cuda::cudnn_version()) << what;
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
  for (const Sizes& sizes : {Sizes{2, 256, 4, 2, 64}, Sizes{1, 190, 4, 4, 96}}) {
    const Problem p = make_problem(sizes, dtype(), rng_);
    const DeviceProblem d(p), recorded(p);
    const TestStream stream;
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    ASSERT_EQ(d.forward(false, stream), kKernelOk);
    ASSERT_EQ(d.backward(false, stream), kKernelOk);
    RecordedGraph(stream, [&] {
      EXPECT_EQ(recorded.forward(false, stream), kKernelOk);
      EXPECT_EQ(recorded.backward(false, stream), kKernelOk);
    }).run(2);
    Outputs a(p), b(p);
    download(a, d);
    download(b, recorded);
    expect_same_bits(b.o, a.o, "o, " + to_string(sizes));
    expect_same_bits(b.d_qkv, a.d_qkv, "d_qkv, " + to_string(sizes));
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
    const ReferenceResults expected(p);
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
  const TestStream stream;
  then.attach(p, true);
  const DeviceProblem d(p);
  Outputs want(p), got(p);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  ASSERT_EQ(d.forward(false, stream), kKernelOk);
  ASSERT_EQ(d.backward(false, stream), kKernelOk);
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  download(want, d);
  now.attach(p, true);
  const RecordedGraph graph(stream, [&] {
    EXPECT_EQ(now.write(p, stream), kKernelOk);
    EXPECT_EQ(d.forward(false, stream), kKernelOk);
    EXPECT_EQ(d.backward(false, stream), kKernelOk);
  });
  for (const std::vector<int32_t>* starts : {&first, &second}) {
    now.starts.upload(starts->data(), static_cast<int64_t>(starts->size()) * 4);
    ASSERT_NO_FATAL_FAILURE(graph.run());
  }
  download(got, d);
  expect_same_bits(got.o, want.o, "o");
  expect_same_bits(got.d_qkv, want.d_qkv, "d_qkv");
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
