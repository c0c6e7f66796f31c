#include "runtime/decode/perplexity.h"

#include <algorithm>
#include <cmath>
#include <string>

namespace kintsugi::runtime {

Result<std::unique_ptr<PerplexityEvaluator>> PerplexityEvaluator::create(const ModelConfig& model,
                                                                         const PerplexityOptions& options,
                                                                         Backend& backend, UnitAccess& access) {
  const int64_t window = options.window == 0 ? model.max_seq_len : options.window;
  if (window < 1 || window > model.max_seq_len) {
    return invalid_argument("window = " + std::to_string(window) + ": must be from 1 to " +
                            std::to_string(model.max_seq_len) + ", the model's max_seq_len");
  }
  const int64_t max_tokens = options.max_tokens == 0 ? std::min<int64_t>(8 * window, 4096) : options.max_tokens;
  const int64_t batch = std::max<int64_t>(max_tokens / window, 1);
  const int64_t N = batch * window;
  const TransformerOptions transformer{
      .dtype = options.dtype, .max_tokens = N, .max_seq_len = window, .training = false};
  const int64_t bytes = Transformer::activation_bytes(model, transformer, backend.kernels()) + 2 * (N * 4 + 256);
  std::unique_ptr<PerplexityEvaluator> evaluator(new PerplexityEvaluator(model, window, batch, backend, access));
  KTG_ASSIGN_OR_RETURN(evaluator->stream_, backend.create_stream());
  KTG_ASSIGN_OR_RETURN(Buffer buffer, backend.allocate(bytes, "evaluation"));
  KTG_ASSIGN_OR_RETURN(evaluator->sums_, backend.allocate_host(sizeof(LossSums), "evaluation's sums"));
  evaluator->arena_ = std::make_unique<Arena>(std::move(buffer));
  KTG_ASSIGN_OR_RETURN(evaluator->model_,
                       Transformer::create(model, transformer, backend, *evaluator->arena_, *evaluator->stream_));
  evaluator->inputs_ = static_cast<int32_t*>(evaluator->arena_->take(N * 4));
  evaluator->targets_ = static_cast<int32_t*>(evaluator->arena_->take(N * 4));
  return evaluator;
}

Result<LossSums> PerplexityEvaluator::evaluate(std::span<const int32_t> tokens) {
  const int64_t num_tokens = static_cast<int64_t>(tokens.size());
  if (num_tokens < 2) {
    return invalid_argument("the text has " + std::to_string(num_tokens) +
                            " tokens: 2 are needed, one to go on from and one to predict");
  }
  for (int64_t i = 0; i < num_tokens; ++i) {
    if (tokens[i] < 0 || tokens[i] >= model_config_.vocab_size) {
      return invalid_argument("token " + std::to_string(i) + " of the text is id " + std::to_string(tokens[i]) +
                              ": the vocabulary has ids 0 to " + std::to_string(model_config_.vocab_size - 1));
    }
  }
  LossSums total;
  const int64_t num_full = (num_tokens - 1) / window_, tail = (num_tokens - 1) % window_;
  for (int64_t first = 0; first < num_full; first += batch_) {
    KTG_RETURN_IF_ERROR(add_windows(tokens, first, std::min(batch_, num_full - first), window_, total));
  }
  if (tail > 0) KTG_RETURN_IF_ERROR(add_windows(tokens, num_full, 1, tail, total));
  if (!std::isfinite(total.loss)) {
    return failed_precondition("the loss is " + std::to_string(total.loss) +
                               ": the weights or the computation are broken");
  }
  return total;
}

Status PerplexityEvaluator::add_windows(std::span<const int32_t> tokens, int64_t first, int64_t count, int64_t T,
                                        LossSums& total) {
  // Neighbouring windows lie behind each other, so inputs and targets are two runs of the text.
  const int32_t* begin = tokens.data() + first * window_;
  KTG_RETURN_IF_ERROR(backend_.copy(inputs_, begin, count * T * 4, *stream_));
  KTG_RETURN_IF_ERROR(backend_.copy(targets_, begin + 1, count * T * 4, *stream_));
  LossSums& sums = *sums_.as<LossSums>();
  KTG_RETURN_IF_ERROR(model_->forward_loss({inputs_, targets_, count, T}, access_, &sums, *stream_));
  KTG_RETURN_IF_ERROR(stream_->synchronize(Deadline::never()));  // only queued kernels, which end
  total.loss += sums.loss;
  total.num_tokens += sums.num_tokens;
  return ok_status();
}

}  // namespace kintsugi::runtime
