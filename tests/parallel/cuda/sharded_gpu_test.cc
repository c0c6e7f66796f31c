// The modes on GPU ranks against one rank, bit for bit, and with everything late that may be late. Each rank trains the
// same model alone first, in its own process, and compares its part of the state with that.
#include <gtest/gtest.h>

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

// Few steps and one or two micro-steps: a collective among ranks that share a GPU takes some ten milliseconds.
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
  o.parallel.reduce_order = "fixed";
  o.parallel.virtual_shards = 4;
  o.global_batch = 8;
  o.seq_len = 64;
  o.steps = 4;
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

void train_in_layout(GpuRank& rank, int64_t generation, TrainOptions o, const GpuLayout& layout, bool slow,
                     const RankResult& one) {
  const int n = rank.world_size();
  o.parallel.mode = layout.mode;
  o.parallel.shard = layout.shard;
  const std::string what = o.name() + ", rank " + std::to_string(rank.rank()) + (slow ? ", slow" : "");
  const Result<Mesh> mesh = Mesh::of_run(o.parallel, n);
  ASSERT_TRUE(mesh.ok()) << mesh.status().to_string();
  const Status entered = rank.enter_groups(generation, {}, communicator_groups(*mesh, rank.rank()));
  ASSERT_TRUE(entered.ok()) << what << ": " << entered.to_string();
  const int64_t began = monotonic_ns();
  {
    auto communicators = rank.take_communicators();
    Idler idler(rank.backend());
    if (slow) {
      for (auto& c : communicators) {
        c = std::make_unique<SlowCommunicator>(std::move(c), rank.backend(),
                                               [&idler](runtime::Stream& s) { return idler.idle(s); });
      }
      o.hold_up = [&idler, n = rank.rank()](int, Moment, runtime::Stream& s) mutable {
        if (n++ % 3 == 0) {
          EXPECT_TRUE(idler.idle(s).ok());
        }
      };
    }
    const Result<RankResult> got =
        train(o, rank.backend(), rank.stream(), rank.rank(), n, bind_communicators(communicators));
    ASSERT_TRUE(got.ok()) << what << ": " << got.status().to_string();
    compare(*got, one, what);
    EXPECT_TRUE(got->traffic == got->plan || !o.parallel.sharded()) << what << ": traffic differs from the plan";
    EXPECT_TRUE(rank.stream().synchronize(comm::soon()).ok());
  }
  if (rank.rank() == 0) {
    std::printf("  %-70s %7.0f ms%s\n", what.c_str(), static_cast<double>(monotonic_ns() - began) / 1e6,
                testing::Test::HasFailure() ? "  FAILED" : "");
    std::fflush(stdout);
  }
  rank.gate(generation);
}

class ShardedGpuTest : public testing::TestWithParam<int> {};

TEST_P(ShardedGpuTest, EveryModeHasTheBitsOfOneRank) {
  GpuWorld world(GetParam(), 4 << 20);
  world.start_all([&](GpuRank& rank) {
    int64_t generation = 0;
    for (const bool tied : {false, true}) {
      const TrainOptions o = small_model(tied);
      const RankResult one = alone(o, rank.backend(), rank.stream());
      std::vector<GpuLayout> layouts = {{"ddp", 0}, {"zero1", 0}, {"zero2", 0}, {"zero3", 0}};
      if (rank.world_size() == 4) layouts.push_back({"zero3", 2});
      for (const GpuLayout& layout : layouts) train_in_layout(rank, ++generation, o, layout, /*slow=*/false, one);
    }
  });
  world.join(std::chrono::seconds(110));
}

TEST_P(ShardedGpuTest, CollectivesAndComputationThatComeLateChangeNoBit) {
  GpuWorld world(GetParam(), 4 << 20);
  world.start_all([&](GpuRank& rank) {
    TrainOptions o = small_model(/*tied=*/true);
    o.steps = 3;
    const RankResult one = alone(o, rank.backend(), rank.stream());
    int64_t generation = 0;
    for (const GpuLayout& layout : {GpuLayout{"zero1", 0}, {"zero2", 0}, {"zero3", 0}}) {
      train_in_layout(rank, ++generation, o, layout, /*slow=*/true, one);
    }
  });
  world.join(std::chrono::seconds(110));
}

INSTANTIATE_TEST_SUITE_P(Ranks, ShardedGpuTest, testing::Values(2, 4),
                         [](const auto& n) { return std::to_string(n.param) + "_ranks"; });

TEST(ShardedGpuTest, OneRankHasTheBitsOfDataParallelInEveryModeAndOrder) {
  GpuWorld world(1, 4 << 20);
  world.start_all([&](GpuRank& rank) {
    for (const char* order : {"fixed", "fast"}) {
      for (const bool tied : {false, true}) {
        TrainOptions o = small_model(tied);
        o.parallel.reduce_order = order;
        o.steps = 10;
        const RankResult one = alone(o, rank.backend(), rank.stream());
        for (const char* mode : {"zero1", "zero2", "zero3"}) {
          o.parallel.mode = mode;
          compare(alone(o, rank.backend(), rank.stream()), one, o.name());
        }
      }
    }
  });
  world.join(std::chrono::seconds(60));
}

}  // namespace
}  // namespace kintsugi::parallel
