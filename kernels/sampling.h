// Draws the next token of each sequence from its logits, and makes it the next decode step's input, so that a step
// needs nothing from the host.
//   S sequences   V vocabulary   P tokens in a kv_block   M block table width   T the logits' type
// The rules are those of runtime/decode/sampler.h: temperature, then top_k, then top_p; of equal logits the lower id
// counts as more probable; the uniform number is Philox's for (seed, kSamplingPurpose, stream, position). So a seed
// gives the same text here and there, except where two sums of probabilities differ by their rounding only.
#pragma once

#include "kernels/types.h"

namespace kintsugi::kernels {

// How one sequence is sampled; in an array of the stream's memory.
struct SequenceSampling {
  double temperature = 0;  // 0: the largest logit
  double top_p = 1;
  int64_t top_k = 0;  // 0: all
  uint64_t seed = 0;
  uint32_t stream = 0;
  uint32_t unused = 0;
};

// The inputs of a decode step, as runtime's DecodeBatch lays them out: what advance() changes.
struct DecodeInputs {
  int32_t* ids;                 // (S): the token that each sequence is fed
  int32_t* positions;           // (S): where it stands
  int32_t* context_lens;        // (S): positions[s] + 1; 0: no sequence in this row
  int64_t* slots;               // (S): where its keys and values go; -1: nowhere
  const int32_t* block_tables;  // (S, M)
};

struct SamplingKernels {
  // ids[s]: the token drawn from logits (S, V) for position positions[s] + 1. When a logit is not finite, -1 - i, where i
  // is the lowest such token. V <= max_vocab(). Reads each logit once.
  KernelError (*sample)(int32_t* ids, const void* logits, const SequenceSampling* sampling, const int32_t* positions,
                        int64_t S, int64_t V, DType dtype, StreamHandle stream);
  // For each row with a sequence: ids[s] = max(drawn[s], 0), one position on, its slot looked up. Rows without one
  // get id 0, position 0, slot -1.
  KernelError (*advance)(const DecodeInputs& inputs, const int32_t* drawn, int64_t S, int64_t kv_block_tokens,
                         int64_t block_table_width, StreamHandle stream);
  int64_t (*max_vocab)();
};

namespace reference { const SamplingKernels& sampling(); }
namespace cpu { const SamplingKernels& sampling(); }  // the reference: the host samples with runtime's Sampler
namespace cuda { const SamplingKernels& sampling(); }

}  // namespace kintsugi::kernels
