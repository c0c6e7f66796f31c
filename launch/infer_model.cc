#include "launch/infer_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <set>

#include "launch/run_config.h"
#include "runtime/cuda/cuda_backend.h"
#include "runtime/model/transformer.h"

namespace kintsugi::launch {
namespace {

using checkpoint::CheckpointInfo;

constexpr int kMaxAttempts = 10;  // a trainer that saves faster than this reads never lets it finish

constexpr const char* kManifest = "manifest.json";

// To a device piece by piece, so that the host never holds them all.
Status load_through_host(FileSystem& fs, InferenceModel& model) {
  constexpr int64_t kPiece = int64_t{16} << 20;  // elements: 64 MiB
  const int64_t length = model.params->total_length(), most = std::min(length, kPiece);
  KTG_ASSIGN_OR_RETURN(const runtime::Buffer host, model.backend->allocate_host(most * 4, "weights on their way"));
  KTG_ASSIGN_OR_RETURN(const std::unique_ptr<runtime::Stream> stream, model.backend->create_stream());
  for (int64_t at = 0; at < length; at += kPiece) {
    const int64_t count = std::min(kPiece, length - at);
    KTG_RETURN_IF_ERROR(
        checkpoint::load_state(fs, model.checkpoint, *model.params, host.as<float>(), nullptr, nullptr, {at, count}));
    KTG_RETURN_IF_ERROR(model.backend->copy(model.weights.master.as<float>() + at, host.data(), count * 4, *stream));
    KTG_RETURN_IF_ERROR(stream->synchronize(Deadline::never()));  // one copy, which ends
  }
  return ok_status();
}

Status load_weights(FileSystem& fs, InferenceModel& model) {
  KTG_ASSIGN_OR_RETURN(model.weights, runtime::ModelWeights::allocate(*model.params, model.dtype, *model.backend));
  if (model.backend->kind() == runtime::DeviceKind::kCpu) {
    KTG_RETURN_IF_ERROR(checkpoint::load_state(fs, model.checkpoint, *model.params, model.weights.master.as<float>(),
                                               nullptr, nullptr, {0, model.params->total_length()}));
  } else {
    KTG_RETURN_IF_ERROR(load_through_host(fs, model));
  }
  KTG_ASSIGN_OR_RETURN(const std::unique_ptr<runtime::Stream> stream, model.backend->create_stream());
  return model.weights.changed(*model.backend, *stream);
}

Result<std::unique_ptr<InferenceModel>> load_checkpoint(FileSystem& fs, CheckpointInfo info,
                                                        const InferenceModelOptions& options,
                                                        std::vector<std::string>* notes) {
  auto model = std::make_unique<InferenceModel>();
  model->checkpoint = std::move(info);
  const checkpoint::CheckpointMeta& meta = model->checkpoint.meta;
  KTG_RETURN_IF_ERROR(meta.model.validate().ok() ? ok_status()
                                                 : meta.model.validate().with_context(model->checkpoint.dir));
  std::string dtype = options.dtype;
  const Result<RunConfig> run = RunConfig::parse(meta.config_toml, model->checkpoint.dir);
  if (run.ok()) {
    if (dtype.empty()) dtype = run->training.dtype;
    model->trained_seq_len = run->training.seq_len;
  } else {
    notes->push_back(fmt::format("the run's configuration is not read ({}); computing in {}", run.status().to_string(),
                                 dtype.empty() ? "fp32" : dtype));
  }
  if (model->trained_seq_len < 1 || model->trained_seq_len > meta.model.max_seq_len) {
    model->trained_seq_len = meta.model.max_seq_len;
  }
  model->dtype = kernels::dtype_named(dtype);
  KTG_ASSIGN_OR_RETURN(model->backend, create_inference_backend(options.device, options.num_threads));
  model->params = std::make_unique<runtime::ParamTable>(runtime::ParamTable::build(meta.model));
  KTG_RETURN_IF_ERROR(load_weights(fs, *model));
  if (!meta.tokenizer.empty()) {
    Result<std::unique_ptr<runtime::Tokenizer>> tokenizer = runtime::create_tokenizer(meta.tokenizer);
    if (!tokenizer.ok()) return tokenizer.status().with_context("tokenizer of " + model->checkpoint.dir);
    model->tokenizer = std::move(tokenizer).value();
  }
  return model;
}

}  // namespace

Result<std::unique_ptr<runtime::Backend>> create_inference_backend(const std::string& device, int num_threads) {
  if (device != "auto" && device != "cpu" && device != "cuda") {
    return invalid_argument("device = \"" + device + "\": must be auto, cpu or cuda");
  }
  if (device == "cuda" || (device == "auto" && runtime::count_cuda_devices().count > 0)) {
    return runtime::create_cuda_backend({});
  }
  return runtime::create_cpu_backend({.num_threads = num_threads});
}

Result<std::vector<CheckpointInfo>> find_checkpoints(FileSystem& fs, const std::string& path,
                                                     std::vector<std::string>* skipped) {
  if (!fs.exists(path)) return not_found(path + ": no such folder");
  if (fs.exists(join_path(path, kManifest))) {
    Result<CheckpointInfo> info = checkpoint::open_checkpoint(fs, path);
    if (info.ok()) return std::vector<CheckpointInfo>{std::move(info).value()};
    return fs.exists(join_path(path, kManifest)) ? info.status() : not_found(path + ": went away while it was read");
  }
  const std::string below = join_path(path, "checkpoint");
  const std::string dir = fs.exists(below) ? below : path;
  // Rotation may take the only one away between two looks at it; its successor is there by then.
  for (int look = 0; look < kMaxAttempts; ++look) {
    KTG_ASSIGN_OR_RETURN(std::vector<CheckpointInfo> found, checkpoint::list_checkpoints(fs, dir, skipped));
    if (!found.empty()) return found;
  }
  return not_found(fmt::format("{}: no checkpoint; looked for {}/{} and for {}/step-<N>", path, path, kManifest, dir));
}

Result<std::unique_ptr<InferenceModel>> load_model(FileSystem& fs, const InferenceModelOptions& options,
                                                   std::vector<std::string>* notes) {
  std::set<std::string> noted;
  for (int attempt = 1;; ++attempt) {
    std::vector<std::string> skipped;
    const Result<std::vector<CheckpointInfo>> found = find_checkpoints(fs, options.path, &skipped);
    for (const std::string& folder : skipped) {
      if (noted.insert(folder).second) notes->push_back("skipped " + folder);
    }
    if (!found.ok()) return found.status();
    Status last;
    bool look_again = false;
    for (const CheckpointInfo& info : *found) {
      Result<std::unique_ptr<InferenceModel>> model = load_checkpoint(fs, info, options, notes);
      if (model.ok()) return model;
      last = model.status();
      // A removed folder explains any failure to read it.
      look_again = !fs.exists(join_path(info.dir, kManifest)) && attempt < kMaxAttempts;
      if (look_again) {
        notes->push_back(fmt::format("{} went away while it was read: looking for the next", info.dir));
        break;
      }
      if (last.code() != StatusCode::kDataLoss) return last;
      notes->push_back(fmt::format("{} is damaged ({}): trying the one before", info.dir, last.message()));
    }
    if (!look_again) return last;
  }
}

std::string InferenceModel::description() const {
  const runtime::ModelConfig& model = config();
  std::string text = fmt::format("step {} of {}: {}, {} layers, {} parameters, vocabulary {}, {}; {}",
                                 checkpoint.meta.step, checkpoint.dir, model.family, model.num_layers,
                                 grouped(params->num_parameters()), grouped(model.vocab_size), kernels::name_of(dtype),
                                 backend->description());
  if (!backend->asynchronous()) return text;
  const kernels::AttentionShape shape = runtime::attention_shape(model, {}, 1, model.max_seq_len);
  return text + ", attention: " + backend->kernels().attention->library(shape, dtype);
}

void print_notes(const std::vector<std::string>& notes) {
  constexpr size_t kShown = 8;
  for (size_t i = 0; i < std::min(notes.size(), kShown); ++i) std::fprintf(stderr, "infer: %s\n", notes[i].c_str());
  if (notes.size() > kShown) std::fprintf(stderr, "infer: ... and %zu notes more\n", notes.size() - kShown);
}

std::string grouped(int64_t number) {
  std::string digits = std::to_string(number);
  for (int64_t i = static_cast<int64_t>(digits.size()) - 3; i > (number < 0 ? 1 : 0); i -= 3)
    digits.insert(static_cast<size_t>(i), 1, ',');
  return digits;
}

std::string bytes_text(int64_t bytes) {
  if (bytes < 1024) return fmt::format("{} bytes", bytes);
  double value = static_cast<double>(bytes);
  const char* unit = "bytes";
  for (const char* larger : {"KiB", "MiB", "GiB", "TiB"}) {
    if (value < 1024) break;
    value /= 1024;
    unit = larger;
  }
  return fmt::format("{:.1f} {}", value, unit);
}

}  // namespace kintsugi::launch
