// What a Transformer promises beside right gradients (gradient_test.cc): memory as planned, every gradient written and
// nothing else, accumulation, stops between operations, and rows whose bits do not depend on their company.
#include <gmock/gmock.h>

#include <bit>
#include <cmath>
#include <cstring>

#include "tests/runtime/model/model_harness.h"

namespace kintsugi::runtime::testing {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kB = 2, kT = 7;
const TransformerOptions kOptions{.max_tokens = kB * kT, .max_seq_len = kT};

class TransformerTest : public ::testing::TestWithParam<Variant> {
 protected:
  const ModelConfig& config() const { return GetParam().config; }
  ParamTable table() const { return ParamTable::build(config()); }
};
INSTANTIATE_TEST_SUITE_P(Variants, TransformerTest, ::testing::ValuesIn(small_variants()),
                         [](const auto& variant) { return variant.param.name; });

// Elements of the flat space that belong to a tensor.
std::vector<bool> used_elements(const ParamTable& table) {
  std::vector<bool> used(static_cast<size_t>(table.total_length()));
  for (const TensorInfo& t : table.tensors()) {
    for (int64_t i = 0; i < t.numel; ++i) used[static_cast<size_t>(t.offset + i)] = true;
  }
  return used;
}

TEST_P(TransformerTest, TakesExactlyThePlannedBytes) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const bool training : {true, false}) {
      for (const bool reference : {true, false}) {
        TransformerOptions options = kOptions;
        options.dtype = dtype, options.training = training;
        const Harness h(config(), options, reference, lively_weights(table()));
        EXPECT_EQ(h.arena->used_bytes(), h.arena->size_bytes());
      }
    }
  }
}

TEST_P(TransformerTest, DocumentsOfOneLengthHaveTheBitsOfABatchOfThem) {
  const std::vector<float> w = lively_weights(table());
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Recompute recompute : {Recompute::kNone, Recompute::kAttention, Recompute::kBlock}) {
      TransformerOptions options{.dtype = dtype, .max_tokens = 12, .max_seq_len = 6, .recompute = recompute};
      options.documents = true;
      Batch batch = random_batch(config().vocab_size, 4, 3);
      Harness alone(config(), options, false, w), packed(config(), options, false, w);
      const LossSums want = alone.step(batch);
      batch.B = 2, batch.T = 6;
      batch.cut_at({0, 3});
      EXPECT_EQ(packed.step(batch).loss, want.loss);
      EXPECT_EQ(packed.gradients, alone.gradients);
      LossSums evaluated;
      ASSERT_TRUE(packed.model->forward_loss(batch.view(), *packed.access, &evaluated, *packed.stream).ok());
      EXPECT_EQ(evaluated.loss, want.loss);
      // And without borders it is another number.
      batch.document_starts.clear();
      EXPECT_NE(packed.step(batch).loss, want.loss);
    }
  }
}

TEST_P(TransformerTest, DocumentsThatWereNotPlannedForAreRefused) {
  Harness h(config(), kOptions, false, lively_weights(table()));
  Batch batch = random_batch(config().vocab_size, kB, kT);
  batch.cut_at({0, 2});
  LossSums sums;
  EXPECT_EQ(h.model->forward_backward(batch.view(), *h.access, &sums, *h.stream).code(), StatusCode::kInvalidArgument);
}

TEST_P(TransformerTest, RecomputationChangesNoBitAndTakesLessMemory) {
  const std::vector<float> w = lively_weights(table());
  const Batch batch = random_batch(config().vocab_size, kB, kT);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    TransformerOptions options = kOptions;
    options.dtype = dtype;
    Harness keeps(config(), options, false, w);
    const LossSums want = keeps.step(batch);
    int64_t bytes_before = keeps.arena->size_bytes();
    for (const char* name : {"norms_and_activations", "attention", "block"}) {
      SCOPED_TRACE(name);
      options.recompute = parse_recompute(name).value();
      Harness h(config(), options, false, w);
      EXPECT_EQ(h.step(batch).loss, want.loss);
      EXPECT_EQ(h.arena->used_bytes(), h.arena->size_bytes());
      EXPECT_LT(h.arena->size_bytes(), bytes_before);
      bytes_before = h.arena->size_bytes();
      EXPECT_EQ(std::memcmp(h.gradients.data(), keeps.gradients.data(), h.gradients.size() * sizeof(float)), 0);
    }
  }
}

