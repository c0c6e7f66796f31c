// The whole configuration of a run: one TOML file, one struct per component, one table of keys.
// Paths in the file start at the file's folder, paths given by --set at the working folder; both are absolute
// afterwards.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "comm/communicator.h"
#include "launch/fault_plan.h"
#include "parallel/batch_layout.h"
#include "parallel/parallel_config.h"
#include "parallel/state_memory.h"
#include "runtime/base/config_table.h"
#include "runtime/data/dataset.h"
#include "runtime/model/model_config.h"
#include "runtime/model/transformer.h"
#include "runtime/optim/schedule.h"

namespace kintsugi::launch {

struct TrainingConfig {
  int64_t steps = 100;             // optimizer steps of the whole run; a resumed run goes on to this number
  int64_t schedule_steps = 0;      // steps that the learning-rate curve spans; 0: `steps`
  int64_t seed = 1;                // of initial weights and of the order of samples
  std::string dtype = "fp32";      // activations and matmul operands; master weights and moments are fp32 always
  int64_t seq_len = 256;           // T
  int64_t global_batch_size = 8;   // sequences of a step, all ranks together
  int64_t micro_batch_size = 0;    // sequences of one forward and backward; 0: a rank's whole share
  bool deterministic = true;       // no kernel whose result differs from run to run
  std::string recompute = "none";  // what backward computes again instead of keeping: "none",
                                   // "norms_and_activations", "attention", "block"; more of it, less memory
  bool tune_thoroughly = false;    // and under a load that lasts: some 10 s, once a machine and shape
  bool tune = true;                // on a GPU, choose the matrix products' algorithms by timing them once a run
  bool debug_nan = false;          // look for what is not finite in every layer; a skipped step's first one is named
  bool cuda_graphs = true;         // launch recorded steps; off: every kernel by itself
  int64_t eval_every = 0;          // steps between validation losses (the last step's too); 0: never
  int64_t eval_samples = 64;       // sequences of a validation loss; 0: all there are

  int64_t horizon() const { return schedule_steps == 0 ? steps : schedule_steps; }
  Status validate() const;
};

struct RecoveryConfig {
  int64_t spares = 1;           // warm processes an agent keeps ready
  std::string source = "auto";  // lost state from "peer", from the newest "checkpoint", or "auto": nearest first
  // Sharded modes: steps between snapshots of a rank's state in its agent's memory, to which all ranks go back when a
  // state is lost; checkpoint steps are such, too. At 10 a death costs five repeated steps on average and nine at most,
  // and the copies, a tenth of 12 bytes a parameter and shard each step, stay below a hundredth of a step.
  int64_t snapshot_every = 10;
  int64_t max_restarts = 3;           // deaths of one rank at one step that end the job
  int64_t hang_timeout_ms = 300'000;  // a rank without progress for so long is killed and replaced; 0: never
  int64_t ack_timeout_ms = 10'000;    // a survivor that does not say that it stopped within this counts as dead
  Status validate() const;
};

struct MetricsConfig {
  bool tensorboard = false;          // event files in <out>/tensorboard
  int64_t console_every = 1;         // steps between progress lines
  double peak_tflops = 0;            // of all ranks together, for mfu; 0: mfu is not shown
  std::vector<int64_t> trace_steps;  // steps whose timeline goes to <out>/trace as Chrome trace JSON
  Status validate() const;
};

struct LogOptions {
  std::string level = "info";  // of <out>/log/rank-<r>.log
};

void describe(ConfigTable& table, TrainingConfig& config);
void describe(ConfigTable& table, RecoveryConfig& config);
void describe(ConfigTable& table, MetricsConfig& config);
void describe(ConfigTable& table, LogOptions& config);

struct RunConfig {
  std::string device = "auto";  // "cpu", "cuda", or "auto": a GPU where the program and the machine have one
  TrainingConfig training;
  runtime::DataConfig data;
  runtime::ModelConfig model;
  runtime::OptimizerConfig optimizer;
  runtime::SchedulerConfig lr_scheduler;
  parallel::ParallelConfig parallelism;
  comm::CommConfig comm;
  checkpoint::CheckpointConfig checkpoint;
  RecoveryConfig recovery;
  FaultConfig fault;
  MetricsConfig metrics;
  LogOptions log;

  // Reads `path` (empty: defaults), then applies each "key=value". kInvalidArgument / kNotFound name file, line and
  // key. A vocabulary of 0 is resolved from the tokenizer or the data.
  static Result<RunConfig> load(const std::string& path, const std::vector<std::string>& sets);
  // The same for text that to_toml() wrote: worker processes and checkpoints. No path is touched.
  static Result<RunConfig> parse(const std::string& toml, const std::string& origin);

  // Everything that can be refused before memory is taken or a file is written, for this number of ranks.
  Status validate(int world_size) const;
  Result<parallel::BatchLayout> batch_layout(int rank, int world_size) const;
  // Turns device "auto" into "cuda" or "cpu". kInvalidArgument when "cuda" is asked for and cannot be. Looks for device
  // files only, because agents stay free of the driver; the worker finds out whether it works.
  Status resolve_device();
  // The same by what it found.
  Status resolve_device(bool built_with_cuda, bool has_driver);
  bool on_cuda() const { return device == "cuda"; }
  // For calls of at most `max_tokens` tokens. validate() holds.
  bool separates_documents() const { return !data.document_separator.empty(); }
  runtime::TransformerOptions transformer_options(int64_t max_tokens) const;
  parallel::StateTypes state_types() const { return {.compute = dtype(), .moments = moments()}; }
  parallel::MomentsOptions moments() const { return {.dtype = optimizer.moments(), .on_host = optimizer.offload}; }
  kernels::DType dtype() const { return kernels::dtype_named(training.dtype); }

  std::string to_toml() const;
  // Every key with default, meaning and allowed values.
  static std::string help();
};

// Binds every component's keys.
void describe(ConfigTable& table, RunConfig& config);

}  // namespace kintsugi::launch
