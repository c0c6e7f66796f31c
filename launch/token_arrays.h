// The tokens of some sequences as the model wants them: inputs, targets and, where documents are kept apart, where each
// token's document starts and its position in it; one array behind the other, so that one copy takes all to a device.
#pragma once

#include "runtime/data/dataset.h"
#include "runtime/model/transformer.h"

namespace kintsugi::launch {

class TokenArrays {
 public:
  static int64_t bytes(int64_t num_tokens, bool documents) {
    return (documents ? 4 : 2) * num_tokens * static_cast<int64_t>(sizeof(int32_t));
  }
  // Over memory of bytes(num_tokens, documents).
  TokenArrays(int32_t* memory, int64_t num_tokens, bool documents)
      : inputs_(memory), num_tokens_(num_tokens), documents_(documents) {}

  // Fills sequence n of T tokens with a sample. Only in memory of the host.
  void read(int64_t n, const runtime::TokenDataset& data, int64_t sample, int64_t T) const {
    int32_t* const inputs = inputs_ + n * T;
    data.sample(sample, inputs, inputs + num_tokens_);
    if (!documents_) return;
    runtime::mark_documents(inputs, T, data.document_separator(), inputs + 2 * num_tokens_, inputs + 3 * num_tokens_);
  }

  // B sequences from the n-th on.
  runtime::MicroBatch batch(int64_t n, int64_t B, int64_t T) const {
    const int32_t* const inputs = inputs_ + n * T;
    return {.inputs = inputs,
            .targets = inputs + num_tokens_,
            .B = B,
            .T = T,
            .document_starts = documents_ ? inputs + 2 * num_tokens_ : nullptr,
            .positions = documents_ ? inputs + 3 * num_tokens_ : nullptr};
  }

 private:
  int32_t* inputs_;
  int64_t num_tokens_;
  bool documents_;
};

}  // namespace kintsugi::launch
