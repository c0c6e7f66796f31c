// Every mode trains the same model: the quick half. sharded_product_test.cc goes through the whole product.
#include "tests/parallel/sharding/sharded_training.h"

#include <unistd.h>

#include <atomic>
#include <limits>
#include <random>

#include "tests/parallel/sharding/late_communicator.h"

namespace kintsugi::parallel {
namespace {

constexpr Layout kLayouts[] = {{"ddp", 4, 0},   {"ddp", 3, 0},   {"zero1", 1, 0}, {"zero1", 3, 0},
                               {"zero1", 4, 2}, {"zero2", 1, 0}, {"zero2", 2, 0}, {"zero2", 6, 3},
                               {"zero2", 8, 0}, {"zero3", 1, 0}, {"zero3", 2, 0}, {"zero3", 3, 0},
                               {"zero3", 4, 0}, {"zero3", 4, 2}, {"zero3", 6, 2}, {"zero3", 8, 0}};

std::string name_of(const Layout& layout) {
  return std::string(layout.mode) + "_" + std::to_string(layout.world_size) + "_ranks" +
         (layout.shard == 0 ? "" : "_shard_" + std::to_string(layout.shard));
}

class ShardedTrainingTest : public testing::TestWithParam<Layout> {};

TEST_P(ShardedTrainingTest, InFixedOrderEveryLayoutHasTheBitsOfOneRank) {
  for (const runtime::ModelConfig& model : uneven_models()) {
    const TrainOptions options = fixed_order(model, 8);
    const Trained one = train_on_threads(options, 1);
    const Trained got = train_on_threads(in_layout(options, GetParam()), GetParam().world_size);
    expect_same_bits(got, one, options.name());
    if (GetParam().mode != std::string("ddp")) expect_planned_traffic(got, options.name());
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, ShardedTrainingTest, testing::ValuesIn(kLayouts),
                         [](const auto& layout) { return name_of(layout.param); });

TEST(ShardedTrainingTest, RecomputationKeptWeightsAndNoOverlapChangeNoBit) {
  const TrainOptions options = fixed_order(uneven_models()[0], 24);
  const Trained one = train_on_threads(options, 1);
  TrainOptions zero3 = in_layout(options, {"zero3", 4, 0});
  zero3.recompute = runtime::Recompute::kBlock;
  expect_same_bits(train_on_threads(zero3, 4), one, zero3.name());
  zero3.parallel.reshard_after_forward = false;
  const Trained kept = train_on_threads(zero3, 4);
  expect_same_bits(kept, one, zero3.name());
  expect_planned_traffic(kept, zero3.name());
  zero3.overlap = false;
  expect_same_bits(train_on_threads(zero3, 4), one, zero3.name());
}

TEST(ShardedTrainingTest, BlocksThatKeepTheirWeightsAfterForwardChangeNoBitAndSaveTheirGathers) {
  runtime::ModelConfig model = uneven_models()[0];
  model.num_layers = 5;
  const TrainOptions options = fixed_order(model, 8);
  const Trained one = train_on_threads(options, 1);
  int64_t before = std::numeric_limits<int64_t>::max();
  for (const std::vector<std::string>& kept :
       {std::vector<std::string>{}, {"block.1"}, {"block.1", "block.2"}, {"block.0", "block.2", "block.4"}}) {
    TrainOptions o = in_layout(options, {"zero3", 4, 0});
    o.parallel.keep_after_forward = kept;
    const std::string what = o.name() + ", " + std::to_string(kept.size()) + " kept";
    const Trained got = train_on_threads(o, 4);
    expect_same_bits(got, one, what);
    expect_planned_traffic(got, what);
    EXPECT_LT(got.ranks[0].traffic.all_gathers, before) << what;
    before = got.ranks[0].traffic.all_gathers;
  }
}

// Micro-steps that are added up whole and reduced once add the same numbers in another order than those reduced one by
// one. How they are added says which modes have the same bits.
TEST(ShardedTrainingTest, GradientsAreAddedUpWholeOrInShardsAsAsked) {
  TrainOptions options;
  options.model = uneven_models()[0];
  options.micro_batch = 2;  // of 6 a rank
  for (const char* accumulation : {"whole", "shards"}) {
    std::vector<Trained> all;
    for (const char* mode : {"zero1", "zero2", "zero3"}) {
      TrainOptions o = in_layout(options, {mode, 4, 0});
      o.parallel.accumulation = accumulation;
      all.push_back(train_on_threads(o, 4));
      expect_planned_traffic(all.back(), o.name() + ", " + accumulation);
      expect_same_bits(all.back(), all.front(), o.name() + ", " + accumulation);
      const FullySharded::Traffic& t = all.back().ranks[0].traffic;
      EXPECT_EQ(t.reduce_scatters, 5 * (accumulation == std::string("whole") ? 1 : 3)) << o.name();
    }
  }
}

// Kernels read rounded matrices and fp32 vectors: the vectors are gathered apart.
TEST(ShardedTrainingTest, WeightsRoundedToBf16HaveTheBitsOfOneRank) {
  for (const runtime::ModelConfig& model : uneven_models()) {
    TrainOptions options = fixed_order(model, 8);
    options.dtype = kernels::DType::kBF16;
    const Trained one = train_on_threads(options, 1);
    for (const Layout& layout :
         {Layout{"zero1", 3, 0}, {"zero2", 1, 0}, {"zero2", 4, 2}, {"zero3", 1, 0}, {"zero3", 4, 0}}) {
      const TrainOptions o = in_layout(options, layout);
      const Trained got = train_on_threads(o, layout.world_size);
      expect_same_bits(got, one, o.name());
      expect_planned_traffic(got, o.name());
    }
  }
}

TEST(ShardedTrainingTest, DelaysAtEveryPointChangeNothing) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  const TrainOptions options = fixed_order(uneven_models()[1], 8);
  const Trained one = train_on_threads(options, 1);
  for (const Layout& layout : {Layout{"zero1", 2, 0}, {"zero2", 3, 0}, {"zero3", 4, 0}, {"zero3", 4, 2}}) {
    for (const Moment moment :
         {Moment::kAcquire, Moment::kForwardDone, Moment::kGradientsReady, Moment::kBeforeUpdate}) {
      TrainOptions o = in_layout(options, layout);
      o.steps = 6;
      std::atomic<unsigned> count{seed};
      o.hold_up = [&](int rank, Moment at, runtime::Stream&) {
        // Now this rank, now that one.
        const unsigned n = count.fetch_add(1) * 2654435761u;
        if (at == moment && (n >> 28) % 4 == static_cast<unsigned>(rank % 4)) ::usleep((n >> 16) % 1500);
      };
      const Trained got = train_on_threads(o, layout.world_size);
      for (size_t s = 0; s < got.losses.size(); ++s) {
        EXPECT_EQ(got.losses[s], one.losses[s]) << o.name() << " step " << s + 1;
        EXPECT_EQ(got.norms[s], one.norms[s]) << o.name() << " step " << s + 1;
      }
    }
  }
}

TEST(ShardedTrainingTest, CollectivesThatHappenAsLateAsTheyMayChangeNothing) {
  const auto late = [](std::unique_ptr<comm::Communicator> inner) -> std::unique_ptr<comm::Communicator> {
    return std::make_unique<LateCommunicator>(std::move(inner));
  };
  for (const runtime::ModelConfig& model : uneven_models()) {
    const TrainOptions fixed = fixed_order(model, 8);
    const Trained one = train_on_threads(fixed, 1);
    TrainOptions fast = fixed;
    fast.parallel.reduce_order = "fast";
    fast.micro_batch = 2;
    for (const Layout& layout :
         {Layout{"ddp", 2, 0}, {"zero1", 3, 0}, {"zero2", 2, 0}, {"zero2", 4, 2}, {"zero3", 3, 0}, {"zero3", 4, 2}}) {
      const TrainOptions o = in_layout(fixed, layout), f = in_layout(fast, layout);
      expect_same_bits(train_on_threads(o, layout.world_size, late), one, o.name());
      expect_same_bits(train_on_threads(f, layout.world_size, late), train_on_threads(f, layout.world_size), f.name());
    }
  }
}

}  // namespace
}  // namespace kintsugi::parallel
