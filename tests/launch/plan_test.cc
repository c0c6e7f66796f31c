// What a run needs, on machines that are not here; and what is said of one that does not fit.
#include <gmock/gmock.h>

#include "launch/memory_plan.h"
#include "launch/nearest_fit.h"
#include "launch/plan_report.h"
#include "launch/step_estimate.h"
#include "tests/launch/small_gpu.h"

namespace kintsugi::launch {
namespace {

using testing::HasSubstr;
using testing::Not;

RunConfig llama(int64_t layers, int64_t dim, int64_t heads, int64_t kv_heads, int64_t ffn_dim, int64_t vocabulary) {
  RunConfig c;
  c.device = "cuda";
  c.data.train = {"tokens.bin"};
  c.model.num_layers = layers;
  c.model.dim = dim;
  c.model.num_heads = heads;
  c.model.num_kv_heads = kv_heads;
  c.model.ffn_dim = ffn_dim;
  c.model.vocab_size = vocabulary;
  c.training.dtype = "bf16";
  c.recovery.spares = 0;
  return c;
}

RunConfig with_batch(RunConfig c, int64_t seq_len, int64_t batch) {
  c.model.max_seq_len = c.training.seq_len = seq_len;
  c.training.global_batch_size = batch;
  return c;
}

RunConfig llama_8b() {
  RunConfig c = with_batch(llama(32, 4096, 32, 8, 14336, 128256), 8192, 4);
  c.training.micro_batch_size = 1;
  return c;
}

// Steps of one H200 in experiments/train_speed/results.
TEST(StepEstimateTest, ComesWithinATwentiethOfWhatWasMeasured) {
  const struct {
    const char* name;
    RunConfig config;
    double measured_s;
  } shapes[] = {{"124M", with_batch(llama(12, 768, 12, 12, 2048, 50304), 1024, 64), 0.1057},
                {"1B", with_batch(llama(16, 2048, 32, 8, 8192, 128256), 4096, 4), 0.2479},
                {"XL", with_batch(llama(48, 1600, 25, 25, 4352, 50304), 1024, 16), 0.3137},
                {"8B slice", with_batch(llama(8, 4096, 32, 8, 14336, 128256), 8192, 1), 0.2246}};
  for (const auto& [name, config, measured_s] : shapes) {
    const int64_t tokens = config.training.global_batch_size * config.training.seq_len;
    const int64_t updated = runtime::ParamTable::build(config.model).total_length();
    EXPECT_NEAR(estimate_step_s(config, tokens, updated, h200_rates()), measured_s, measured_s / 20) << name;
  }
}

TEST(StepEstimateTest, RecomputationCostsTimeAndSmallerMomentsSaveSome) {
  RunConfig c = llama_8b();
  const auto seconds = [&] { return estimate_step_s(c, 32768, 8'000'000'000, h200_rates()); };
  double before = seconds();
  for (const char* recompute : {"norms_and_activations", "attention", "block"}) {
    c.training.recompute = recompute;
    EXPECT_GT(seconds(), before) << recompute;
    before = seconds();
  }
  c.optimizer.moments_dtype = "bf16";
  EXPECT_LT(seconds(), before);
  before = seconds();
  c.optimizer.offload = true;
  EXPECT_GT(seconds(), before);
}

TEST(PlanReportTest, SaysWithWhichSettingsLlama8BFitsOnOneGpu) {
  const Result<std::string> report = report_plan(llama_8b(), {.world_size = 1, .gpu_gib = 139.8, .host_gib = 128});
  ASSERT_TRUE(report.ok()) << report.status().to_string();
  EXPECT_THAT(*report, HasSubstr("GiB of GPU memory too much"));
  EXPECT_THAT(*report, HasSubstr("bf16 moments, offloaded"));
  EXPECT_THAT(*report, HasSubstr("would fit"));
  EXPECT_THAT(*report, HasSubstr("one H200"));  // where the rates come from
  RunConfig fits = llama_8b();
  fits.optimizer.moments_dtype = "bf16";
  fits.training.recompute = "block";
  const Result<std::string> second = report_plan(fits, {.world_size = 1, .gpu_gib = 139.8, .host_gib = 128});
  ASSERT_TRUE(second.ok()) << second.status().to_string();
  EXPECT_THAT(*second, Not(HasSubstr("would fit")));
}

TEST(PlanReportTest, OffloadedMomentsAreTheHosts) {
  RunConfig c = llama_8b();
  const PlanDevice device{.kernels = &kernels::cpu::kernels()};
  const MemoryPlan here = plan_memory(c, 1, device);
  c.optimizer.offload = true;
  const MemoryPlan there = plan_memory(c, 1, device);
  const int64_t moments = 8 * runtime::ParamTable::build(c.model).total_length();
  EXPECT_EQ(there.private_bytes() - here.private_bytes(), moments);
  // But for what is on its way.
  EXPECT_NEAR(static_cast<double>(here.device_bytes() - there.device_bytes()), static_cast<double>(moments), 256 << 20);
  EXPECT_GT(there.device_bytes(), here.device_bytes() - moments);
  EXPECT_EQ(host_bytes_of_job(c, 1), there.total_bytes());
  c.device = "cpu";
  EXPECT_THAT(c.validate(1).message(), HasSubstr("optimizer.offload"));
}

TEST(NearestFitTest, ChangesAsLittleAsIsEnough) {
  const RunConfig c = with_batch(llama(2, 128, 2, 2, 256, 512), 64, 8);
  const auto nearest = [&](const std::function<bool(const RunConfig&)>& fits) { return nearest_fit(c, 4, fits); };
  EXPECT_EQ(nearest([](const RunConfig& r) { return r.training.recompute == "attention"; }),
            "training.recompute = \"attention\" would fit");
  EXPECT_EQ(nearest([](const RunConfig& r) { return r.parallelism.mode == "zero2"; }),
            "parallelism.mode = \"zero2\" would fit");
  EXPECT_EQ(nearest([](const RunConfig& r) { return r.optimizer.offload && r.training.micro_batch_size == 1; }),
            "training.micro_batch_size = 1 with optimizer.offload = true would fit");
  EXPECT_THAT(nearest([](const RunConfig&) { return false; }), HasSubstr("no mode"));
  const auto spares = [](const RunConfig& r) { return r.recovery.spares == 0; };
  RunConfig with_spares = c;
  with_spares.recovery.spares = 2;
  EXPECT_EQ(nearest_fit(with_spares, 4, spares), "recovery.spares = 0 would fit");
}

TEST(DeviceMemoryTest, ARunThatDoesNotFitIsRefusedAndWhatWouldFitIsNamed) {
  const RunConfig c = with_batch(llama(4, 512, 8, 8, 1024, 8192), 128, 4);
  const int64_t needed = plan_memory(c, 1, PlanDevice{.kernels = &kernels::cpu::kernels()}).device_bytes();
  EXPECT_TRUE(check_device_memory(c, 1, SmallGpu(needed), 0, {}).ok());
  EXPECT_TRUE(check_device_memory(c, 1, SmallGpu(needed / 2), needed / 2 + 1, {}).ok())
      << "half of it is taken already";
  const Status status = check_device_memory(c, 1, SmallGpu(needed - (3 << 20)), 0, {});
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("3.00 MiB too much"));
  EXPECT_THAT(status.message(), HasSubstr("would fit"));
  // Among ranks a mode that shards is asked before the moments' type.
  RunConfig on_four = with_batch(llama(8, 1024, 16, 16, 4096, 8192), 128, 4);
  on_four.training.recompute = "block";
  const SmallGpu any(0);
  const int64_t whole = plan_memory(on_four, 4, &any).device_bytes();
  EXPECT_THAT(check_device_memory(on_four, 4, SmallGpu(whole * 3 / 4), 0, {}).message(),
              HasSubstr("parallelism.mode = \"zero"));
}

TEST(DeviceMemoryTest, RanksTakeTheGpusOfAHostInTurn) {
  for (const int rank : {0, 1, 3, 4, 6, 7}) EXPECT_EQ(ranks_on_device(rank, 8, 3), 3) << rank;
  for (const int rank : {2, 5}) EXPECT_EQ(ranks_on_device(rank, 8, 3), 2) << rank;
  EXPECT_EQ(ranks_on_device(1, 2, 8), 1);
  EXPECT_EQ(ranks_on_device(1, 2, 1), 2);
}

// Four ranks on one GPU, which arrive one after the other or all at once.
class SharedDeviceTest : public testing::Test {
 protected:
  static constexpr int64_t kMiB = 1 << 20;
  static constexpr int64_t kContext = 512 * kMiB;

  // With so much in use when this process asks, of which its own context is a part.
  Status check(int64_t in_use, int64_t total, const DeviceSharers& sharers = {.num_ranks = 4}) const {
    return check_device_memory(config_, 4, SmallGpu(total - in_use, total), 0, sharers);
  }

  const SmallGpu any_{0};
  RunConfig config_ = with_batch(llama(8, 1024, 16, 16, 4096, 8192), 128, 8);
  const int64_t plan_ = plan_memory(config_, 4, &any_).device_bytes();
  const int64_t rank_ = plan_ + kContext;
  const int64_t all_ = 4 * rank_;
};

TEST_F(SharedDeviceTest, WhatSistersHaveTakenIsNotCountedTwice) {
  for (int before = 0; before < 4; ++before) {
    EXPECT_TRUE(check(before * rank_ + kContext, all_).ok()) << before << " ranks have their memory";
  }
  EXPECT_TRUE(check(4 * kContext, all_).ok()) << "all at once";
}

TEST_F(SharedDeviceTest, TheFirstIsRefusedWhereTheLastWouldFindTooLittle) {
  const int64_t total = all_ - 3 * kMiB;
  for (int before = 0; before < 4; ++before) {
    const Status status = check(before * rank_ + kContext, total);
    EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << before << " ranks have their memory";
    EXPECT_THAT(status.message(), HasSubstr("4 ranks share this GPU"));
    EXPECT_THAT(status.message(), HasSubstr("others hold at least 0.00 MiB: 3.00 MiB too much"));
    EXPECT_THAT(status.message(), HasSubstr("training.recompute = \"norms_and_activations\" would fit"));
  }
  EXPECT_TRUE(check(kContext, total, {.num_ranks = 3}).ok());
  EXPECT_TRUE(check(kContext, total, {}).ok()) << "a GPU of its own";
}

TEST_F(SharedDeviceTest, MemoryOfOthersIsCountedBesideThatOfSisters) {
  const int64_t total = all_ + 100 * kMiB;
  EXPECT_TRUE(check(3 * rank_ + kContext + 100 * kMiB, total).ok());
  EXPECT_THAT(check(3 * rank_ + kContext + 105 * kMiB, total).message(),
              HasSubstr("others hold at least 105.00 MiB: 5.00 MiB too much"));
}

class SparesOnADeviceTest : public SharedDeviceTest {
 protected:
  SparesOnADeviceTest() { config_.recovery.spares = 1; }
  std::string described(int64_t total) const {
    return describe_device_sharing(config_, 4, SmallGpu(0, total), /*num_ranks=*/4).value();
  }
  const DeviceSharers spare_{.num_ranks = 4, .spare = true};
};

// Ranks do not make room for them, since they train without.
TEST_F(SparesOnADeviceTest, AllFitBesideTheRanksOrNoneStarts) {
  EXPECT_TRUE(check(all_ + kContext, 2 * all_, spare_).ok());
  EXPECT_TRUE(check(2 * all_ - rank_ + kContext, 2 * all_, spare_).ok()) << "three spares are there";
  const int64_t total = 2 * all_ - kMiB;
  const Status status = check(all_ + kContext, total, spare_);
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("4 ranks and 4 spares share this GPU"));
  EXPECT_THAT(status.message(), HasSubstr("1.00 MiB too much"));
  EXPECT_THAT(status.message(), HasSubstr("would fit; recovery.spares = 0 asks for none"));
  EXPECT_TRUE(check(kContext, total).ok());
  EXPECT_THAT(check(kContext, all_ - kMiB).message(), HasSubstr("4 ranks share this GPU"));
}

TEST_F(SparesOnADeviceTest, OneRankAndItsSpareShareAGpuToo) {
  const DeviceSharers spare{.num_ranks = 1, .spare = true};
  EXPECT_TRUE(check(rank_ + kContext, 2 * rank_, spare).ok());
  EXPECT_THAT(check(rank_ + kContext, 2 * rank_ - kMiB, spare).message(), HasSubstr("1 rank and 1 spare share"));
}

TEST_F(SparesOnADeviceTest, ARankThatStartsAgainIsToldThatTheyMayHoldWhatItNeeds) {
  EXPECT_TRUE(check(2 * all_ - rank_ + kContext, 2 * all_).ok());
  const Status status = check(2 * all_ - rank_ + kContext + 10 * kMiB, 2 * all_);
  EXPECT_THAT(status.message(), HasSubstr("10.00 MiB too much"));
  EXPECT_THAT(status.message(), HasSubstr("spares count among the others, and recovery.spares = 0 asks for none"));
}

TEST_F(SparesOnADeviceTest, ThePlanSaysWhetherTheyFit) {
  EXPECT_THAT(described(2 * all_), HasSubstr("4 ranks and 4 spares on this GPU need"));
  EXPECT_THAT(described(2 * all_), Not(HasSubstr("too much")));
  EXPECT_THAT(described(2 * all_ - 3 * kMiB), HasSubstr("3.00 MiB too much, so no spare is kept"));
  EXPECT_THAT(described(2 * all_ - 3 * kMiB), HasSubstr("training.recompute = \"norms_and_activations\" would fit"));
  config_.recovery.spares = 0;
  EXPECT_THAT(described(all_), HasSubstr("4 ranks on this GPU need"));
  EXPECT_EQ(describe_device_sharing(config_, 1, any_, /*num_ranks=*/1).value(), "");
}

// Sharded modes and a rank alone make such sums without.
TEST(DeviceMemoryTest, WhatSumsInFixedOrderAreStagedInIsPlanned) {
  RunConfig c = with_batch(llama(2, 128, 2, 2, 256, 512), 64, 8);
  const SmallGpu gpu(0);
  for (const char* const mode : {"ddp", "zero2"}) {
    for (const int N : {1, 4}) {
      c.parallelism.mode = mode;
      c.parallelism.reduce_order = "fast";
      EXPECT_EQ(fixed_order_staging_bytes(c, N), 0);
      c.parallelism.reduce_order = "fixed";
      const bool staged = N > 1 && c.parallelism.mode == "ddp";
      const MemoryPlan plan = plan_memory(c, N, &gpu);
      EXPECT_EQ(fixed_order_staging_bytes(c, N), staged ? 64 << 20 : 0) << mode << N;
      EXPECT_EQ(plan.to_string().find("staged sums") != std::string::npos, staged) << plan.to_string();
      EXPECT_EQ(plan.state_heap_bytes() > 64 << 20, staged) << mode << N;
    }
  }
  c.parallelism.mode = "ddp";
  c.device = "cpu";
  EXPECT_THAT(plan_memory(c, 4).to_string(), Not(HasSubstr("staged sums")));
}

}  // namespace
}  // namespace kintsugi::launch
