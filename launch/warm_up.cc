#include "launch/warm_up.h"

#include <algorithm>
#include <vector>

namespace kintsugi::launch {
namespace {

// The same scratch for every unit.
class ScratchAccess final : public runtime::UnitAccess {
 public:
  ScratchAccess(const float* weights, float* gradients) : weights_(weights), gradients_(gradients) {}
  // Zero in fp32 is zero in every narrower type, too.
  Result<Weights> acquire(int, runtime::Stream&) override { return Weights{weights_, weights_}; }
  Status release(int, runtime::Stream&) override { return ok_status(); }
  Result<Gradients> gradients(int, runtime::Stream&) override { return Gradients{gradients_, false}; }
  Status gradients_ready(int, runtime::Stream&) override { return ok_status(); }

 private:
  const float* weights_;
  float* gradients_;
};

}  // namespace

Status warm_up(runtime::Transformer& model, runtime::Backend& backend, int64_t B, int64_t T, bool documents,
               runtime::Stream& stream) {
  int64_t longest = 0;
  for (const runtime::UnitInfo& unit : model.params().units()) longest = std::max(longest, unit.length);
  const int64_t bytes = longest * static_cast<int64_t>(sizeof(float));
  KTG_ASSIGN_OR_RETURN(const runtime::Buffer weights, backend.allocate(bytes, "warm-up weights"));
  KTG_ASSIGN_OR_RETURN(const runtime::Buffer gradients, backend.allocate(bytes, "warm-up gradients"));
  KTG_RETURN_IF_ERROR(backend.zero(weights.data(), bytes, stream));
  KTG_RETURN_IF_ERROR(backend.zero(gradients.data(), bytes, stream));
  ScratchAccess access(weights.as<float>(), gradients.as<float>());
  const int64_t token_bytes = B * T * static_cast<int64_t>(sizeof(int32_t));
  KTG_ASSIGN_OR_RETURN(const runtime::Buffer tokens, backend.allocate(token_bytes, "warm-up tokens"));
  KTG_ASSIGN_OR_RETURN(const runtime::Buffer sums, backend.allocate(sizeof(runtime::LossSums), "warm-up sums"));
  KTG_RETURN_IF_ERROR(backend.zero(tokens.data(), token_bytes, stream));
  const auto* ids = tokens.as<int32_t>();
  // One document a sequence, from 0 on, with position 0 for all: zeros serve as these arrays, too.
  const int32_t* const marks = documents ? ids : nullptr;
  KTG_RETURN_IF_ERROR(model.forward_backward(
      {.inputs = ids, .targets = ids, .B = B, .T = T, .document_starts = marks, .positions = marks}, access,
      sums.as<runtime::LossSums>(), stream));
  return stream.synchronize(Deadline::after(std::chrono::minutes(2)));
}

}  // namespace kintsugi::launch
