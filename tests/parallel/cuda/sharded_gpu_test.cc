// The modes on GPU ranks against one rank, bit for bit, and with everything late that may be late. Each rank trains the
// same model alone first, in its own process, and compares its part of the state with that.
#include <gtest/gtest.h>

#include <array>
#include <cstring>

#include "tests/comm/gpu_ranks.h"
#include "tests/parallel/sharding/slow_communicator.h"
#include "tests/parallel/sharding/train_rank.h"

namespace kintsugi::parallel {
namespace {

using comm::GpuRank;
using comm::GpuWorld;

constexpr int64_t kHeapBytes = 64 << 20;

struct GpuLayout {
  const char* mode;
  int64_t shard;  // 0: all ranks
};

// Few steps (one that is queued, one that is recorded, one that is replayed) of one or two micro-steps: a collective
// among ranks that share a GPU takes some ten milliseconds.
TrainOptions small_model(bool tied) {
  TrainOptions o;
  o.model.num_layers = 3;
  o.model.dim = 96;
  o.model.num_heads = 3;
  o.model.ffn_dim = 160;
  o.model.vocab_size = 200;
  o.model.max_seq_len = 64;
  o.model.tied_embedding = tied;
  o.dtype = kernels::DType::kBF16;
  if (tied) o.moments.dtype = kernels::DType::kBF16;
  o.parallel.reduce_order = "fixed";
  o.parallel.virtual_shards = 4;
  o.global_batch = 8;
  o.seq_len = 64;
  o.steps = 3;
  o.graphs = true;
  return o;
}

Result<RankResult> train(const TrainOptions& options, runtime::Backend& backend, runtime::Stream& stream, int rank,
                         int world_size, const Communicators& communicators) {
  KTG_ASSIGN_OR_RETURN(const std::unique_ptr<comm::DeviceHeap> heap, comm::DeviceHeap::create(backend, kHeapBytes));
  return train_rank(options, {.rank = rank,
                              .world_size = world_size,
                              .backend = &backend,
                              .stream = &stream,
                              .heap = heap.get(),
                              .communicators = communicators});
}

// The rank's part of the state has the bits of the whole state of one rank.
void compare(const RankResult& got, const RankResult& one, const std::string& what) {
  SCOPED_TRACE(what);
  ASSERT_EQ(got.losses.size(), one.losses.size());
  for (size_t s = 0; s < one.losses.size(); ++s) {
    EXPECT_EQ(got.losses[s], one.losses[s]) << "loss of step " << s + 1;
    EXPECT_EQ(got.norms[s], one.norms[s]) << "norm of step " << s + 1;
  }
  const struct {
    const char* name;
    const std::vector<float>&got, &one;
  } buffers[] = {{"weights", got.weights, one.weights}, {"m", got.m, one.m}, {"v", got.v, one.v}};
  for (const auto& buffer : buffers) {
    int64_t wrong = 0, first = -1;
    for (const auto& [begin, count, local] : got.ranges) {
      for (int64_t i = 0; i < count; ++i) {
        if (std::memcmp(&buffer.got[local + i], &buffer.one[begin + i], 4) == 0) continue;
        if (wrong++ == 0) first = begin + i;
      }
    }
    EXPECT_EQ(wrong, 0) << buffer.name << ", first at " << first << " of the flat space";
  }
}

RankResult alone(const TrainOptions& options, runtime::Backend& backend, runtime::Stream& stream) {
  Result<RankResult> result = train(options, backend, stream, 0, 1, {});
  EXPECT_TRUE(result.ok()) << result.status().to_string();
  return result.ok() ? std::move(*result) : RankResult{};
}

// Some tenths of a millisecond to milliseconds of a stream's time.
class Idler {
 public:
  explicit Idler(runtime::Backend& backend) : backend_(backend) {
    scratch_ = std::move(backend.allocate(kBytes, "idle")).value();
  }
  Status idle(runtime::Stream& stream) {
    const int times = 1 + static_cast<int>(++count_ * 2654435761u >> 30) * 4;
    for (int i = 0; i < times; ++i) KTG_RETURN_IF_ERROR(backend_.zero(scratch_.data(), kBytes, stream));
    return ok_status();
  }

