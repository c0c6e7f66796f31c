// What every command of `infer` begins with: find a checkpoint, load its weights (and nothing else of it), make its
// tokenizer and a backend. Training may go on beside it: a checkpoint that rotation removes while it is being
// read is said to have gone, and the next one is taken.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "runtime/backend.h"
#include "runtime/base/file_system.h"
#include "runtime/data/tokenizer.h"
#include "runtime/model/model_weights.h"

namespace kintsugi::launch {

// The checkpoints that `path` means: a step's folder itself, or those of a run's folder, newest first, written by any
// number of ranks. Never empty: kNotFound says what was looked for. Folders passed over are named in `skipped`.
Result<std::vector<checkpoint::CheckpointInfo>> find_checkpoints(FileSystem& fs, const std::string& path,
                                                                 std::vector<std::string>* skipped);

struct InferenceModelOptions {
  std::string path;             // a run's folder or a checkpoint's
  std::string dtype = "";       // "fp32", "bf16"; empty: as the run was trained
  int num_threads = 0;          // of the CPU; 0: one for each usable core
  std::string device = "auto";  // "cpu", "cuda"; "auto": the GPU where there is one
};

// Owner of the weights on the backend. Move-only by unique_ptr: `weights` refers to `params`.
struct InferenceModel {
  checkpoint::CheckpointInfo checkpoint;
  int64_t trained_seq_len = 0;  // T of training; the model's max_seq_len when the checkpoint does not say
  kernels::DType dtype = kernels::DType::kF32;
  std::unique_ptr<runtime::Backend> backend;
  std::unique_ptr<runtime::ParamTable> params;
  runtime::ModelWeights weights;
  std::unique_ptr<runtime::Tokenizer> tokenizer;  // null: the checkpoint names none

  const runtime::ModelConfig& config() const { return checkpoint.meta.model; }
  // "step 50 of /run/checkpoint/step-50: llama, 4 layers, 3,344,640 parameters, vocabulary 256, fp32; cpu (...)"
  std::string description() const;
};

// kInvalidArgument for another word than those above, kFailedPrecondition where "cuda" cannot be had: with the cure.
Result<std::unique_ptr<runtime::Backend>> create_inference_backend(const std::string& device, int num_threads);

// Loads the newest checkpoint that can be read: when rotation takes one away meanwhile, the newest is looked for again;
// when one is damaged, the one before it is taken. What happened on the way goes to `notes`, one line each.
Result<std::unique_ptr<InferenceModel>> load_model(FileSystem& fs, const InferenceModelOptions& options,
                                                   std::vector<std::string>* notes);

// Writes notes to stderr, the first few of them.
void print_notes(const std::vector<std::string>& notes);

// 1234567 as "1,234,567".
std::string grouped(int64_t number);
// 13107200 as "12.5 MiB".
std::string bytes_text(int64_t bytes);

}  // namespace kintsugi::launch