TEST_P(TransformerTest, WritesEveryGradientAndReadsNoPadding) {
  const std::vector<bool> used = used_elements(table());
  std::vector<float> clean = lively_weights(table()), poisoned = clean;
  for (size_t i = 0; i < used.size(); ++i) {
    if (!used[i]) poisoned[i] = NAN;
  }
  const Batch batch = random_batch(config().vocab_size, kB, kT);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    TransformerOptions options = kOptions;
    options.dtype = dtype;
    Harness want(config(), options, false, clean), h(config(), options, false, poisoned);
    want.step(batch);
    constexpr uint32_t poison = 0xffffffff;  // a NaN
    std::memset(h.gradients.data(), 0xff, h.gradients.size() * sizeof(float));
    h.step(batch);
    for (size_t i = 0; i < used.size(); ++i) {
      if (used[i]) {
        ASSERT_EQ(h.gradients[i], want.gradients[i]) << "element " << i;
      } else {
        ASSERT_EQ(std::bit_cast<uint32_t>(h.gradients[i]), poison) << "padding " << i;
      }
    }
  }
}

TEST_P(TransformerTest, DoesNotDependOnWhatItsBuffersHold) {
  const Batch batch = random_batch(config().vocab_size, kB, kT);
  Harness h(config(), kOptions, false, lively_weights(table()));
  const LossSums want = h.step(batch);
  // A second model over memory full of NaN.
  const int64_t bytes = Transformer::activation_bytes(config(), kOptions, h.backend->kernels());
  Buffer memory = std::move(h.backend->allocate(bytes, "activations")).value();
  std::memset(memory.data(), 0xff, static_cast<size_t>(bytes));
  Arena arena(std::move(memory));
  const auto model = std::move(Transformer::create(config(), kOptions, *h.backend, arena, *h.stream)).value();
  std::vector<float> gradients(h.w.size(), NAN);
  FlatUnitAccess access(h.table, h.w.data(), h.w.data(), gradients.data(), DType::kF32);
  LossSums sums;
  ASSERT_TRUE(model->forward_backward(batch.view(), access, &sums, *h.stream).ok());
  EXPECT_EQ(sums.loss, want.loss);
  for (const TensorInfo& t : h.table.tensors()) {
    for (int64_t i = t.offset; i < t.offset + t.numel; ++i) {
      ASSERT_EQ(gradients[static_cast<size_t>(i)], h.gradients[static_cast<size_t>(i)]) << t.name;
    }
  }
}

TEST_P(TransformerTest, AccumulatedGradientsAreTheSum) {
  const Batch first = random_batch(config().vocab_size, kB, kT, true, 1);
  const Batch second = random_batch(config().vocab_size, kB, kT - 2, true, 2);
  Harness h(config(), kOptions, false, lively_weights(table()));
  h.step(first);
  const std::vector<float> a = h.gradients;
  h.step(second);
  const std::vector<float> b = h.gradients;
  h.step(first);
  h.access->set_accumulate(true);
  h.step(second);
  for (const TensorInfo& t : h.table.tensors()) {
    // Adding into what is there may round once for each of the B T terms of the second sum, at the size of the largest
    // partial sum, which is about that of the largest gradient.
    double largest = 0;
    for (int64_t i = t.offset; i < t.offset + t.numel; ++i) {
      largest = std::max<double>(largest, std::abs(a[static_cast<size_t>(i)]) + std::abs(b[static_cast<size_t>(i)]));
    }
    for (int64_t i = t.offset; i < t.offset + t.numel; ++i) {
      const auto n = static_cast<size_t>(i);
      ASSERT_NEAR(h.gradients[n], double{a[n]} + b[n], kB * kT * 0x1p-24 * largest) << t.name << " " << i - t.offset;
    }
  }
}

TEST_P(TransformerTest, IgnoredTargetsLeaveNoTrace) {
  Batch batch = random_batch(config().vocab_size, kB, kT);
  std::fill(batch.targets.begin(), batch.targets.end(), kernels::kIgnoredTarget);
  Harness h(config(), kOptions, false, lively_weights(table()));
  const LossSums sums = h.step(batch);
  EXPECT_EQ(sums.loss, 0);
  EXPECT_EQ(sums.num_tokens, 0);
  for (const float g : h.gradients) EXPECT_EQ(g, 0.0f);
}

// Counts operations; when the count is reached it asks for a stop.
class StopAt final : public OpObserver {
 public:
  StopAt(std::atomic<int64_t>* word, int64_t count) : word_(word), left_(count) {}
  void launched(const char*) override {
    ++seen;
    if (--left_ == 0) word_->store(1);
  }
  int64_t seen = 0;

 private:
  std::atomic<int64_t>* word_;
  int64_t left_;
};

