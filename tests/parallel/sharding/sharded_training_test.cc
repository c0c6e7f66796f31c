// Every mode trains the same model: the quick half. sharded_product_test.cc goes through the whole product.
#include "tests/parallel/sharding/sharded_training.h"

#include <unistd.h>

#include <atomic>
#include <limits>
#include <mutex>
#include <random>

#include "tests/parallel/sharding/late_communicator.h"

namespace kintsugi::parallel {
namespace {

constexpr Layout kLayouts[] = {{"ddp", 4, 0},   {"ddp", 3, 0},   {"zero1", 1, 0}, {"zero1", 3, 0}, {"zero1", 4, 2},
                               {"zero2", 1, 0}, {"zero2", 2, 0}, {"zero2", 6, 3}, {"zero2", 8, 0}, {"zero3", 1, 0},
                               {"zero3", 2, 0}, {"zero3", 3, 0}, {"zero3", 4, 0}, {"zero3", 4, 2}, {"zero3", 6, 2},
                               {"zero3", 8, 0}, {"zero1", 3, 1}, {"zero3", 2, 1}};

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

TEST(ShardedTrainingTest, InitialWeightsHaveTheSameBitsInEveryLayout) {
  for (const runtime::ModelConfig& model : uneven_models()) {
    TrainOptions options = fixed_order(model, 8);
    options.steps = 0;
    const Trained one = train_on_threads(options, 1);
    for (const Layout& layout : kLayouts) {
      const TrainOptions o = in_layout(options, layout);
      expect_same_bits(train_on_threads(o, layout.world_size), one, o.name());
    }
  }
}

// One rank of ddp never writes the gradient of rows that no token names; zero1 writes zeros there.
TEST(ShardedTrainingTest, RowsThatNoTokenNamesDecayAsWithAGradientOfZeros) {
  TrainOptions options;
  options.model = uneven_models()[0];
  options.model.vocab_size = 4999;
  options.steps = 6;
  for (const int64_t micro_batch : {24, 6}) {
    for (const bool narrow : {false, true}) {
      options.micro_batch = micro_batch;
      options.moments = {
          .dtype = narrow ? kernels::DType::kBF16 : kernels::DType::kF32, .on_host = narrow, .bucket = 8192};
      expect_same_bits(train_on_threads(in_layout(options, {"ddp", 1, 0}), 1),
                       train_on_threads(in_layout(options, {"zero1", 1, 0}), 1), options.name());
    }
  }
}

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

// Notes which collectives its owner starts, in their order. Each communicator of a rank has one; they share the notes.
class NotingCommunicator final : public comm::Communicator {
 public:
  using WorkPtr = comm::WorkPtr;
  using Stream = runtime::Stream;
  using Note = std::function<void(const char* what, int64_t bytes)>;
  NotingCommunicator(std::unique_ptr<comm::Communicator> inner, Note note)
      : inner_(std::move(inner)), note_(std::move(note)) {}

  const comm::Membership& membership() const override { return inner_->membership(); }
  Result<WorkPtr> all_reduce(float* x, int64_t count, Stream& stream) override {
    return inner_->all_reduce(x, count, stream);
  }
  Result<WorkPtr> all_reduce_fixed(float* out, std::span<float* const> parts, int64_t num_leaves, int64_t count,
                                   Stream& stream) override {
    return inner_->all_reduce_fixed(out, parts, num_leaves, count, stream);
  }
  Result<WorkPtr> reduce_scatter(float* out, const float* in, int64_t count, Stream& stream) override {
    note_("reduce", count * 4);
    return inner_->reduce_scatter(out, in, count, stream);
  }
  Result<WorkPtr> all_gather(void* out, const void* in, int64_t size_bytes, Stream& stream) override {
    note_("gather", size_bytes);
    return inner_->all_gather(out, in, size_bytes, stream);
  }
  Result<WorkPtr> all_to_all(void* out, const void* in, int64_t size_bytes, Stream& stream) override {
    return inner_->all_to_all(out, in, size_bytes, stream);
  }
  Result<WorkPtr> broadcast(void* x, int64_t size_bytes, int root, Stream& stream) override {
    return inner_->broadcast(x, size_bytes, root, stream);
  }
  Result<WorkPtr> fetch(void* x, int64_t size_bytes, int source, bool receive, Stream& stream) override {
    return inner_->fetch(x, size_bytes, source, receive, stream);
  }
  Status barrier(Deadline deadline) override { return inner_->barrier(deadline); }
  void abort(Status why) override { inner_->abort(std::move(why)); }
  Status status() const override { return inner_->status(); }

