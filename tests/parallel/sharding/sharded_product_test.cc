// The whole product of modes, world sizes, accumulation, recomputation and shapes.
#include <algorithm>

#include "tests/parallel/sharding/sharded_training.h"

namespace kintsugi::parallel {
namespace {

constexpr int kWorldSizes[] = {1, 2, 3, 4, 6, 8};

// Every shape of the ranks: all of them hold the state together, or a half or a third of them does.
std::vector<Layout> layouts_of(const char* mode, int world_size) {
  std::vector<Layout> all = {{mode, world_size, 0}};
  if (mode == std::string("ddp")) return all;
  for (const int replicas : {2, 3}) {
    if (world_size % replicas == 0 && world_size > replicas) all.push_back({mode, world_size, world_size / replicas});
  }
  return all;
}

class ShardedProductTest : public testing::TestWithParam<const char*> {};

void expect_bits_of_one_rank(const TrainOptions& options, const Trained& one, const char* mode, int world_size) {
  for (const Layout& layout : layouts_of(mode, world_size)) {
    for (const runtime::Recompute recompute : {runtime::Recompute::kNone, runtime::Recompute::kBlock}) {
      TrainOptions o = in_layout(options, layout);
      o.recompute = recompute;
      const std::string what = o.name() + ", " + std::to_string(world_size) + " ranks";
      const Trained got = train_on_threads(o, world_size);
      expect_same_bits(got, one, what);
      if (o.parallel.sharded()) expect_planned_traffic(got, what);
    }
  }
}

// The same shards at every number of ranks: 8 are one micro-step at 8 ranks, 24 are four at 6 and three at 8; one rank
// runs all of them.
TEST_P(ShardedProductTest, InFixedOrderEveryLayoutHasTheBitsOfOneRank) {
  for (const runtime::ModelConfig& model : uneven_models()) {
    for (const int64_t shards : {8, 24}) {
      const TrainOptions options = fixed_order(model, shards);
      const Trained one = train_on_threads(options, 1);
      for (const int world_size : kWorldSizes) expect_bits_of_one_rank(options, one, GetParam(), world_size);
    }
  }
}

// A rank's micro-steps are virtual shards, so accumulation is exact: one and four micro-steps at every number of ranks.
TEST_P(ShardedProductTest, InFixedOrderOneAndFourMicroStepsHaveTheBitsOfOneRank) {
  for (const runtime::ModelConfig& model : uneven_models()) {
    for (const int world_size : kWorldSizes) {
      for (const int accumulation : {1, 4}) {
        TrainOptions options = fixed_order(model, world_size * accumulation);
        options.global_batch = options.global_batch % (world_size * accumulation) == 0 ? options.global_batch : 96;
        expect_bits_of_one_rank(options, train_on_threads(options, 1), GetParam(), world_size);
      }
    }
  }
}

double relative_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, size = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
    size += double{b[i]} * b[i];
  }
  return std::sqrt(difference / size);
}

// Fast order adds the same numbers in another order.
//   loss 1      sums of the same floats in double: n summands differ by n 2^-53
//   gradient 1  n = tokens of the batch summands: lambda sqrt(n) u of the sum of their magnitudes (Higham, Mary, SIAM
//               J. Sci. Comput. 41, 2019; lambda 8), which is sqrt(n) of the sum's size where signs are random
//   later       a gradient that is off by `bound` moves the weights, and the loss, off by no more than that part of all
//               that the steps have moved it, which is less than the loss itself
TEST_P(ShardedProductTest, InFastOrderEveryLayoutStaysWithinTheRoundingOfItsSums) {
  for (const runtime::ModelConfig& model : uneven_models()) {
    TrainOptions options;
    options.model = model;
    options.global_batch = 96;
    TrainOptions first = options;
    first.steps = 1;
    const Trained one = train_on_threads(options, 1), one_first = train_on_threads(first, 1);
    const auto n = static_cast<double>(options.global_batch * options.seq_len);
    const double bound = 8 * n * 0x1p-24;
    for (const int world_size : kWorldSizes) {
      for (const int64_t accumulation : {1, 4}) {
        for (const Layout& layout : layouts_of(GetParam(), world_size)) {
          TrainOptions o = in_layout(options, layout);
          o.micro_batch = options.global_batch / world_size / accumulation;
          const std::string what = o.name() + ", " + std::to_string(world_size) + " ranks";
          SCOPED_TRACE(what);
          const Trained got = train_on_threads(o, world_size);
          o.steps = 1;
          const Trained got_first = train_on_threads(o, world_size);
          ASSERT_FALSE(got.losses.empty() || got_first.losses.empty());
          EXPECT_NEAR(got_first.losses[0], one_first.losses[0], one_first.losses[0] * n * 0x1p-53);
          EXPECT_NEAR(got_first.norms[0], one_first.norms[0], one_first.norms[0] * bound);
          EXPECT_LE(relative_difference(got_first.m, one_first.m), bound);
          for (size_t s = 1; s < one.losses.size(); ++s) {
            EXPECT_NEAR(got.losses[s], one.losses[s], one.losses[s] * bound) << "step " << s + 1;
          }
          if (o.parallel.sharded()) expect_planned_traffic(got, what);
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Modes, ShardedProductTest, testing::Values("ddp", "zero1", "zero2", "zero3"),
                         [](const auto& mode) { return std::string(mode.param); });

// Rounded to bf16 on the wire: each summand is off by 2^-9 of itself.
TEST(ShardedProductTest, GradientsInBf16OnTheWireStayWithinTheirRounding) {
  for (const char* mode : {"zero1", "zero2", "zero3"}) {
    for (const int world_size : {2, 3, 4}) {
      TrainOptions o = in_layout(TrainOptions(), {mode, world_size, 0});
      o.model = uneven_models()[0];
      const Trained exact = train_on_threads(o, world_size);
      o.parallel.gradient_dtype = "bf16";
      const Trained rounded = train_on_threads(o, world_size);
      ASSERT_EQ(rounded.losses.size(), exact.losses.size());
      EXPECT_EQ(rounded.losses[0], exact.losses[0]);
      EXPECT_NE(rounded.norms[0], exact.norms[0]);
      EXPECT_NEAR(rounded.norms[0], exact.norms[0], exact.norms[0] * 0x1p-8);
      for (size_t s = 1; s < exact.losses.size(); ++s) {
        EXPECT_NEAR(rounded.losses[s], exact.losses[s], exact.losses[s] * 0x1p-8) << o.name() << " step " << s + 1;
      }
      expect_planned_traffic(rounded, o.name());
    }
  }
}

}  // namespace
}  // namespace kintsugi::parallel