// Writes down the calls: "a3" acquire, "r3" release, "g3" gradients, "d3" ready.
class RecordingAccess final : public UnitAccess {
 public:
  explicit RecordingAccess(UnitAccess& inner) : inner_(inner) {}
  Result<Weights> acquire(int unit, Stream& stream) override {
    note("a", unit);
    ++held;
    return inner_.acquire(unit, stream);
  }
  Status release(int unit, Stream& stream) override {
    note("r", unit);
    --held;
    return inner_.release(unit, stream);
  }
  Result<Gradients> gradients(int unit, Stream& stream) override {
    note("g", unit);
    return inner_.gradients(unit, stream);
  }
  Status gradients_ready(int unit, Stream& stream) override {
    note("d", unit);
    return inner_.gradients_ready(unit, stream);
  }
  std::string calls;
  int held = 0;

 private:
  void note(const char* what, int unit) {
    calls += (calls.empty() ? "" : " ") + std::string(what) + std::to_string(unit);
  }
  UnitAccess& inner_;
};

TEST_P(TransformerTest, AStopEndsTheStepAfterTheOperationAtHand) {
  const Batch batch = random_batch(config().vocab_size, kB, kT);
  Harness h(config(), kOptions, false, lively_weights(table()));
  h.step(batch);  // positions are written once
  std::atomic<int64_t> word = 0;
  StopAt never(&word, -1);
  h.stream->set_observer(&never);
  h.step(batch);
  const std::vector<float> want = h.gradients;
  const int64_t num_ops = never.seen;
  ASSERT_GT(num_ops, 20);
  for (int64_t n = 1; n <= num_ops; ++n) {
    word = 0;
    StopAt stop(&word, n);
    h.stream->set_observer(&stop);
    h.stream->set_stop_token(StopToken(&word, 0));
    RecordingAccess access(*h.access);
    LossSums sums;
    const Status status = h.model->forward_backward(batch.view(), access, &sums, *h.stream);
    ASSERT_EQ(status.code(), StatusCode::kAborted) << "operation " << n << " of " << num_ops;
    ASSERT_EQ(stop.seen, n) << "nothing may start after the stop";
    ASSERT_EQ(access.held, 0);
    ASSERT_EQ(access.calls.find("d0"), std::string::npos) << "a stopped step has no complete gradient of unit 0";
  }
  // The half-done step is simply dropped.
  h.stream->set_observer(nullptr);
  h.stream->set_stop_token(StopToken());
  h.step(batch);
  EXPECT_EQ(h.gradients, want);
}

TEST_P(TransformerTest, UsesUnitsInTheDocumentedOrder) {
  Harness h(config(), kOptions, false, lively_weights(table()));
  RecordingAccess access(*h.access);
  LossSums sums;
  const Batch batch = random_batch(config().vocab_size, kB, kT);
  ASSERT_TRUE(h.model->forward_backward(batch.view(), access, &sums, *h.stream).ok());
  const std::string blocks_back = " r3 a2 g2 r2 d2 a1 g1 r1 d1";
  EXPECT_EQ(access.calls, config().tied_embedding ? "a0 r0 a1 r1 a2 r2 a3 a0 r0 g3 g0 a0 r0 d3" + blocks_back + " d0"
                                                  : "a0 r0 a1 r1 a2 r2 a3 g3 d3" + blocks_back + " g0 d0");
  access.calls.clear();
  ASSERT_TRUE(h.model->forward_loss(batch.view(), access, &sums, *h.stream).ok());
  EXPECT_EQ(access.calls, config().tied_embedding ? "a0 r0 a1 r1 a2 r2 a3 a0 r0 r3" : "a0 r0 a1 r1 a2 r2 a3 r3");
}

TEST_P(TransformerTest, RefusesWhatItWasNotPlannedFor) {
  Harness h(config(), kOptions, false, lively_weights(table()));
  LossSums sums;
  const auto code = [&](int64_t B, int64_t T) {
    const Batch batch = random_batch(config().vocab_size, B, T);
    return h.model->forward_backward(batch.view(), *h.access, &sums, *h.stream).code();
  };
  EXPECT_EQ(code(1, kT + 1), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(kB + 1, kT), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(kB * kT, 1), StatusCode::kOk);
  Arena arena{Buffer()};
  const auto message = [&](TransformerOptions options) {
    return Transformer::create(config(), options, *h.backend, arena, *h.stream).status().message();
  };
  EXPECT_THAT(message({.max_tokens = 64, .max_seq_len = 10}), HasSubstr("model.max_seq_len = 9"));
  EXPECT_THAT(message({.max_tokens = 0, .max_seq_len = 9}), HasSubstr("at least 1"));
}

}  // namespace
}  // namespace kintsugi::runtime::testing