 private:
  std::unique_ptr<comm::Communicator> inner_;
  const Note note_;
};

// E embedding, B block, H head; "|" at the acquire of a unit, "^" where the update begins. Five blocks take two buffers
// in turn.
TEST(ShardedTrainingTest, CollectivesStartInTheOrderOfTheSchedule) {
  TrainOptions o = in_layout(TrainOptions(), {"zero3", 2, 0});
  o.model = uneven_models()[0];
  o.model.num_layers = 5;
  // The three kinds of units differ in size: the head has a norm beside the embedding's numbers.
  o.model.dim = 48;
  o.model.ffn_dim = 160;
  o.model.vocab_size = kUnitBlocks * runtime::kUnitAlignment / 48;
  o.steps = 2;
  const runtime::ParamTable table = runtime::ParamTable::build(o.model);
  const UnitShards shards(table.units(), 2, 0);
  std::mutex mutex;
  std::string seen;  // by rank 0
  const auto note = [&](const char* what, int64_t bytes) {
    const std::lock_guard lock(mutex);
    for (const auto& [unit, letter] : {std::pair{0, 'E'}, {1, 'B'}, {6, 'H'}}) {
      if (shards[unit].chunk * 4 != bytes) continue;
      seen += std::string(" ") + (what == std::string("gather") ? 'g' : 'r') + letter;
    }
  };
  o.hold_up = [&](int rank, Moment moment, runtime::Stream&) {
    const std::lock_guard lock(mutex);
    if (rank != 0) return;
    if (moment == Moment::kAcquire) seen += " |";
    if (moment == Moment::kBeforeUpdate) seen += " ^";
  };
  (void)train_on_threads(o, 2, [&](std::unique_ptr<comm::Communicator> inner) -> std::unique_ptr<comm::Communicator> {
    if (inner->membership().rank != 0) return inner;
    return std::make_unique<NotingCommunicator>(std::move(inner), note);
  });
  // Forward: a block is gathered while the one before it computes, as soon as its buffer is free. Backward: the block
  // before is gathered before the gradient of this one leaves; the last two blocks still lie in their buffers.
  const std::string backward = " rH | rB | gB rB | gB rB | gB rB | rB rE";
  const std::string first = " | gE gB | gB | gB | gB | gB | gH |" + backward;
  // The update has sent the embedding and two blocks, each as soon as it was updated.
  const std::string second = " | | | gB | gB | gB | gH |" + backward;
  EXPECT_EQ(seen, first + " ^ gE gB gB" + second + " ^ gE gB gB");
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

// They are rounded by an element's place in the model, wherever it lies; in both types of the weights.
TEST(ShardedTrainingTest, MomentsKeptInBf16HaveTheBitsOfOneRank) {
  for (const kernels::DType dtype : {kernels::DType::kF32, kernels::DType::kBF16}) {
    TrainOptions options = fixed_order(uneven_models()[dtype == kernels::DType::kF32 ? 0 : 2], 8);
    options.dtype = dtype;
    options.moments.dtype = kernels::DType::kBF16;
    const Trained one = train_on_threads(options, 1);
    for (const Layout& layout :
         {Layout{"ddp", 3, 0}, {"zero1", 3, 0}, {"zero2", 1, 0}, {"zero3", 4, 2}, {"zero3", 6, 0}}) {
      const TrainOptions o = in_layout(options, layout);
      expect_same_bits(train_on_threads(o, layout.world_size), one, o.name());
    }
    options.seed = 2;
    EXPECT_GT(num_different(train_on_threads(options, 1).m, one.m), 0);
  }
}

// Buckets of 64 elements, so that pieces end in the midst of tensors and of ranges of decay.
TEST(ShardedTrainingTest, MomentsKeptOnTheHostHaveTheBitsOfThoseThatAreNot) {
  for (const kernels::DType dtype : {kernels::DType::kF32, kernels::DType::kBF16}) {
    TrainOptions options = fixed_order(uneven_models()[0], 8);
    options.moments.dtype = dtype;
    const Trained one = train_on_threads(options, 1);
    options.moments.on_host = true;
    options.moments.bucket = 64;
    for (const Layout& layout :
         {Layout{"ddp", 1, 0}, {"ddp", 2, 0}, {"zero1", 3, 0}, {"zero3", 1, 0}, {"zero3", 4, 2}}) {
      const TrainOptions o = in_layout(options, layout);
      expect_same_bits(train_on_threads(o, layout.world_size), one, o.name());
    }
  }
}

// Each rounding is off by up to a unit, 2^-7 of the moment, and on average by nothing.
TEST(ShardedTrainingTest, MomentsKeptInBf16LearnAsFp32OnesDo) {
  TrainOptions options = fixed_order(uneven_models()[0], 8);
  options.steps = 60;
  const Trained wide = train_on_threads(options, 1);
  options.moments.dtype = kernels::DType::kBF16;
  const Trained narrow = train_on_threads(options, 1);
  double worst = 0, mean = 0;
  for (size_t s = 0; s < wide.losses.size(); ++s) {
    const double off = narrow.losses[s] / wide.losses[s] - 1;
    worst = std::max(worst, std::abs(off));
    mean += off / static_cast<double>(wide.losses.size());
  }
  EXPECT_LT(wide.losses.back(), 0.8 * wide.losses.front());
  EXPECT_LT(worst, 0.01);
  EXPECT_LT(std::abs(mean), 0.002);
  std::printf("losses of 60 steps: at most %.3f %% apart, %.4f %% on average\n", 100 * worst, 100 * mean);
}

TEST(ShardedTrainingTest, DelaysAtEveryPointChangeNothing) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  TrainOptions options = fixed_order(uneven_models()[1], 8);
  options.steps = 6;
  const Trained one = train_on_threads(options, 1);
  for (const Layout& layout : {Layout{"zero1", 2, 0}, {"zero2", 3, 0}, {"zero3", 4, 0}, {"zero3", 4, 2}}) {
    for (const Moment moment :
         {Moment::kAcquire, Moment::kForwardDone, Moment::kGradientsReady, Moment::kBeforeUpdate}) {
      TrainOptions o = in_layout(options, layout);
      std::atomic<unsigned> count{seed};
      o.hold_up = [&](int rank, Moment at, runtime::Stream&) {
        // Now this rank, now that one.
        const unsigned n = count.fetch_add(1) * 2654435761u;
        if (at == moment && (n >> 28) % 4 == static_cast<unsigned>(rank % 4)) ::usleep((n >> 16) % 1500);
      };
      expect_same_bits(train_on_threads(o, layout.world_size), one, o.name());
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
