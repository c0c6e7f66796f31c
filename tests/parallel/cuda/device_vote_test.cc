// The vote on a GPU: the numbers of the CPU's, and the gate.
#include "parallel/device_vote.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstring>
#include <random>

#include "kernels/cuda/device_error.h"
#include "runtime/cuda/cuda_backend.h"

namespace kintsugi::parallel {
namespace {

using kernels::LossSums;

runtime::Backend& gpu() {
  static const std::unique_ptr<runtime::Backend> backend = [] {
    Result<std::unique_ptr<runtime::Backend>> made = runtime::create_cuda_backend({});
    KTG_CHECK(made.ok()) << made.status().to_string();
    return std::move(*made);
  }();
  return *backend;
}

// The scalars are two runs of fields with four bytes of padding between them, which nobody writes or reads.
constexpr size_t kSecondRun = offsetof(kernels::AdamWScalars, step);
constexpr size_t kFirstRunBytes = offsetof(kernels::AdamWScalars, skip) + sizeof(kernels::AdamWScalars::skip);
constexpr size_t kSecondRunBytes = sizeof(kernels::AdamWScalars) - kSecondRun;

bool same_bits(const kernels::AdamWScalars& a, const kernels::AdamWScalars& b) {
  return std::memcmp(&a, &b, kFirstRunBytes) == 0 && std::memcmp(&a.step, &b.step, kSecondRunBytes) == 0;
}

// Keeps the words in a page of their own: it becomes memory that the GPU reads.
struct alignas(4096) StopPage {
  std::atomic<int64_t> word{0};
};

class DeviceVoteTest : public testing::Test {
 protected:
  static constexpr int64_t kLength = 64 * 4001, kMicroSteps = 3;

  DeviceVoteTest()
      : stream_(gpu().create_stream().value()),
        gradient_(kLength),
        vote_(units(), Mesh::of_run(ParallelConfig(), 1).value(), ParallelConfig(), 0) {
    const uint64_t seed = std::random_device()();
    printf("seed %lu\n", seed);
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal;
    for (float& g : gradient_) g = normal(random);
    for (int i = 0; i < kMicroSteps; ++i) losses_[i] = {.loss = 100.1 + 0.3 * i, .num_tokens = 50 + i};
    records_ = gpu().allocate(vote_.memory_bytes(), "records").value();
    device_gradient_ = gpu().allocate(kLength * 4, "gradient").value();
    vote_.attach(records_.data());
    device_vote_ = DeviceVote::create(vote_, kMicroSteps, /*add_up=*/true, gpu()).value();
    EXPECT_TRUE(device_vote_->open(StopToken(&page_.word, 5)).ok());
  }

  static std::vector<runtime::UnitInfo> units() {
    return {{.name = "", .offset = 0, .length = 64 * 1501, .first_tensor = 0, .num_tensors = 0},
            {.name = "", .offset = 64 * 1501, .length = kLength - 64 * 1501, .first_tensor = 0, .num_tensors = 0}};
  }

  kernels::StepInputs inputs(int64_t step) const {
    return {.step = step,
            .clip_norm = 0.01,
            .lr = 0.5f,
            .beta1 = 0.9f,
            .beta2 = 0.95f,
            .eps = 1e-8f,
            .weight_decay = 0.1f,
            .bias_correction1 = 0.1f,
            .bias_correction2 = 0.05f};
  }

  // One vote; the scalars as the update would read them.
  kernels::AdamWScalars run(int64_t step) {
    EXPECT_TRUE(gpu().copy(device_gradient_.data(), gradient_.data(), kLength * 4, *stream_).ok());
    EXPECT_TRUE(gpu().copy(device_vote_->losses(0), losses_, sizeof(losses_), *stream_).ok());
    EXPECT_TRUE(device_vote_->upload(inputs(step), *stream_).ok());
    EXPECT_TRUE(device_vote_->enter(device_gradient_.as<float>(), *stream_).ok());
    EXPECT_TRUE(device_vote_->count(*stream_).ok());
    kernels::AdamWScalars scalars;
    const kernels::AdamWScalars* const from = device_vote_->scalars();
    EXPECT_TRUE(gpu().copy(&scalars, from, kFirstRunBytes, *stream_).ok());
    EXPECT_TRUE(gpu().copy(&scalars.step, &from->step, kSecondRunBytes, *stream_).ok());
    const Status ended = stream_->synchronize(Deadline::after(std::chrono::seconds(20)));
    EXPECT_TRUE(ended.ok()) << ended.to_string();
    return scalars;
  }

  StopPage page_;
  std::unique_ptr<runtime::Stream> stream_;
  std::vector<float> gradient_;
  LossSums losses_[kMicroSteps];
  Vote vote_;
  runtime::Buffer records_, device_gradient_;
  std::unique_ptr<DeviceVote> device_vote_;
};

TEST_F(DeviceVoteTest, TheOutcomeIsThatOfTheFormula) {
  double squares = 0;
  for (const float g : gradient_) squares += static_cast<double>(g) * g;
  const kernels::AdamWScalars scalars = run(7);
  const std::optional<VoteResult> result = device_vote_->published(7);
  ASSERT_TRUE(result.has_value());
  EXPECT_FALSE(device_vote_->published(6).has_value());
  EXPECT_EQ(result->num_tokens, 153);
  EXPECT_DOUBLE_EQ(result->loss_sum, 100.1 + 100.4 + 100.7);
  EXPECT_NEAR(result->gradient_norm, std::sqrt(squares) / 153, 1e-9 * std::sqrt(squares));
  EXPECT_FALSE(result->skip);
  EXPECT_FALSE(result->stop_requested);
  const kernels::AdamWScalars want =
      kernels::update_scalars(inputs(7), {.gradient_norm = result->gradient_norm, .num_tokens = 153});
  EXPECT_TRUE(same_bits(scalars, want)) << "gradient scale " << scalars.gradient_scale << ", want "
                                        << want.gradient_scale << "; step " << scalars.step << ", skip "
                                        << scalars.skip;
}

TEST_F(DeviceVoteTest, WhatIsNotFiniteSkipsTheUpdate) {
  for (const float bad : {INFINITY, NAN}) {
    gradient_[kLength - 1] = bad;
    EXPECT_EQ(run(1).skip, 1);
    EXPECT_TRUE(device_vote_->published(1)->skip);
  }
}

TEST_F(DeviceVoteTest, NothingPassesTheGateOnceTheGenerationIsOver) {
  page_.word = 6;
  EXPECT_EQ(run(3).skip, 1);
  EXPECT_FALSE(device_vote_->published(3).has_value());
  page_.word = 5;
  EXPECT_EQ(run(3).skip, 0);
  EXPECT_TRUE(device_vote_->published(3).has_value());
}

TEST_F(DeviceVoteTest, NothingPassesTheGateOnceItIsClosed) {
  device_vote_->close();
  EXPECT_EQ(run(3).skip, 1);
  EXPECT_FALSE(device_vote_->published(3).has_value());
  ASSERT_TRUE(device_vote_->open(StopToken(&page_.word, 5)).ok());
  EXPECT_EQ(run(3).skip, 0);
  EXPECT_TRUE(device_vote_->published(3).has_value());
}

}  // namespace
}  // namespace kintsugi::parallel
