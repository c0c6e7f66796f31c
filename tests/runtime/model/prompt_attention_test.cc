// Where a library builds something for every length that attention is called with, prompts are padded to few lengths.
#include <cstring>
#include <set>

#include "runtime/model/transformer_plan.h"
#include "tests/runtime/cpu_backed.h"
#include "tests/runtime/model/model_harness.h"

namespace kintsugi::runtime::testing {
namespace {

std::set<int64_t> lengths;  // that attention was called with

// The CPU's kernels as if they were such a library's. Memory is NaN at first.
class BuiltByShape final : public CpuBacked {
 public:
  BuiltByShape() {
    attention_ = *kernels::cpu::kernels().attention;
    attention_.built_by_shape = [](const kernels::AttentionShape&, DType dtype) { return dtype == DType::kBF16; };
    attention_.forward = [](void* o, float* lse, const void* q, const void* k, const void* v,
                            const kernels::AttentionShape& shape, DType dtype, kernels::StreamHandle stream) {
      lengths.insert(shape.T);
      return kernels::cpu::kernels().attention->forward(o, lse, q, k, v, shape, dtype, stream);
    };
    table_ = kernels::cpu::kernels();
    table_.attention = &attention_;
  }
  std::string description() const override { return "the CPU's kernels as a library that builds by shape"; }
  const kernels::KernelTable& kernels() const override { return table_; }
  Result<Buffer> allocate(int64_t size_bytes, std::string_view what) override {
    Result<Buffer> buffer = CpuBacked::allocate(size_bytes, what);
    if (buffer.ok()) std::memset(buffer->data(), 0xff, static_cast<size_t>(size_bytes));
    return buffer;
  }

 private:
  kernels::AttentionKernels attention_;
  kernels::KernelTable table_;
};

class PromptAttentionTest : public ::testing::Test {
 protected:
  // The bytes of all rows of logits of `B` sequences of T tokens.
  std::vector<char> logits(Harness& h, DType dtype, int64_t B, int64_t T) {
    const Batch batch = random_batch(config_.vocab_size, B, T);
    std::vector<char> out(static_cast<size_t>(B * T * config_.vocab_size * kernels::size_of(dtype)));
    std::vector<int32_t> positions;
    for (int64_t n = 0; n < B * T; ++n) positions.push_back(static_cast<int32_t>(n % T));
    lengths.clear();
    const Status status = h.model->forward_logits(out.data(), batch.inputs.data(), positions.data(), B, T, false,
                                                  *h.access, nullptr, *h.stream);
    EXPECT_TRUE(status.ok()) << status.to_string();
    return out;
  }
  TransformerOptions options(DType dtype) const {
    return {.dtype = dtype, .max_tokens = 90, .max_seq_len = kMediumSeqLen, .training = false};
  }

  const ModelConfig config_ = medium_variants().front().config;
  const std::vector<float> weights_ = lively_weights(ParamTable::build(config_));
};

TEST_F(PromptAttentionTest, APaddedPromptHasTheBitsOfAPromptAlone) {
  Harness exact(config_, options(DType::kBF16), false, weights_);
  Harness padded(config_, options(DType::kBF16), std::make_unique<BuiltByShape>(), weights_);
  for (const auto& [T, called] : {std::pair{1, 64}, {5, 64}, {64, 64}, {65, 90}, {70, 90}}) {
    const std::vector<char> got = logits(padded, DType::kBF16, 1, T);
    EXPECT_EQ(lengths, std::set<int64_t>{called}) << T;
    EXPECT_EQ(got, logits(exact, DType::kBF16, 1, T)) << T;
  }
}

TEST_F(PromptAttentionTest, NothingIsPaddedWhereNothingIsBuiltOrWhereSequencesLieSideBySide) {
  Harness bf16(config_, options(DType::kBF16), std::make_unique<BuiltByShape>(), weights_);
  (void)logits(bf16, DType::kBF16, 3, 5);
  EXPECT_EQ(lengths, std::set<int64_t>{5});
  Harness fp32(config_, options(DType::kF32), std::make_unique<BuiltByShape>(), weights_);
  (void)logits(fp32, DType::kF32, 1, 5);
  EXPECT_EQ(lengths, std::set<int64_t>{5});
}

TEST_F(PromptAttentionTest, FewNumbersOfRowsServeAllPrompts) {
  std::set<int64_t> all;
  for (int64_t T = 1; T <= 8192; ++T) {
    const int64_t rows = prompt_attention_rows(T);
    ASSERT_GE(rows, T);
    ASSERT_LE(rows, std::max<int64_t>(64, T * 3 / 2)) << T;
    all.insert(rows);
  }
  EXPECT_EQ(all.size(), 15U);
  for (const int64_t rows : all) EXPECT_EQ(prompt_attention_rows(rows), rows);
}

}  // namespace
}  // namespace kintsugi::runtime::testing
