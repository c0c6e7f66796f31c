// Attention of every instruction set variant against the reference loops, and the promises on bits.
//   B batch   T tokens   H query heads   K key/value heads   D head size
#include "kernels/attention.h"

#include <gtest/gtest.h>

#include "tests/kernels/attention_problem.h"

namespace kintsugi::kernels {
namespace {

constexpr Sizes kSizes[] = {{1, 1, 1, 1, 8},    {2, 2, 2, 1, 16},  {1, 7, 3, 3, 12},  {2, 16, 4, 2, 32},
                            {1, 33, 2, 2, 20},  {2, 64, 2, 1, 64}, {1, 65, 8, 2, 24}, {1, 129, 3, 1, 128},
                            {1, 257, 2, 2, 40}, {1, 300, 4, 2, 32}};

void forward(Outputs& out, const AttentionKernels& kernels, const Problem& p) {
  ASSERT_EQ(kernels.forward(out.o.data(), out.lse.f32(), p.q(), p.k(), p.v(), p.shape, p.qkv.dtype(), nullptr),
            kKernelOk);
}

// From the given o and lse, so that a backward is tested on its own.
void backward(Outputs& out, const AttentionKernels& kernels, const Problem& p, const Array& o, const Array& lse) {
  std::vector<float> workspace(static_cast<size_t>(kernels.backward_workspace_bytes(p.shape, p.qkv.dtype()) / 4 + 1));
  const Sizes& s = p.s;
  ASSERT_EQ(
      kernels.backward(out.d_qkv.at(0), out.d_qkv.at(s.H * s.D), out.d_qkv.at((s.H + s.K) * s.D), p.d_o.data(),
                       o.data(), lse.f32(), p.q(), p.k(), p.v(), p.shape, workspace.data(), p.qkv.dtype(), nullptr),
      kKernelOk);
}

// Elements between tokens' rows belong to nobody: both outputs must have left them alone (NaN); make them comparable.
void clear_gaps(Array& a, int64_t width, int64_t used) {
  for (int64_t n = 0; n < a.size() / width; ++n) {
    for (int64_t i = used; i < width; ++i) {
      EXPECT_TRUE(std::isnan(a.get(n * width + i))) << "gap written at token " << n << " element " << i;
      a.set(n * width + i, 0.0f);
    }
  }
}

// The largest error of a score: a chain of D multiply-adds and the scaling of q, on terms whose absolute sum is bounded
// by the largest sum_d |q_d k_d|. exp's own error and the rounding of lse count as 4 more roundings of the score's
// size.
double score_error(const Problem& p) {
  double largest = 0;
  for (int64_t b = 0; b < p.s.B; ++b) {
    for (int64_t h = 0; h < p.s.H; ++h) {
      for (int64_t t = 0; t < p.s.T; ++t) {
        for (int64_t u = 0; u <= t; ++u) {
          double sum = 0;
          const int64_t q0 = (b * p.s.T + t) * p.qkv_width + h * p.s.D;
          const int64_t k0 = (b * p.s.T + u) * p.qkv_width + (p.s.H + h / (p.s.H / p.s.K)) * p.s.D;
          for (int64_t d = 0; d < p.s.D; ++d) sum += std::fabs(p.qkv.get(q0 + d) * p.qkv.get(k0 + d));
          largest = std::fmax(largest, sum);
        }
      }
    }
  }
  return static_cast<double>(p.s.D + 6) * kF32Round * (1.0 + largest * static_cast<double>(p.shape.scale));
}

class AttentionTest : public VariantTest {};

TEST_P(AttentionTest, ForwardMatchesTheReferenceOverOddSizes) {
  for (const Sizes& sizes : kSizes) {
    const Problem p(sizes, dtype(), rng_);
    Outputs fast_out(p), reference_out(p);
    forward(fast_out, *fast().attention, p);
    forward(reference_out, reference::attention(), p);
    clear_gaps(fast_out.o, p.o_width, sizes.H * sizes.D);
    clear_gaps(reference_out.o, p.o_width, sizes.H * sizes.D);
    // Weights p and their sum each err by the score's error; o is a chain of T more roundings of terms up to max |v|.
    const double score = score_error(p);
    const double error =
        (2 * score + static_cast<double>(sizes.T + 8) * kF32Round) * static_cast<double>(p.qkv.max_abs());
    expect_close(fast_out.o, reference_out.o, error, 2 * unit_roundoff(dtype()), "o, " + to_string(sizes));
    expect_close(fast_out.lse, reference_out.lse, 2 * score + static_cast<double>(sizes.T + 8) * kF32Round,
                 4 * kF32Round, "lse, " + to_string(sizes));
  }
}

TEST_P(AttentionTest, BackwardMatchesTheReferenceOverOddSizes) {
  for (const Sizes& sizes : kSizes) {
    const Problem p(sizes, dtype(), rng_);
    Outputs fast_out(p), reference_out(p);
    forward(reference_out, reference::attention(), p);
    backward(fast_out, *fast().attention, p, reference_out.o, reference_out.lse);
    backward(reference_out, reference::attention(), p, reference_out.o, reference_out.lse);
    clear_gaps(fast_out.d_qkv, p.qkv_width, (sizes.H + 2 * sizes.K) * sizes.D);
    clear_gaps(reference_out.d_qkv, p.qkv_width, (sizes.H + 2 * sizes.K) * sizes.D);
    // A term of dq, dk or dv is p times a number of at most `term`: do itself (dv), or scale (dp - delta) k, with |dp|
    // and |delta| at most D max|do| max|v|. Each p errs relatively by the score's error; sums over rows of p add up to
    // 1 (dq) or, over at most T rows and the group's heads, to `mass` (dk, dv).
    const double x = static_cast<double>(p.qkv.max_abs()), g = static_cast<double>(p.d_o.max_abs());
    const double dp =
        std::sqrt(static_cast<double>(sizes.D)) * x * g;  // norm of a random dot product, not its worst case
    const double term = std::fmax(g, 2 * dp * x * static_cast<double>(p.shape.scale));
    const double roundings = static_cast<double>(sizes.T * sizes.H / sizes.K + sizes.D + 8) * kF32Round;
    const double mass = 1.0 + std::log(static_cast<double>(sizes.T)) * static_cast<double>(sizes.H / sizes.K);
    expect_close(fast_out.d_qkv, reference_out.d_qkv, (2 * score_error(p) + roundings) * term * mass,
                 2 * unit_roundoff(dtype()), "d_qkv, " + to_string(sizes));
  }
}

TEST_P(AttentionTest, GradientsOfTurnedQueriesAndKeysAreTurnedBack) {
  for (const Sizes& sizes : {Sizes{2, 16, 4, 2, 32}, {1, 65, 8, 2, 24}, {1, 7, 3, 3, 12}}) {
    Problem p(sizes, dtype(), rng_);
    for (const KernelTable* table : {&fast(), &reference::kernels()}) {
      Outputs plain(p), turned(p);
      p.shape.cos_sin = nullptr;
      forward(plain, *table->attention, p);
      backward(plain, *table->attention, p, plain.o, plain.lse);
      const RandomRotation rotation(sizes, rng_);
      ASSERT_EQ(table->rope->rotate(plain.d_qkv.data(), rotation.positions.data(), rotation.cos_sin.data(),
                                   sizes.B * sizes.T, sizes.H + sizes.K, sizes.D, p.qkv_width, true, dtype(), nullptr),
                kKernelOk);
      p.shape.positions = rotation.positions.data();
      p.shape.cos_sin = rotation.cos_sin.data();
      backward(turned, *table->attention, p, plain.o, plain.lse);
      EXPECT_TRUE(turned.d_qkv.same_bits(plain.d_qkv)) << to_string(sizes);
    }
  }
}

TEST_P(AttentionTest, GradientsInArraysOfTheirOwnAreTurnedBackToo) {
  const Sizes sizes{2, 20, 4, 2, 16};
  Problem p(sizes, dtype(), rng_);
  const RandomRotation rotation(sizes, rng_);
  p.shape.positions = rotation.positions.data();
  p.shape.cos_sin = rotation.cos_sin.data();
  Outputs packed(p);
  forward(packed, *fast().attention, p);
  backward(packed, *fast().attention, p, packed.o, packed.lse);
  Array dq(dtype(), p.qkv.size()), dk(dtype(), p.qkv.size()), dv(dtype(), p.qkv.size());
  ASSERT_EQ(fast().attention->backward(dq.data(), dk.data(), dv.data(), p.d_o.data(), packed.o.data(), packed.lse.f32(),
                                       p.q(), p.k(), p.v(), p.shape, nullptr, dtype(), nullptr),
            kKernelOk);
  for (int64_t n = 0; n < sizes.B * sizes.T; ++n) {
    const int64_t at = n * p.qkv_width, k = sizes.H * sizes.D;
    const auto same = [&](const Array& one, int64_t first, int64_t heads) {
      const auto bytes = static_cast<size_t>(heads * sizes.D * size_of(dtype()));
      return std::memcmp(one.at(at), packed.d_qkv.at(at + first), bytes) == 0;
    };
    ASSERT_TRUE(same(dq, 0, sizes.H) && same(dk, k, sizes.K) && same(dv, k + sizes.K * sizes.D, sizes.K)) << n;
  }
}

TEST_P(AttentionTest, ARowHasTheSameBitsWhateverTheLengthAndTheBatch) {
  const Sizes whole{2, 300, 4, 2, 32};
  const Problem p(whole, dtype(), rng_);
  Outputs all(p);
  forward(all, *fast().attention, p);
  const int64_t row_bytes = whole.H * whole.D * size_of(dtype());
  for (const int64_t T : {1, 2, 7, 8, 9, 31, 64, 100, 255, 256, 257, 299}) {
    AttentionShape shape = p.shape;
    shape.B = 1;
    shape.T = T;
    Array o(dtype(), T * p.o_width), lse(DType::kF32, whole.H * T);
    const int64_t second = whole.T * p.qkv_width;  // the second sequence alone, cut to T tokens
    ASSERT_EQ(fast().attention->forward(o.data(), lse.f32(), p.qkv.at(second), p.qkv.at(second + whole.H * whole.D),
                                        p.qkv.at(second + (whole.H + whole.K) * whole.D), shape, dtype(), nullptr),
              kKernelOk);
    for (int64_t t = 0; t < T; ++t) {
      ASSERT_EQ(std::memcmp(o.at(t * p.o_width), all.o.at((whole.T + t) * p.o_width), static_cast<size_t>(row_bytes)),
                0)
          << "T " << T << " row " << t;
      for (int64_t h = 0; h < whole.H; ++h) {
        ASSERT_EQ(lse.get(h * T + t), all.lse.get((whole.H + h) * whole.T + t)) << "T " << T << " row " << t;
      }
    }
  }
}

TEST_P(AttentionTest, LaterTokensNeverReachARowEvenAsNaN) {
  const Sizes sizes{1, 40, 2, 1, 16};
  Problem p(sizes, dtype(), rng_);
  Outputs clean(p), poisoned(p);
  forward(clean, *fast().attention, p);
  const int64_t first_bad = 21;
  for (int64_t i = first_bad * p.qkv_width; i < p.qkv.size(); ++i)
    p.qkv.set(i, std::numeric_limits<float>::quiet_NaN());
  forward(poisoned, *fast().attention, p);
  EXPECT_EQ(
      std::memcmp(clean.o.data(), poisoned.o.data(), static_cast<size_t>(first_bad * p.o_width * size_of(dtype()))), 0);
  for (int64_t t = first_bad; t < sizes.T; ++t) EXPECT_TRUE(std::isnan(poisoned.o.get(t * p.o_width))) << t;
}

// One document of a packed problem, by itself: the same kernels' outputs.
struct Alone {
  Alone(const Problem& p, int64_t first, int64_t T, const AttentionKernels& kernels)
      : o(p.qkv.dtype(), T * p.o_width), lse(DType::kF32, p.s.H * T), d_qkv(p.qkv.dtype(), T * p.qkv_width) {
    const int64_t k = p.s.H * p.s.D, v = k + p.s.K * p.s.D, at = first * p.qkv_width;
    const DType dtype = p.qkv.dtype();
    AttentionShape shape = p.shape;
    shape.B = 1, shape.T = T, shape.document_starts = nullptr;
    kernels.forward(o.data(), lse.f32(), p.qkv.at(at), p.qkv.at(at + k), p.qkv.at(at + v), shape, dtype, nullptr);
    kernels.backward(d_qkv.at(0), d_qkv.at(k), d_qkv.at(v), p.d_o.at(first * p.o_width), o.data(), lse.f32(),
                     p.qkv.at(at), p.qkv.at(at + k), p.qkv.at(at + v), shape, nullptr, dtype, nullptr);
  }
  Array o, lse, d_qkv;
};

TEST_P(AttentionTest, DocumentsPackedInASequenceHaveTheBitsOfSequencesOfTheirOwn) {
  for (const Sizes& sizes : {Sizes{2, 40, 4, 2, 16}, {1, 300, 2, 1, 40}, {2, 129, 3, 3, 24}, {1, 1, 1, 1, 8}}) {
    Problem p(sizes, dtype(), rng_);
    const std::vector<int32_t> starts = random_document_starts(sizes.B, sizes.T, rng_);
    p.shape.document_starts = starts.data();
    const auto bytes = [&](int64_t elements) { return static_cast<size_t>(elements * size_of(dtype())); };
    for (const AttentionKernels* kernels : {fast().attention, &reference::attention()}) {
      Outputs packed(p);
      forward(packed, *kernels, p);
      backward(packed, *kernels, p, packed.o, packed.lse);
      const int64_t N = sizes.B * sizes.T, k = sizes.H * sizes.D, row = (sizes.H + 2 * sizes.K) * sizes.D;
      for (int64_t first = 0, end; first < N; first = end) {
        const auto start = [&](int64_t n) { return n / sizes.T * sizes.T + starts[static_cast<size_t>(n)]; };
        for (end = first + 1; end < N && start(end) == start(first);) ++end;
        const Alone alone(p, first, end - first, *kernels);
        const std::string where =
            to_string(sizes) + ", document of tokens " + std::to_string(first) + " to " + std::to_string(end - 1);
        for (int64_t t = 0; t < end - first; ++t) {
          ASSERT_EQ(std::memcmp(alone.o.at(t * p.o_width), packed.o.at((first + t) * p.o_width), bytes(k)), 0)
              << "o, " << where << ", token " << t;
          ASSERT_EQ(
              std::memcmp(alone.d_qkv.at(t * p.qkv_width), packed.d_qkv.at((first + t) * p.qkv_width), bytes(row)), 0)
              << "d_qkv, " << where << ", token " << t;
          for (int64_t h = 0; h < sizes.H; ++h) {
            const int64_t b = first / sizes.T, at = (b * sizes.H + h) * sizes.T + first % sizes.T + t;
            ASSERT_EQ(alone.lse.get(h * (end - first) + t), packed.lse.get(at)) << "lse, " << where << ", token " << t;
          }
        }
      }
    }
  }
}

TEST_P(AttentionTest, ResultsDoNotDependOnTheNumberOfThreads) {
  const Sizes sizes{2, 150, 4, 2, 32};
  const Problem p(sizes, dtype(), rng_);
  Outputs first(p);
  for_thread_counts([&](int threads) {
    Outputs out(p);
    forward(out, *fast().attention, p);
    backward(out, *fast().attention, p, out.o, out.lse);
    if (threads == 1) first = out;
    EXPECT_TRUE(out.o.same_bits(first.o)) << threads << " threads";
    EXPECT_TRUE(out.lse.same_bits(first.lse)) << threads << " threads";
    EXPECT_TRUE(out.d_qkv.same_bits(first.d_qkv)) << threads << " threads";
  });
}

TEST_P(AttentionTest, LseMayBeNull) {
  const Problem p({1, 9, 2, 2, 16}, dtype(), rng_);
  Outputs with(p), without(p);
  forward(with, *fast().attention, p);
  ASSERT_EQ(fast().attention->forward(without.o.data(), nullptr, p.q(), p.k(), p.v(), p.shape, dtype(), nullptr),
            kKernelOk);
  EXPECT_TRUE(with.o.same_bits(without.o));
}

INSTANTIATE_TEST_SUITE_P(Cpu, AttentionTest, ::testing::ValuesIn(all_variant_cases()), case_name);

}  // namespace
}  // namespace kintsugi::kernels
