// The fused operations of a decode step against the reference families one by one.
//   N sequences   C width   O output width   H, K, D heads, key/value heads, head size
#include "kernels/decode_layer.h"

#include <gtest/gtest.h>

#include "kernels/activation.h"
#include "kernels/cuda/gemv.h"
#include "kernels/cuda/libraries.h"
#include "kernels/gemm.h"
#include "kernels/norm.h"
#include "kernels/rope.h"
#include "tests/kernels/cuda/device_array.h"
#include "tests/kernels/paged_problem.h"

namespace kintsugi::kernels {
namespace {

constexpr DType kType = DType::kBF16;

class DecodeLayerTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { ASSERT_EQ(cuda::init_libraries({}), kKernelOk); }
  std::mt19937 rng_{kSeed};
};

TEST_F(DecodeLayerTest, NormLinearMatchesNormAndProductAndSwiglu) {
  const struct {
    int64_t N, C, O;
    bool branch, bias, swiglu;
  } cases[] = {
      {1, 8, 5, true, false, false},      {1, 2048, 100, false, true, false}, {2, 1000, 33, true, true, false},
      {3, 2048, 64, true, false, true},   {4, 1024, 19, true, true, true},    {5, 1024, 19, true, true, true},
      {4, 5120, 40, true, false, false},  {9, 512, 70, true, false, true},    {16, 2048, 130, true, true, true},
      {32, 2048, 128, true, false, true}, {24, 512, 64, true, false, false},  {33, 512, 64, true, true, true},
      {13, 264, 16, false, false, false}, {1, 1024, 3072, true, false, true}, {3, 3000, 200, true, true, false}};
  for (const auto& c : cases) {
    const std::string what = "N " + std::to_string(c.N) + " C " + std::to_string(c.C) + " O " + std::to_string(c.O) +
                             (c.swiglu ? " swiglu" : "");
    const int64_t rows = c.swiglu ? 2 * c.O : c.O;
    const Array stream = Array::normal(kType, c.N * c.C, rng_), branch = Array::normal(kType, c.N * c.C, rng_);
    const Array norm = Array::normal(DType::kF32, c.C, rng_), bias = Array::normal(DType::kF32, rows, rng_);
    const Array w = Array::normal(kType, rows * c.C, rng_, 1.0f / std::sqrt(static_cast<float>(c.C)));
    const DeviceMemory d_stream(stream), d_branch(branch), d_norm(norm), d_bias(bias), d_w(w);
    const DeviceMemory sum(c.N * c.C * 2), normed(c.N * c.C * 2), y(c.N * c.O * 2), scratch(c.N * rows * 2);
    // The product of many rows is a library's, whose stores a tool that watches our kernels alone does not see: what it
    // leaves out shows as NaN then.
    if (!cuda::gemv_applies(c.N, c.C, rows, kType)) scratch.fill(0xff);
    const DecodeNorm in{sum.data(),    d_stream.data(), c.branch ? d_branch.data() : nullptr, d_norm.as<float>(), 1e-5f,
                        normed.data(), scratch.data()};
    ASSERT_EQ(cuda::decode_layer().norm_linear(y.data(), in, d_w.data(), c.bias ? d_bias.as<float>() : nullptr, c.N,
                                               c.C, c.O, c.swiglu, nullptr),
              kKernelOk)
        << what;

    Array r_sum = stream, r_normed(kType, c.N * c.C), r_rstd(DType::kF32, c.N), product(kType, c.N * rows);
    if (c.branch) {
      ASSERT_EQ(reference::norm().residual_rms_norm_forward(r_sum.data(), r_normed.data(), r_rstd.f32(), branch.data(),
                                                            stream.data(), norm.f32(), c.N, c.C, 1e-5f, kType, nullptr),
                kKernelOk);
    } else {
      ASSERT_EQ(reference::norm().rms_norm_forward(r_normed.data(), r_rstd.f32(), stream.data(), norm.f32(), c.N, c.C,
                                                   RowLayout{}, 1e-5f, kType, nullptr),
                kKernelOk);
    }
    ASSERT_EQ(reference::gemm().linear_forward(product.data(), r_normed.data(), w.data(), c.bias ? bias.f32() : nullptr,
                                               c.N, c.C, rows, kType, nullptr),
              kKernelOk);
    Array expected = product;
    if (c.swiglu) {
      expected = Array(kType, c.N * c.O);
      ASSERT_EQ(reference::activation().swiglu_forward(expected.data(), product.data(), c.N, c.O, kType, nullptr),
                kKernelOk);
    }
    if (c.branch) {
      EXPECT_TRUE(sum.array(kType).same_bits(r_sum)) << what;
    }
    // A normed element may round to the neighbour (2^-8 of it), independently for each of C: sqrt(C) of them with
    // weights of 1/sqrt(C), four deviations. swiglu's own roundings are relative, to values of about 4.
    expect_close(y.array(kType), expected, (c.swiglu ? 6 : 1) * 4 * kBF16Round, 4 * kBF16Round, what);
  }
}

TEST_F(DecodeLayerTest, ARowHasTheSameBitsWhateverTheNumberOfRows) {
  const int64_t C = 1096, O = 45;
  const Array stream = Array::normal(kType, 16 * C, rng_), branch = Array::normal(kType, 16 * C, rng_);
  const Array norm = Array::normal(DType::kF32, C, rng_), w = Array::normal(kType, 2 * O * C, rng_, 0.03f);
  const DeviceMemory d_stream(stream), d_branch(branch), d_norm(norm), d_w(w);
  Array all(kType, 0);
  for (const int64_t N : {16, 1, 2, 4, 5, 8, 9, 15}) {
    const DeviceMemory sum(N * C * 2), normed(N * C * 2), y(N * O * 2), scratch(N * 2 * O * 2);
    ASSERT_EQ(cuda::decode_layer().norm_linear(y.data(),
                                               {sum.data(), d_stream.data(), d_branch.data(), d_norm.as<float>(), 1e-6f,
                                                normed.data(), scratch.data()},
                                               d_w.data(), nullptr, N, C, O, true, nullptr),
              kKernelOk);
    const Array some = y.array(kType);
    if (N == 16) {
      all = some;
    } else {
      EXPECT_EQ(std::memcmp(some.data(), all.data(), static_cast<size_t>(N * O * 2)), 0) << N << " rows";
    }
  }
}

TEST_F(DecodeLayerTest, AttentionTurnsWritesAndAttendsAsTheFamiliesDo) {
  const struct {
    std::vector<int32_t> lens;
    int64_t H, K, D;
    bool qk_norm;
  } cases[] = {{{1, 70, 64}, 4, 2, 64, false},
               {{1000, 3, 65}, 16, 8, 128, true},
               {{129}, 8, 1, 80, true},
               {{200, 128}, 20, 2, 96, false},
               {{33}, 2, 2, 256, true},
               {std::vector<int32_t>(20, 700), 8, 4, 128, true},
               {std::vector<int32_t>(66, 65), 8, 8, 64, false}};
  for (const auto& c : cases) {
    const std::string what = "H " + std::to_string(c.H) + " D " + std::to_string(c.D);
    // The problem's q rows hold q, k and v; its cache has a slot for the new token, whose contents are overwritten.
    PagedProblem p(c.lens, c.H, c.K, c.D, 16, kType, rng_, 2 * c.K * c.D);
    const int64_t S = p.shape.S, D = c.D, row = p.shape.q_stride, most = 1024;
    const Array q_norm = Array::normal(DType::kF32, D, rng_), k_norm = Array::normal(DType::kF32, D, rng_);
    std::vector<float> cos_sin(static_cast<size_t>(most * D));
    fill_rope_table(cos_sin.data(), most, D, 10000.0);
    std::vector<int32_t> positions;
    std::vector<int64_t> slots;
    for (int64_t s = 0; s < S; ++s) {
      positions.push_back(c.lens[static_cast<size_t>(s)] - 1);
      slots.push_back(p.slot(s, positions.back()));
    }
    const DeviceMemory qkv(p.q), k_cache(p.k_cache), v_cache(p.v_cache), tables(p.tables), lens(p.lens);
    const DeviceMemory d_q_norm(q_norm), d_k_norm(k_norm), d_cos_sin(cos_sin), d_positions(positions), d_slots(slots);
    const DeviceMemory o(S * p.shape.o_stride * 2);
    const int64_t workspace_bytes = cuda::paged_attention().decode_workspace_bytes(p.shape, kType);
    const DeviceMemory workspace(std::vector<char>(static_cast<size_t>(workspace_bytes)));
    const DecodeRotation rotation{c.qk_norm ? d_q_norm.as<float>() : nullptr,
                                  c.qk_norm ? d_k_norm.as<float>() : nullptr,
                                  1e-5f,
                                  d_cos_sin.as<float>(),
                                  d_positions.as<int32_t>(),
                                  d_slots.as<int64_t>()};
    ASSERT_EQ(cuda::decode_layer().attention(o.data(), qkv.data(), k_cache.data(), v_cache.data(), tables.as<int32_t>(),
                                             lens.as<int32_t>(), p.shape, rotation, workspace.data(), nullptr),
              kKernelOk)
        << what;

    const Array raw = p.q;
    Array rstd(DType::kF32, S * c.H);
    if (c.qk_norm) {
      ASSERT_EQ(reference::norm().rms_norm_forward(p.q.data(), rstd.f32(), raw.data(), q_norm.f32(), S * c.H, D,
                                                   {c.H, row}, 1e-5f, kType, nullptr),
                kKernelOk);
      ASSERT_EQ(reference::norm().rms_norm_forward(p.q.at(c.H * D), rstd.f32(), raw.at(c.H * D), k_norm.f32(), S * c.K,
                                                   D, {c.K, row}, 1e-5f, kType, nullptr),
                kKernelOk);
    }
    ASSERT_EQ(reference::rope().rotate(p.q.data(), positions.data(), cos_sin.data(), S, c.H + c.K, D, row, false, kType,
                                       nullptr),
              kKernelOk);
    ASSERT_EQ(reference::paged_attention().write_kv(p.k_cache.data(), p.v_cache.data(), p.q.at(c.H * D),
                                                    p.q.at((c.H + c.K) * D), slots.data(), S, c.K, D, row, row, kType,
                                                    nullptr),
              kKernelOk);
    EXPECT_TRUE(v_cache.array(kType).same_bits(p.v_cache)) << what;
    const Array k_written = k_cache.array(kType);
    for (int64_t i = 0; i < k_written.size(); ++i) {
      const float got = k_written.get(i), expected = p.k_cache.get(i);
      if (std::isnan(got) && std::isnan(expected)) continue;  // a slot that nobody uses
      // Two roundings, of the norm and of the turned value, where the reference's may have gone to the neighbour.
      ASSERT_LE(std::fabs(got - expected), 8 * kBF16Round * (1 + std::fabs(expected))) << what << " element " << i;
    }
    Array out = o.array(kType);
    for (int64_t s = 0; s < S; ++s) out.set((s + 1) * p.shape.o_stride - 1, 0.0f);
    // As paged_attention_test.cc, and q and the new k may be a rounding away: a score of about sqrt(D) moves by
    // some 2^-8 of itself, twice, and the weights by as much.
    const double moved = 4 * kBF16Round * (c.qk_norm ? 4.0 : 2.0) * 5;
    expect_close(out, p.decode(reference::paged_attention()), p.tolerance() + 5 * kBF16Round + moved, 4 * kBF16Round,
                 what);
  }
}

}  // namespace
}  // namespace kintsugi::kernels
