// Rows of logits keep their bits whatever the batch, the length, the threads, or the call they come from; and the
// decode step agrees with the full forward. Models here are large enough for the kernels' blocked paths.
#include <cmath>
#include <cstring>

#include "tests/runtime/model/model_harness.h"
#include "tests/runtime/model/plain_transformer.h"

namespace kintsugi::runtime::testing {
namespace {

constexpr int64_t kB = 3, kT = kMediumSeqLen;

class RowBitsTest : public ::testing::TestWithParam<MediumCase> {
 protected:
  const ModelConfig& config() const { return GetParam().variant.config; }
  DType dtype() const { return GetParam().dtype; }
  TransformerOptions options(bool training) const {
    return {.dtype = dtype(), .max_tokens = kB * kT, .max_seq_len = kT, .training = training};
  }
  int64_t row_bytes() const { return config().vocab_size * kernels::size_of(dtype()); }

  std::vector<char> logits(Harness& h, const int32_t* ids, int64_t B, int64_t T, bool last_only = false,
                           KvSink* sink = nullptr) const {
    std::vector<char> out(static_cast<size_t>((last_only ? B : B * T) * row_bytes()));
    std::vector<int32_t> positions(static_cast<size_t>(B * T));
    for (int64_t n = 0; n < B * T; ++n) positions[static_cast<size_t>(n)] = static_cast<int32_t>(n % T);
    const Status status =
        h.model->forward_logits(out.data(), ids, positions.data(), B, T, last_only, *h.access, sink, *h.stream);
    EXPECT_TRUE(status.ok()) << status.to_string();
    return out;
  }
  // Rows [first, first + count) of `a` against rows [other, ...) of `b`, byte for byte.
  bool same_rows(const std::vector<char>& a, int64_t first, const std::vector<char>& b, int64_t other,
                 int64_t count) const {
    return std::memcmp(&a[static_cast<size_t>(first * row_bytes())], &b[static_cast<size_t>(other * row_bytes())],
                       static_cast<size_t>(count * row_bytes())) == 0;
  }
  std::vector<float> as_floats(Harness& h, const std::vector<char>& logits) const {
    std::vector<float> out(logits.size() / static_cast<size_t>(kernels::size_of(dtype())));
    EXPECT_EQ(h.backend->kernels().reduce->convert_to_f32(out.data(), logits.data(), static_cast<int64_t>(out.size()),
                                                          dtype(), nullptr),
              kernels::kKernelOk);
    return out;
  }
};
INSTANTIATE_TEST_SUITE_P(Cases, RowBitsTest, ::testing::ValuesIn(medium_cases()), [](const auto& c) {
  return c.param.variant.name + (c.param.dtype == DType::kF32 ? "_fp32" : "_bf16");
});

TEST_P(RowBitsTest, DoNotDependOnBatchLengthThreadsOrPlan) {
  const Batch batch = random_batch(config().vocab_size, kB, kT);
  const std::vector<float> w = lively_weights(ParamTable::build(config()));
  Harness h(config(), options(true), false, w);
  const std::vector<char> full = logits(h, batch.inputs.data(), kB, kT);
  for (const int64_t T : {int64_t{1}, int64_t{2}, int64_t{15}, int64_t{16}, int64_t{17}, int64_t{64}, kT}) {
    for (int64_t b = 0; b < kB; ++b) {
      const std::vector<char> alone = logits(h, batch.inputs.data() + b * kT, 1, T);
      EXPECT_TRUE(same_rows(full, b * kT, alone, 0, T)) << "sequence " << b << " of length " << T;
      const std::vector<char> last = logits(h, batch.inputs.data() + b * kT, 1, T, true);
      EXPECT_TRUE(same_rows(full, b * kT + T - 1, last, 0, 1)) << "last of " << T;
    }
  }
  const std::vector<char> lasts = logits(h, batch.inputs.data(), kB, kT, true);
  for (int64_t b = 0; b < kB; ++b) EXPECT_TRUE(same_rows(full, b * kT + kT - 1, lasts, b, 1));

  Harness inference(config(), options(false), false, w);
  EXPECT_EQ(logits(inference, batch.inputs.data(), kB, kT), full);

  const auto two_threads = create_cpu_backend({.num_threads = 2});
  EXPECT_EQ(logits(h, batch.inputs.data(), kB, kT), full);
}

TEST_P(RowBitsTest, TheLossInTrainingIsThatOfPrefillsLogits) {
  const Batch batch = random_batch(config().vocab_size, kB, kT);
  const std::vector<float> w = lively_weights(ParamTable::build(config()));
  Harness h(config(), options(true), false, w);
  const std::vector<char> rows = logits(h, batch.inputs.data(), kB, kT);
  std::vector<float> losses(kB * kT);
  const auto& k = h.backend->kernels();
  ASSERT_EQ(k.cross_entropy->forward(losses.data(), rows.data(), batch.targets.data(), kB * kT, config().vocab_size,
                                     dtype(), nullptr),
            kernels::kKernelOk);
  double want = 0;
  ASSERT_EQ(k.reduce->sum(&want, losses.data(), kB * kT, nullptr), kernels::kKernelOk);
  EXPECT_EQ(h.step(batch).loss, want);
  LossSums sums;
  ASSERT_TRUE(h.model->forward_loss(batch.view(), *h.access, &sums, *h.stream).ok());
  EXPECT_EQ(sums.loss, want);
  Harness inference(config(), options(false), false, w);
  ASSERT_TRUE(inference.model->forward_loss(batch.view(), *inference.access, &sums, *inference.stream).ok());
  EXPECT_EQ(sums.loss, want);
}

// A cache of scattered blocks whose unused slots hold NaN, filled by prefill through the sink and by decode.
class TestCache final : public PagedCacheView, public KvSink {
 public:
  static constexpr int64_t kBlock = 4;
  TestCache(const ModelConfig& c, DType dtype, const kernels::KernelTable& kernels, int64_t S, int64_t max_len)
      : config_(c), dtype_(dtype), kernels_(kernels), width_((max_len + kBlock - 1) / kBlock), S_(S) {
    const int64_t bytes = S * width_ * kBlock * c.kv_heads() * c.head_size() * kernels::size_of(dtype);
    for (int64_t l = 0; l < 2 * c.num_layers; ++l) memory_.emplace_back(static_cast<size_t>(bytes), '\xff');
    for (int64_t i = 0; i < S * width_; ++i) {  // a permutation of all blocks: 7 is coprime to their number here
      tables_.push_back(static_cast<int32_t>((i * 7 + 3) % (S * width_)));
    }
    lens_.assign(static_cast<size_t>(S), 0);
    slots_.assign(static_cast<size_t>(S), 0);
  }
  int64_t slot(int64_t s, int64_t p) const {
    return tables_[static_cast<size_t>(s * width_ + p / kBlock)] * kBlock + p % kBlock;
  }
  void begin_prefill(int64_t T) { prefill_T_ = T; }
  void begin_decode(int64_t position) {
    for (int64_t s = 0; s < S_; ++s) {
      lens_[static_cast<size_t>(s)] = static_cast<int32_t>(position + 1);
      slots_[static_cast<size_t>(s)] = slot(s, position);
    }
  }
  Status write(int64_t layer, const void* k, const void* v, int64_t N, int64_t k_stride, int64_t v_stride,
               Stream& stream) override {
    std::vector<int64_t> slots;
    for (int64_t n = 0; n < N; ++n) slots.push_back(slot(n / prefill_T_, n % prefill_T_));
    return stream.launched(
        kernels_.paged_attention->write_kv(k_cache(layer), v_cache(layer), k, v, slots.data(), N, config_.kv_heads(),
                                           config_.head_size(), k_stride, v_stride, dtype_, stream.handle()),
        "write_kv");
  }
  void* k_cache(int64_t layer) const override {
    return const_cast<char*>(memory_[static_cast<size_t>(2 * layer)].data());
  }
  void* v_cache(int64_t layer) const override {
    return const_cast<char*>(memory_[static_cast<size_t>(2 * layer + 1)].data());
  }
  const int32_t* block_tables() const override { return tables_.data(); }
  const int32_t* context_lens() const override { return lens_.data(); }
  const int64_t* new_slots() const override { return slots_.data(); }
  int64_t kv_block_tokens() const override { return kBlock; }
  int64_t block_table_width() const override { return width_; }