 private:
  static constexpr int64_t kBytes = 256 << 20;
  runtime::Backend& backend_;
  runtime::Buffer scratch_;
  uint32_t count_ = 0;
};

// Which calls hold their rank up: of each kind every second, on every second rank.
class HoldUps {
 public:
  HoldUps(Idler& idler, int rank) : idler_(idler) {
    for (int& n : counts_) n = rank;
  }
  void operator()(Moment moment, runtime::Stream& stream) {
    if (counts_[static_cast<size_t>(moment)]++ % 2 != 0) return;
    EXPECT_TRUE(idler_.idle(stream).ok());
  }

 private:
  Idler& idler_;
  std::array<int, 4> counts_;
};

void train_with(GpuRank& rank, TrainOptions o, const Communicators& communicators, Idler* idler,
                const RankResult& one) {
  const std::string what =
      o.name() + ", rank " + std::to_string(rank.rank()) + (idler != nullptr ? ", everything late" : "");
  const int64_t began = monotonic_ns();
  if (idler != nullptr) {
    o.hold_up = [hold = HoldUps(*idler, rank.rank())](int, Moment moment, runtime::Stream& s) mutable {
      hold(moment, s);
    };
  }
  const Result<RankResult> got = train(o, rank.backend(), rank.stream(), rank.rank(), rank.world_size(), communicators);
  ASSERT_TRUE(got.ok()) << what << ": " << got.status().to_string();
  compare(*got, one, what);
  EXPECT_TRUE(got->traffic == got->plan || !o.parallel.sharded()) << what << ": traffic differs from the plan";
  EXPECT_TRUE(rank.stream().synchronize(comm::soon()).ok());
  if (rank.rank() != 0) return;
  std::printf("  %-84s %6.0f ms%s\n", what.c_str(), static_cast<double>(monotonic_ns() - began) / 1e6,
              testing::Test::HasFailure() ? "  FAILED" : "");
  std::fflush(stdout);
}

// All layouts of the same groups go over the same communicators.
void train_in_layouts(GpuRank& rank, int64_t generation, const TrainOptions& o, std::span<const GpuLayout> layouts,
                      bool late, const RankResult& one) {
  const auto in = [&](const GpuLayout& layout) {
    TrainOptions there = o;
    there.parallel.mode = layout.mode;
    there.parallel.shard = layout.shard;
    return there;
  };
  const Result<Mesh> mesh = Mesh::of_run(in(layouts.back()).parallel, rank.world_size());
  ASSERT_TRUE(mesh.ok()) << mesh.status().to_string();
  const Status entered = rank.enter_groups(generation, {}, communicator_groups(*mesh, rank.rank()));
  ASSERT_TRUE(entered.ok()) << entered.to_string();
  {
    auto communicators = rank.take_communicators();
    Idler idler(rank.backend());
    for (auto& c : communicators) {
      if (!late) break;
      c = std::make_unique<SlowCommunicator>(std::move(c), rank.backend(),
                                             [&idler](runtime::Stream& s) { return idler.idle(s); });
    }
    for (const GpuLayout& layout : layouts) {
      train_with(rank, in(layout), bind_communicators(communicators), late ? &idler : nullptr, one);
    }
  }
  rank.gate(generation);
}

void train_in_every_layout(GpuRank& rank, const TrainOptions& o, bool late) {
  const RankResult one = alone(o, rank.backend(), rank.stream());
  const GpuLayout flat[] = {{"ddp", 0}, {"zero1", 0}, {"zero2", 0}, {"zero3", 0}}, hybrid[] = {{"zero3", 2}};
  train_in_layouts(rank, 1, o, flat, late, one);
  if (rank.world_size() == 4) train_in_layouts(rank, 2, o, hybrid, late, one);
}

class ShardedGpuTest : public testing::TestWithParam<int> {};

TEST_P(ShardedGpuTest, EveryModeHasTheBitsOfOneRank) {
  GpuWorld world(GetParam(), 4 << 20);
  world.start_all([&](GpuRank& rank) { train_in_every_layout(rank, small_model(/*tied=*/false), /*late=*/false); });
  world.join(std::chrono::seconds(60));
}

TEST_P(ShardedGpuTest, CollectivesAndComputationThatComeLateChangeNoBit) {
  GpuWorld world(GetParam(), 4 << 20);
  world.start_all([&](GpuRank& rank) { train_in_every_layout(rank, small_model(/*tied=*/true), /*late=*/true); });
  world.join(std::chrono::seconds(60));
}

TEST_P(ShardedGpuTest, MomentsOnTheHostHaveTheBitsOfThoseOnTheGpu) {
  GpuWorld world(GetParam(), 4 << 20);
  world.start_all([&](GpuRank& rank) {
    TrainOptions o = small_model(/*tied=*/true);
    const RankResult one = alone(o, rank.backend(), rank.stream());
    o.moments.on_host = true;
    o.moments.bucket = 1024;
    const GpuLayout layouts[] = {{"ddp", 0}, {"zero1", 0}, {"zero3", 0}};
    train_in_layouts(rank, 1, o, layouts, /*late=*/true, one);
  });
  world.join(std::chrono::seconds(60));
}

INSTANTIATE_TEST_SUITE_P(Ranks, ShardedGpuTest, testing::Values(2, 4),
                         [](const auto& n) { return std::to_string(n.param) + "_ranks"; });

// Each summand is off by 2^-9 of itself, and so is the sum of what has random signs; the losses by less.
TEST(ShardedGpuTest, GradientsInBf16OnTheWireStayWithinTheirRounding) {
  GpuWorld world(2, 4 << 20);
  world.start_all([](GpuRank& rank) {
    TrainOptions o = small_model(/*tied=*/false);
    o.parallel.reduce_order = "fast";
    const RankResult one = alone(o, rank.backend(), rank.stream());
    o.parallel.mode = "zero2";
    o.parallel.gradient_dtype = "bf16";
    const Result<Mesh> mesh = Mesh::of_run(o.parallel, rank.world_size());
    const Status entered = rank.enter_groups(1, {}, communicator_groups(*mesh, rank.rank()));
    ASSERT_TRUE(entered.ok()) << entered.to_string();
    {
      const auto communicators = rank.take_communicators();
      const Result<RankResult> got =
          train(o, rank.backend(), rank.stream(), rank.rank(), rank.world_size(), bind_communicators(communicators));
      ASSERT_TRUE(got.ok()) << got.status().to_string();
      EXPECT_TRUE(got->traffic == got->plan);
      EXPECT_NE(got->norms[0], one.norms[0]);
      for (size_t s = 0; s < one.losses.size(); ++s) {
        EXPECT_NEAR(got->losses[s], one.losses[s], one.losses[s] * 0x1p-8) << "step " << s + 1;
        EXPECT_NEAR(got->norms[s], one.norms[s], one.norms[s] * 0x1p-7) << "step " << s + 1;
      }
    }
    rank.gate(1);
  });
  world.join(std::chrono::seconds(30));
}

TEST(ShardedGpuTest, OneRankHasTheBitsOfDataParallelInEveryModeAndOrder) {
  GpuWorld world(1, 4 << 20);
  world.start_all([&](GpuRank& rank) {
    for (const char* order : {"fixed", "fast"}) {
      for (const bool tied : {false, true}) {
        TrainOptions o = small_model(tied);
        o.parallel.reduce_order = order;
        o.steps = 6;
        const RankResult one = alone(o, rank.backend(), rank.stream());
        for (const char* mode : {"zero1", "zero2", "zero3"}) {
          o.parallel.mode = mode;
          compare(alone(o, rank.backend(), rank.stream()), one, o.name());
        }
        o.moments.on_host = true;
        o.moments.bucket = 4096;  // some tens of buckets
        for (const char* mode : {"ddp", "zero1", "zero3"}) {
          o.parallel.mode = mode;
          compare(alone(o, rank.backend(), rank.stream()), one, o.name());
        }
      }
    }
  });
  world.join(std::chrono::seconds(60));
}

// One rank of ddp never writes the gradient of rows that no token names; the sharded modes write zeros there.
TEST(ShardedGpuTest, RowsThatNoTokenNamesDecayAsWithAGradientOfZeros) {
  GpuWorld world(1, 4 << 20);
  world.start_all([&](GpuRank& rank) {
    for (const int64_t micro_batch : {8, 2}) {
      for (const kernels::DType moments : {kernels::DType::kF32, kernels::DType::kBF16}) {
        TrainOptions o = small_model(/*tied=*/false);
        o.parallel.reduce_order = "fast";
        o.model.vocab_size = 4999;
        o.moments.dtype = moments;
        o.micro_batch = micro_batch;
        o.steps = 6;
        const RankResult one = alone(o, rank.backend(), rank.stream());
        o.parallel.mode = "zero1";
        compare(alone(o, rank.backend(), rank.stream()), one, o.name());
        o.parallel.mode = "ddp";
        o.moments.on_host = true;
        o.moments.bucket = 4096;
        compare(alone(o, rank.backend(), rank.stream()), one, o.name());
      }
    }
  });
  world.join(std::chrono::seconds(60));
}

}  // namespace
}  // namespace kintsugi::parallel
