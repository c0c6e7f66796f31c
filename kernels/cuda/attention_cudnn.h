// Attention in bf16 by cuDNN's graph API. A graph is built once for each shape and kept: 0.1 s, or 1 s where the driver
// has not compiled its kernels before, so begin_cudnn_attention() has it done beside whatever a run begins with. Of the
// forward passes without lse, which serve prompts of any length, a few hundred are kept; they must not be recorded into
// graphs that outlive them. Internal to kernels/cuda; attention.cc falls back to the plain kernels where these say
// kNotSupported. In a build without cuDNN (attention_no_cudnn.cc) they always do.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "kernels/attention.h"
#include "kernels/cuda/attention_table.h"

namespace kintsugi::kernels::cuda {

enum class AttentionPass : uint8_t { kForwardWithLse, kForward, kBackward };

// Whether the shape is cuDNN's (attention.cc): where not, nothing is built for it, timed or run.
bool cudnn_serves(const AttentionShape& shape, DType dtype);

// Begins to build the pass on a thread of its own and returns; whoever needs it first waits for it. `compared`: with
// all the plans that tune_attention() compares, unless the table in use has chosen one. Of the shape's document_starts
// and document_mask only whether they are null matters. Nothing before init_libraries().
void begin_cudnn_attention(const AttentionShape& shape, AttentionPass pass, bool compared);
// Until no thread builds, before the device is left, or for so long; whether none builds.
bool wait_for_cudnn_attention(std::chrono::milliseconds limit);

// Built now, or waited for. kNotSupported: no graph serves the shape, and cudnn_attention_why_not() says why. Blocks;
// allocates no device memory beyond the library's own, the first time.
KernelError cudnn_attention_prepare(const AttentionShape& shape, AttentionPass pass);
// Empty when the shape's graph was built or not asked for yet.
std::string cudnn_attention_why_not(const AttentionShape& shape, AttentionPass pass);
// What the built graph needs; -1 when there is none. The forward passes use the stream's scratch (library_handles.h).
int64_t cudnn_attention_scratch_bytes(const AttentionShape& shape, AttentionPass pass);

// All plans that cuDNN has for the shape, the one that it prefers first, timed on the operands (those of
// kernels/attention.h in the order q, k, v, o, lse, d_o, dq, dk, dv; a forward pass takes the first four or five).
// Plans that want more than workspace_bytes are named with -1. Blocks, for seconds. Empty in a build without cuDNN.
struct CudnnPlanTime {
  std::string name;
  int64_t workspace_bytes;
  double microseconds;
};
std::vector<CudnnPlanTime> time_cudnn_attention_plans(const AttentionShape& shape, AttentionPass pass,
                                                      std::vector<void*> operands, void* workspace,
                                                      int64_t workspace_bytes, StreamHandle stream);

// Times the plans of the shape's training passes, those of the preferred one's engine (others were 1.5 to 2 times
// slower wherever they were tried, and take up to a second to compile), on random numbers in `scratch`, and puts the
// fastest into `table`. Some milliseconds, and however long the plans take to build. A pass that has an entry, that
// cuDNN does not serve, or whose operands do not fit into scratch_bytes, gets none. Only for q, k and v packed in one
// buffer, and without documents: with a mask the library's own choice stays. An empty table (of this machine) comes
// from attention_table_here().
AttentionTable attention_table_here();
KernelError tune_attention(AttentionTable* table, const AttentionShape& shape, void* scratch, int64_t scratch_bytes,
                           StreamHandle stream);
// From here on graphs take the table's plans; the forward pass without lse takes the same as that with it, so that both
// give the same bits. False, and nothing changes, when the table was made on another GPU or by another version of
// cuDNN: *why says which. Before the first call of the shapes.
bool use_attention_table(const AttentionTable& table, std::string* why);

// As kernels/attention.h has them.
KernelError cudnn_attention_forward(void* o, float* lse, const void* q, const void* k, const void* v,
                                    const AttentionShape& shape, StreamHandle stream);
KernelError cudnn_attention_backward(void* dq, void* dk, void* dv, const void* d_o, const void* o, const float* lse,
                                     const void* q, const void* k, const void* v, const AttentionShape& shape,
                                     void* workspace, StreamHandle stream);
// By arithmetic, without a device: at least what any graph of the backward pass asks for; a graph that asks for more is
// not used. 0 in a build without cuDNN.
int64_t cudnn_attention_workspace_bound(const AttentionShape& shape);

// Of the mask (attention_documents.h) by which documents packed in a sequence are kept apart. cuDNN 9.14 can also take
// them as sequences of their own (ragged offsets), but its backward pass that repeats itself then wants 2 H T T bytes
// for each document that there may be. 0 in a build without cuDNN.
int64_t cudnn_document_mask_bytes(const AttentionShape& shape);

// "cuDNN 9.14.0"; empty in a build without it.
const char* cudnn_version();

}  // namespace kintsugi::kernels::cuda
