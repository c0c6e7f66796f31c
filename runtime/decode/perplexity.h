// How well a model predicts a text: the sum of -log p over its tokens, window by window.
//
// The window rule. Of n tokens, every one but the first is a target exactly once. Window w holds the targets
// w T + 1 .. w T + T (the last window, what is left), and its context starts afresh at token w T: a target is
// predicted from the tokens of its window before it, at least 1 and at most T. These are the samples of
// TokenDataset plus the tail, so the loss of a training run's validation is this one where T divides n - 1.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "runtime/backend.h"
#include "runtime/model/transformer.h"

namespace kintsugi::runtime {

struct PerplexityOptions {
  DType dtype = DType::kF32;
  int64_t window = 0;      // T; 0: the model's max_seq_len
  int64_t max_tokens = 0;  // of one forward call; 0: 8 windows or 4096 tokens, whichever is less, at least 1 window
};

class PerplexityEvaluator {
 public:
  // Allocates all memory. `backend` and `access` (the weights) outlive it. kInvalidArgument, kResourceExhausted.
  static Result<std::unique_ptr<PerplexityEvaluator>> create(const ModelConfig& model, const PerplexityOptions& options,
                                                             Backend& backend, UnitAccess& access);

  // The summed loss (natural log) of tokens 1 .. n-1. kInvalidArgument: fewer than 2 tokens, or an id outside the
  // vocabulary. kFailedPrecondition: the loss is not finite.
  Result<LossSums> evaluate(std::span<const int32_t> tokens);

  int64_t window() const { return window_; }

 private:
  PerplexityEvaluator(const ModelConfig& model, int64_t window, int64_t batch, Backend& backend, UnitAccess& access)
      : model_config_(model), window_(window), batch_(batch), backend_(backend), access_(access) {}
  // Windows [first, first + count) of T targets each, all full but perhaps the only one.
  Status add_windows(std::span<const int32_t> tokens, int64_t first, int64_t count, int64_t T, LossSums& total);

  const ModelConfig model_config_;
  const int64_t window_, batch_;
  Backend& backend_;
  UnitAccess& access_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Arena> arena_;
  Buffer sums_;  // one LossSums
  std::unique_ptr<Transformer> model_;
  int32_t* inputs_ = nullptr;  // (batch, window)
  int32_t* targets_ = nullptr;
};

}  // namespace kintsugi::runtime