 private:
  const ModelConfig config_;
  const DType dtype_;
  const kernels::KernelTable& kernels_;
  const int64_t width_, S_;
  std::vector<std::vector<char>> memory_;
  std::vector<int32_t> tables_, lens_;
  std::vector<int64_t> slots_;
  int64_t prefill_T_ = 1;
};

// Decode sums attention in another order than prefill: outputs of one attention differ by a few roundings of its
// largest values, and L layers of them reach logits whose size is that of the largest logit. In fp32 the roundings are
// 2^-24; in bf16 each attention output is rounded to 8 bits, so a difference in the last fp32 bit can flip 2^-8 there.
double decode_tolerance(DType dtype, double largest_logit) {
  return largest_logit * (dtype == DType::kF32 ? 64 * 0x1p-24 : 8 * 0x1p-8);
}

TEST_P(RowBitsTest, PrefillAndDecodeAgreeWithTheFullForward) {
  constexpr int64_t kPrompt = 13;
  const Batch batch = random_batch(config().vocab_size, kB, kT);
  Harness h(config(), options(false), false, lively_weights(ParamTable::build(config())));
  const std::vector<float> want = as_floats(h, logits(h, batch.inputs.data(), kB, kT));
  double largest = 0;
  for (const float x : want) largest = std::max<double>(largest, std::abs(x));

  TestCache cache(config(), dtype(), h.backend->kernels(), kB, kT);
  cache.begin_prefill(kPrompt);
  std::vector<int32_t> prompt;
  for (int64_t b = 0; b < kB; ++b) {
    prompt.insert(prompt.end(), &batch.inputs[static_cast<size_t>(b * kT)],
                  &batch.inputs[static_cast<size_t>(b * kT)] + kPrompt);
  }
  logits(h, prompt.data(), kB, kPrompt, true, &cache);
  double worst = 0;
  for (int64_t t = kPrompt; t < kT; ++t) {
    std::vector<int32_t> ids, positions(kB, static_cast<int32_t>(t));
    for (int64_t b = 0; b < kB; ++b) ids.push_back(batch.inputs[static_cast<size_t>(b * kT + t)]);
    cache.begin_decode(t);
    std::vector<char> out(static_cast<size_t>(kB * row_bytes()));
    ASSERT_TRUE(h.model->decode(out.data(), ids.data(), positions.data(), kB, cache, *h.access, *h.stream).ok());
    const std::vector<float> got = as_floats(h, out);
    for (int64_t b = 0; b < kB; ++b) {
      for (int64_t v = 0; v < config().vocab_size; ++v) {
        const double difference = std::abs(got[static_cast<size_t>(b * config().vocab_size + v)] -
                                           want[static_cast<size_t>((b * kT + t) * config().vocab_size + v)]);
        ASSERT_TRUE(std::isfinite(difference));
        worst = std::max(worst, difference);
      }
    }
  }
  EXPECT_LE(worst, decode_tolerance(dtype(), largest));
  RecordProperty("worst_over_largest", std::to_string(worst / largest));
}

// The plain model in double precision: logits within the rounding of the compute type. A logit is a sum of C products
// of values rounded to `unit`; independent roundings grow with the square root of the number of layers' operations.
TEST_P(RowBitsTest, LogitsAreThoseOfThePlainModel) {
  const Batch batch = random_batch(config().vocab_size, kB, kT);
  const ParamTable table = ParamTable::build(config());
  const std::vector<float> w = lively_weights(table);
  const std::vector<double> want = plain_logits(config(), table, {w.begin(), w.end()}, batch.inputs, kB, kT);
  double squares = 0;
  for (const double x : want) squares += x * x;
  const double rms = std::sqrt(squares / static_cast<double>(want.size()));
  for (const bool reference : {true, false}) {
    Harness h(config(), options(false), reference, w);
    const std::vector<float> got = as_floats(h, logits(h, batch.inputs.data(), kB, kT));
    double error_squares = 0;
    for (size_t i = 0; i < got.size(); ++i) error_squares += (got[i] - want[i]) * (got[i] - want[i]);
    const double error = std::sqrt(error_squares / static_cast<double>(want.size())) / rms;
    // 12 roundings a layer reach the stream in a row, each of half a unit (2^-24 or 2^-9); random ones add up as roots.
    const double unit = dtype() == DType::kF32 ? 0x1p-24 : 0x1p-9;
    EXPECT_LE(error, 4 * unit * std::sqrt(12.0 * static_cast<double>(config().num_layers)))
        << "reference " << reference;
  }
}

}  // namespace
}  // namespace kintsugi::runtime::testing
