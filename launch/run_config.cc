#include "launch/run_config.h"

#include <fmt/format.h>

#include <filesystem>

#include "parallel/fully_sharded.h"
#include "parallel/mesh.h"
#include "runtime/base/file_system.h"
#include "runtime/cuda/cuda_backend.h"
#include "runtime/data/tokenizer.h"

namespace kintsugi::launch {
namespace {

// Relative paths start at `base`, which is absolute.
void resolve_path(std::string& path, const std::string& base) {
  if (!path.empty()) path = std::filesystem::path(join_path(base, path)).lexically_normal().string();
}

void resolve_paths(RunConfig& config, const std::string& base) {
  for (std::string& path : config.data.train) resolve_path(path, base);
  for (std::string& path : config.data.validation) resolve_path(path, base);
  if (config.data.tokenizer != "bytes") resolve_path(config.data.tokenizer, base);
  resolve_path(config.comm.tuning_file, base);
}

Result<std::string> absolute(const std::string& path) {
  std::error_code error;
  const std::filesystem::path result = std::filesystem::absolute(path, error);
  if (error) return status_from_errno(error.value(), "working folder of " + path);
  return result.lexically_normal().string();
}

Status resolve_vocabulary(RunConfig& config) {
  if (config.model.vocab_size != 0) return ok_status();
  if (config.data.tokenizer != "bytes") {
    KTG_ASSIGN_OR_RETURN(const auto tokenizer, runtime::create_tokenizer(config.data.tokenizer));
    config.model.vocab_size = tokenizer->vocab_size();
  } else {
    KTG_ASSIGN_OR_RETURN(const auto dataset,
                         runtime::open_dataset(config.data.train, config.data, config.training.seq_len,
                                               static_cast<uint64_t>(config.training.seed), 0));
    config.model.vocab_size = dataset->vocab_size();
  }
  if (config.model.vocab_size > 0) return ok_status();
  return invalid_argument("model.vocab_size = 0: the data do not say how many ids there are; give the number");
}

// Far above what any rank holds of a micro-step, far below where bytes overflow.
constexpr double kMaxActivations = 1e15;

Status at_least(const char* key, int64_t value, int64_t least) {
  if (value >= least) return ok_status();
  return invalid_argument(fmt::format("{} = {}: must be at least {}", key, value, least));
}

}  // namespace

Status TrainingConfig::validate() const {
  KTG_RETURN_IF_ERROR(at_least("training.steps", steps, 1));
  KTG_RETURN_IF_ERROR(at_least("training.schedule_steps", schedule_steps, 0));
  KTG_RETURN_IF_ERROR(at_least("training.seq_len", seq_len, 1));
  KTG_RETURN_IF_ERROR(at_least("training.global_batch_size", global_batch_size, 1));
  KTG_RETURN_IF_ERROR(at_least("training.micro_batch_size", micro_batch_size, 0));
  KTG_RETURN_IF_ERROR(at_least("training.eval_every", eval_every, 0));
  const Result<runtime::Recompute> known = runtime::parse_recompute(recompute);
  KTG_RETURN_IF_ERROR(known.ok() ? ok_status() : known.status().with_context("training"));
  return at_least("training.eval_samples", eval_samples, 0);
}

Status RecoveryConfig::validate() const {
  KTG_RETURN_IF_ERROR(at_least("recovery.spares", spares, 0));
  KTG_RETURN_IF_ERROR(at_least("recovery.snapshot_every", snapshot_every, 0));
  KTG_RETURN_IF_ERROR(at_least("recovery.max_restarts", max_restarts, 1));
  KTG_RETURN_IF_ERROR(at_least("recovery.hang_timeout_ms", hang_timeout_ms, 0));
  return at_least("recovery.ack_timeout_ms", ack_timeout_ms, 1);
}

Status MetricsConfig::validate() const {
  KTG_RETURN_IF_ERROR(at_least("metrics.console_every", console_every, 1));
  if (!(peak_tflops >= 0)) {
    return invalid_argument(fmt::format("metrics.peak_tflops = {}: must not be negative", peak_tflops));
  }
  for (const int64_t step : trace_steps) KTG_RETURN_IF_ERROR(at_least("metrics.trace_steps", step, 1));
  return ok_status();
}

void describe(ConfigTable& table, TrainingConfig& config) {
  table.add("training.steps", &config.steps, "optimizer steps of the whole run; --resume goes on to this number");
  table.add("training.schedule_steps", &config.schedule_steps,
            "steps that the learning-rate curve spans; 0: training.steps");
  table.add("training.seed", &config.seed, "of the initial weights and of the order of samples");
  table.add("training.dtype", &config.dtype, "of activations and matrix products; master weights are fp32 always",
            {"fp32", "bf16"});
  table.add("training.seq_len", &config.seq_len, "tokens of a sequence");
  table.add("training.global_batch_size", &config.global_batch_size, "sequences of a step, all ranks together");
  table.add(
      "training.micro_batch_size", &config.micro_batch_size,
      "sequences of one forward and backward; 0: a rank's whole share. Fixed order runs one virtual shard instead");
  table.add("training.deterministic", &config.deterministic, "use no kernel whose result differs from run to run");
  table.add("training.recompute", &config.recompute,
            "what backward computes again instead of keeping it: less memory, the same bits",
            {"none", "norms_and_activations", "attention", "block"});
  table.add("training.tune_thoroughly", &config.tune_thoroughly,
            "on a GPU, compare algorithms under a load that lasts, too: some 10 s, once a machine and shape; for GPUs "
            "that run at their power limit");
  table.add("training.tune", &config.tune,
            "on a GPU, choose the algorithms of matrix products by timing them once, when a run begins");
  table.add("training.debug_nan", &config.debug_nan,
            "look at every layer's numbers, and name the first that is not finite when a step is skipped (slower)");
  table.add("training.cuda_graphs", &config.cuda_graphs,
            "on a GPU, launch whole recorded steps; off: kernel by kernel");
  table.add("training.eval_every", &config.eval_every, "steps between validation losses; 0: never");
  table.add("training.eval_samples", &config.eval_samples, "sequences of a validation loss; 0: all there are");
}

void describe(ConfigTable& table, RecoveryConfig& config) {
  table.add("recovery.spares", &config.spares, "warm processes that each agent keeps ready for its rank");
  table.add("recovery.source", &config.source,
            "where lost state comes from; auto: a live peer, else snapshots in memory, else the newest checkpoint, "
            "else step 0",
            {"auto", "peer", "checkpoint"});
  table.add(
      "recovery.snapshot_every", &config.snapshot_every,
      "zero1 to zero3: steps between snapshots in host memory, to which all go back when a shard is lost; 0: none "
      "but those of checkpoints");
  table.add("recovery.max_restarts", &config.max_restarts, "deaths of one rank at one step that end the job");
  table.add("recovery.hang_timeout_ms", &config.hang_timeout_ms,
            "a rank that makes no progress for so long is killed and replaced; 0: never");
  table.add("recovery.ack_timeout_ms", &config.ack_timeout_ms,
            "a survivor that does not report within this time after a death counts as dead, too");
}

void describe(ConfigTable& table, MetricsConfig& config) {
  table.add("metrics.tensorboard", &config.tensorboard, "write TensorBoard event files to <out>/tensorboard");
  table.add("metrics.console_every", &config.console_every, "steps between progress lines");
  table.add("metrics.peak_tflops", &config.peak_tflops, "peak of all ranks together, for mfu; 0: mfu is not shown");
  table.add("metrics.trace_steps", &config.trace_steps, "steps whose timeline goes to <out>/trace (Chrome trace JSON)");
}

void describe(ConfigTable& table, LogOptions& config) {
  table.add("log.level", &config.level, "of <out>/log/rank-<r>.log", {"trace", "debug", "info", "warn", "error"});
}

void describe(ConfigTable& table, RunConfig& config) {
  table.add("device", &config.device, "auto: a GPU where the program was built with CUDA and the machine has one",
            {"auto", "cpu", "cuda"});
  describe(table, config.training);
  runtime::describe(table, config.data);
  runtime::describe(table, config.model);
  runtime::describe(table, config.optimizer);
  runtime::describe(table, config.lr_scheduler);
  parallel::describe(table, config.parallelism);
  comm::describe(table, config.comm);
  checkpoint::describe(table, config.checkpoint);
  describe(table, config.recovery);
  describe(table, config.fault);
  describe(table, config.metrics);
  describe(table, config.log);
}

Result<RunConfig> RunConfig::load(const std::string& path, const std::vector<std::string>& sets) {
  RunConfig config;
  ConfigTable table;
  describe(table, config);
  if (!path.empty()) {
    KTG_RETURN_IF_ERROR(table.load_file(path));
    KTG_ASSIGN_OR_RETURN(const std::string file, absolute(path));
    resolve_paths(config, std::filesystem::path(file).parent_path().string());
  }
  for (const std::string& assignment : sets) KTG_RETURN_IF_ERROR(table.set(assignment));
  KTG_ASSIGN_OR_RETURN(const std::string here, absolute("."));
  resolve_paths(config, here);
  KTG_RETURN_IF_ERROR(resolve_vocabulary(config));
  return config;
}

Result<RunConfig> RunConfig::parse(const std::string& toml, const std::string& origin) {
  RunConfig config;
  ConfigTable table;
  describe(table, config);
  KTG_RETURN_IF_ERROR(table.load_text(toml, origin));
  return config;
}

Status RunConfig::validate(int world_size) const {
  KTG_RETURN_IF_ERROR(training.validate());
  KTG_RETURN_IF_ERROR(model.validate());
  KTG_RETURN_IF_ERROR(optimizer.validate());
  KTG_RETURN_IF_ERROR(lr_scheduler.validate(training.horizon()));
  KTG_RETURN_IF_ERROR(comm.validate());
  KTG_RETURN_IF_ERROR(checkpoint.validate());
  KTG_RETURN_IF_ERROR(recovery.validate());
  KTG_RETURN_IF_ERROR(metrics.validate());
  KTG_ASSIGN_OR_RETURN(const std::vector<FaultEntry> faults, fault.entries(world_size));
  for (const FaultEntry& entry : faults) {
    if (entry.by_device && device == "cpu")
      return invalid_argument("fault.kill: by = \"device\" needs device = \"cuda\"");
  }
  if (training.seq_len > model.max_seq_len) {
    return invalid_argument(fmt::format("training.seq_len = {}: model.max_seq_len = {} is the longest the model takes",
                                        training.seq_len, model.max_seq_len));
  }
  if (optimizer.offload && device == "cpu") {
    return invalid_argument(
        "optimizer.offload = true: on the CPU the moments lie in host memory already; it is for device = \"cuda\"");
  }
  if (data.train.empty()) return invalid_argument("data.train = []: name at least one file or folder");
  if (training.eval_every > 0 && data.validation.empty()) {
    return invalid_argument(
        fmt::format("training.eval_every = {}: data.validation names no file", training.eval_every));
  }
  if (!parallelism.keep_after_forward.empty()) {
    KTG_RETURN_IF_ERROR(parallel::check_unit_names(runtime::ParamTable::build(model), parallelism));
  }
  KTG_ASSIGN_OR_RETURN([[maybe_unused]] const parallel::Mesh mesh, parallel::Mesh::of_run(parallelism, world_size));
  KTG_ASSIGN_OR_RETURN(const parallel::BatchLayout layout, batch_layout(0, world_size));
  // In double, which cannot overflow: sizes that are allowed one by one can still multiply to nonsense.
  const double widths =
      static_cast<double>(model.vocab_size) +
      static_cast<double>(model.num_layers) *
          static_cast<double>(8 * model.dim + 4 * model.num_heads * model.head_size() + 4 * model.ffn_dim);
  const double activations = static_cast<double>(layout.micro_batch) * static_cast<double>(training.seq_len) * widths;
  if (activations > kMaxActivations) {
    return invalid_argument(fmt::format(
        "training.global_batch_size = {}, training.seq_len = {}: about {:.3g} activations in a micro-step of "
        "{} sequences, at most {:.3g}",
        training.global_batch_size, training.seq_len, activations, layout.micro_batch, kMaxActivations));
  }
  return ok_status();
}

Result<parallel::BatchLayout> RunConfig::batch_layout(int rank, int world_size) const {
  return parallel::plan_batch(training.global_batch_size, training.micro_batch_size, parallelism, rank, world_size);
}

Status RunConfig::resolve_device() {
  std::error_code ignored;
  return resolve_device(runtime::built_with_cuda(), std::filesystem::exists("/dev/nvidiactl", ignored) ||
                                                        std::filesystem::exists("/dev/dxg", ignored));
}

Status RunConfig::resolve_device(bool built_with_cuda, bool has_driver) {
  if (device == "cpu") return ok_status();
  if (device == "auto") {
    device = built_with_cuda && has_driver ? "cuda" : "cpu";
    return ok_status();
  }
  if (!built_with_cuda) {
    return invalid_argument(
        "device = \"cuda\": this program was built without CUDA (cmake --preset cuda-release builds one with it); "
        "\"cpu\" trains without a GPU");
  }
  if (!has_driver) {
    return invalid_argument(
        "device = \"cuda\": no NVIDIA driver is loaded here (there is no /dev/nvidiactl); \"cpu\" trains without a "
        "GPU");
  }
  return ok_status();
}

runtime::TransformerOptions RunConfig::transformer_options(int64_t max_tokens) const {
  return {.dtype = dtype(),
          .max_tokens = max_tokens,
          .max_seq_len = training.seq_len,
          .training = true,
          .one_length = true,
          .recompute = runtime::parse_recompute(training.recompute).value(),
          .deterministic = training.deterministic,
          .documents = separates_documents()};
}

std::string RunConfig::to_toml() const {
  RunConfig copy = *this;
  ConfigTable table;
  describe(table, copy);
  return table.to_toml();
}

std::string RunConfig::help() {
  RunConfig defaults;
  ConfigTable table;
  describe(table, defaults);
  return table.help();
}

}  // namespace kintsugi::launch
