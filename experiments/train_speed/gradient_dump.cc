// Loss and gradients of one batch of random tokens by our forward and backward, as files for check_gradients.py:
//
//   gradient_dump CONFIG.toml DIR [--set key=value ...] [--cut 37 100 ...]
//
// takes device, model, training.dtype, seq_len, global_batch_size, recompute and seed from the configuration. --cut:
// each sequence holds several documents, of which all but the first begin at these tokens, in ascending order.
// DIR/dump.json: loss (sum over tokens), tokens, tensors (name, shape, offset); DIR/weights.bin, gradients.bin: the
// flat space, fp32; DIR/ids.bin: inputs, then targets, int32 (B, T). Little endian. Some targets are ignored (-1).
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "launch/run_config.h"
#include "runtime/base/file_system.h"
#include "runtime/base/philox.h"
#include "runtime/cuda/cuda_backend.h"
#include "runtime/model/model_weights.h"
#include "runtime/model/transformer.h"

namespace kintsugi {
namespace {

using runtime::Buffer;

struct Batch {
  std::vector<int32_t> inputs, targets, document_starts, positions;
};

Batch random_batch(const launch::RunConfig& config, const std::vector<int32_t>& cuts) {
  const int64_t N = config.training.global_batch_size * config.training.seq_len;
  Batch batch;
  for (int64_t i = 0; i < N; ++i) {
    const auto id = [&](uint64_t stream) {
      const double u = random_uniform(static_cast<uint64_t>(config.training.seed), RandomPurpose::kTest, stream,
                                      static_cast<uint64_t>(i));
      return static_cast<int32_t>(u * static_cast<double>(config.model.vocab_size));
    };
    batch.inputs.push_back(id(0));
    batch.targets.push_back(i % 17 == 5 ? -1 : id(1));
    const auto t = static_cast<int32_t>(i % config.training.seq_len);
    const auto next = std::upper_bound(cuts.begin(), cuts.end(), t);
    batch.document_starts.push_back(next == cuts.begin() ? 0 : *std::prev(next));
    batch.positions.push_back(t - batch.document_starts.back());
  }
  return batch;
}

Status write_floats(const std::string& path, const std::vector<float>& values) {
  return FileSystem::posix().write_file(path,
                                        {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)});
}

Status dump(const launch::RunConfig& config, const std::string& dir, const std::vector<int32_t>& cuts) {
  const Deadline deadline = Deadline::after(std::chrono::seconds(120));
  std::unique_ptr<runtime::Backend> backend;
  if (config.on_cuda()) {
    KTG_ASSIGN_OR_RETURN(backend,
                         runtime::create_cuda_backend({.device = 0, .deterministic = config.training.deterministic}));
  } else {
    backend = runtime::create_cpu_backend({});
  }
  KTG_ASSIGN_OR_RETURN(const auto stream, backend->create_stream());
  const int64_t B = config.training.global_batch_size, T = config.training.seq_len;
  KTG_ASSIGN_OR_RETURN(const runtime::Recompute recompute, runtime::parse_recompute(config.training.recompute));
  const runtime::TransformerOptions options{.dtype = config.dtype(),
                                            .max_tokens = B * T,
                                            .max_seq_len = T,
                                            .recompute = recompute,
                                            .deterministic = config.training.deterministic,
                                            .documents = !cuts.empty()};
  KTG_ASSIGN_OR_RETURN(Buffer memory, backend->allocate(runtime::Transformer::activation_bytes(config.model, options,
                                                                                               backend->kernels()),
                                                        "activations"));
  runtime::Arena arena(std::move(memory));
  KTG_ASSIGN_OR_RETURN(const auto model, runtime::Transformer::create(config.model, options, *backend, arena, *stream));

  const runtime::ParamTable& table = model->params();
  const int64_t n = table.total_length(), bytes = n * static_cast<int64_t>(sizeof(float));
  std::vector<float> weights(static_cast<size_t>(n)), gradients(weights.size());
  runtime::init_parameters(weights.data(), table, static_cast<uint64_t>(config.training.seed), 0, n);
  KTG_ASSIGN_OR_RETURN(runtime::ModelWeights on_device,
                       runtime::ModelWeights::allocate(table, config.dtype(), *backend));
  KTG_ASSIGN_OR_RETURN(const Buffer gradient, backend->allocate(bytes, "gradients"));
  KTG_RETURN_IF_ERROR(backend->copy(on_device.master.data(), weights.data(), bytes, *stream));
  KTG_RETURN_IF_ERROR(backend->zero(gradient.data(), bytes, *stream));
  KTG_RETURN_IF_ERROR(on_device.changed(*backend, *stream));

  // Memory that host and kernels both see: nothing here is timed.
  const Batch batch = random_batch(config, cuts);
  const int64_t ids_bytes = B * T * static_cast<int64_t>(sizeof(int32_t));
  KTG_ASSIGN_OR_RETURN(const Buffer ids, backend->allocate_host(4 * ids_bytes, "batch"));
  KTG_ASSIGN_OR_RETURN(const Buffer sums, backend->allocate_host(sizeof(runtime::LossSums), "loss"));
  const auto part = [&](int64_t i) { return ids.as<int32_t>() + i * B * T; };
  std::memcpy(part(0), batch.inputs.data(), ids_bytes);
  std::memcpy(part(1), batch.targets.data(), ids_bytes);
  std::memcpy(part(2), batch.document_starts.data(), ids_bytes);
  std::memcpy(part(3), batch.positions.data(), ids_bytes);
  *sums.as<runtime::LossSums>() = {.loss = std::nan(""), .num_tokens = -1};
  const void* const read_by_kernels =
      config.dtype() == kernels::DType::kF32 ? on_device.master.data() : on_device.compute.data();
  runtime::FlatUnitAccess access(table, on_device.master.as<float>(), read_by_kernels, gradient.as<float>(),
                                 config.dtype());
  runtime::MicroBatch given{.inputs = part(0), .targets = part(1), .B = B, .T = T};
  if (options.documents) given.document_starts = part(2), given.positions = part(3);
  KTG_RETURN_IF_ERROR(model->forward_backward(given, access, sums.as<runtime::LossSums>(), *stream));
  KTG_RETURN_IF_ERROR(backend->copy(gradients.data(), gradient.data(), bytes, *stream));
  KTG_RETURN_IF_ERROR(stream->synchronize(deadline));

  FileSystem& fs = FileSystem::posix();
  KTG_RETURN_IF_ERROR(fs.create_dirs(dir));
  KTG_RETURN_IF_ERROR(write_floats(join_path(dir, "weights.bin"), weights));
  KTG_RETURN_IF_ERROR(write_floats(join_path(dir, "gradients.bin"), gradients));
  KTG_RETURN_IF_ERROR(fs.write_file(join_path(dir, "ids.bin"),
                                    {static_cast<const char*>(ids.data()), static_cast<size_t>(2 * ids_bytes)}));
  nlohmann::ordered_json out;
  out["device"] = backend->description();
  out["dtype"] = config.training.dtype;
  out["B"] = B;
  out["T"] = T;
  out["loss"] = sums.as<runtime::LossSums>()->loss;
  out["num_tokens"] = sums.as<runtime::LossSums>()->num_tokens;
  for (const runtime::TensorInfo& t : table.tensors()) {
    out["tensors"].push_back({{"name", t.name}, {"shape", t.shape}, {"offset", t.offset}, {"matrix", t.matrix}});
  }
  return fs.write_file(join_path(dir, "dump.json"), out.dump(1) + "\n");
}

Status run(const std::string& path, const std::string& dir, const std::vector<std::string>& sets,
           const std::vector<int32_t>& cuts) {
  KTG_ASSIGN_OR_RETURN(launch::RunConfig config, launch::RunConfig::load(path, sets));
  KTG_RETURN_IF_ERROR(config.resolve_device());
  KTG_RETURN_IF_ERROR(config.model.validate());
  if (!std::is_sorted(cuts.begin(), cuts.end()) ||
      (!cuts.empty() && (cuts.front() < 1 || cuts.back() >= config.training.seq_len))) {
    return invalid_argument(fmt::format("--cut: tokens from 1 to {} in ascending order", config.training.seq_len - 1));
  }
  return dump(config, dir, cuts);
}

}  // namespace
}  // namespace kintsugi

int main(int argc, char** argv) {
  std::string config, dir;
  std::vector<std::string> sets;
  std::vector<int32_t> cuts;
  CLI::App app("Loss and gradients of one random batch, as files");
  app.add_option("config", config)->required();
  app.add_option("dir", dir)->required();
  app.add_option("--set", sets);
  app.add_option("--cut", cuts);
  CLI11_PARSE(app, argc, argv);
  const kintsugi::Status status = kintsugi::run(config, dir, sets, cuts);
  if (!status.ok()) fmt::print(stderr, "{}\n", status.to_string());
  return status.ok() ? 0 : 1;
}
