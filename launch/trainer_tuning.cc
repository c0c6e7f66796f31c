// Which algorithms the GPU's matrix products run with. They bear on the last bits of every sum, so they are chosen
// once: rank 0 times them when a run begins and writes them to <out>/gemm_algorithms.txt; whoever comes later (spares,
// replacements, a resumed run) reads that file, and every generation begins by making sure that all ranks use rank 0's.
// They lie in each checkpoint, too, and whoever loads one goes on with its.
#include <fmt/format.h>

#include "launch/trainer_impl.h"
#include "launch/tuning_file.h"
#include "runtime/base/file_system.h"
#include "runtime/base/log.h"

namespace kintsugi::launch {
namespace {

constexpr int64_t kMostBytes = 256 << 10;

// Written beside and renamed: a reader finds all of it or nothing.
Status write_whole(const std::string& dir, const std::string& name, const std::string& text) {
  FileSystem& fs = FileSystem::posix();
  KTG_RETURN_IF_ERROR(fs.create_dirs(dir));
  const std::string path = join_path(dir, name), partial = path + ".partial";
  KTG_RETURN_IF_ERROR(fs.write_file(partial, text));
  return fs.rename(partial, path);
}

std::string read_or_empty(const std::string& dir, const std::string& name) {
  if (dir.empty()) return "";
  Result<std::string> text = FileSystem::posix().read_file(join_path(dir, name));
  return text.ok() ? std::move(*text) : "";
}

}  // namespace

bool TrainerImpl::chooses_tuning() const { return environment_.rank == 0 && !environment_.warm_up; }

std::string TrainerImpl::tuning_cache_name() const {
  const std::string name = backend_->tuning_name();
  return !name.empty() && config_.training.tune_thoroughly ? "thorough-" + name : name;
}

std::string TrainerImpl::cached_tuning() const {
  const std::string name = tuning_cache_name();
  return name.empty() ? "" : read_or_empty(environment_.cache_dir, name);
}

kernels::AttentionShape TrainerImpl::attention_shape() const {
  const int64_t B = layout_.micro_batch, T = config_.training.seq_len;
  const auto shape = runtime::attention_shape(config_.model, config_.transformer_options(B * T), B, T);
  return config_.separates_documents() ? kernels::with_documents(shape) : shape;
}

runtime::Backend::TunedWork TrainerImpl::tuned_work() const {
  const int64_t rows = layout_.micro_batch * config_.training.seq_len;
  runtime::Backend::TunedWork work{.layers = {}, .attention = {}, .thorough = config_.training.tune_thoroughly};
  work.layers = runtime::linear_layers(config_.model, config_.dtype(), rows,
                                       !layout_.fixed_order() && layout_.num_micro_steps > 1);
  if (config_.dtype() == kernels::DType::kBF16) work.attention.push_back(attention_shape());
  return work;
}

void TrainerImpl::begin_tuning() {
  if (!config_.training.tune) return;
  std::string known = read_tuning(environment_.out_dir);
  if (known.empty() && chooses_tuning()) known = cached_tuning();
  backend_->begin_tuning(tuned_work(), known);
}

Status TrainerImpl::prepare_tuning(const runtime::Buffer& scratch) {
  if (!config_.training.tune) return ok_status();
  tuning_ = read_tuning(environment_.out_dir);
  if (!tuning_.empty()) {
    const Status used = backend_->use_tuning(tuning_);
    if (used.ok()) return ok_status();
    log().warn("{}: {}", kTuningFile, used.message());  // the run moved to another machine: rank 0 chooses anew
    tuning_.clear();
  }
  if (!chooses_tuning()) return ok_status();
  const std::string name = tuning_cache_name(), cached = cached_tuning();
  KTG_ASSIGN_OR_RETURN(tuning_, backend_->tune(tuned_work(), cached, scratch, *stream_));
  KTG_RETURN_IF_ERROR(backend_->use_tuning(tuning_));
  if (!environment_.out_dir.empty()) KTG_RETURN_IF_ERROR(write_whole(environment_.out_dir, kTuningFile, tuning_));
  if (!environment_.cache_dir.empty() && tuning_ != cached) {
    // A cache that cannot be written costs the next run some seconds, nothing else.
    const Status written = write_whole(environment_.cache_dir, name, tuning_);
    if (!written.ok()) log().warn("cache of algorithms: {}", written.message());
  }
  return ok_status();
}

// All ranks load the same checkpoint. On another kind of GPU its algorithms are of no use, and the run's own stay.
Status TrainerImpl::adopt_tuning(const std::string& text) {
  if (!device_ || !config_.training.tune || text.empty() || text == tuning_) return ok_status();
  if (const Status used = backend_->use_tuning(text); !used.ok()) {
    log().warn("the checkpoint's algorithms: {}", used.message());
    return ok_status();
  }
  tuning_ = text;
  if (environment_.rank != 0 || environment_.out_dir.empty()) return ok_status();
  return write_whole(environment_.out_dir, kTuningFile, tuning_);
}

// Every rank makes the same calls, whatever it has already.
Status TrainerImpl::share_tuning() {
  if (environment_.world_size == 1 || !config_.training.tune) return ok_status();
  std::string text = tuning_.substr(0, kMostBytes);
  text.resize(kMostBytes, '\0');
  KTG_ASSIGN_OR_RETURN(const comm::WorkPtr work, communicator_->broadcast(text.data(), kMostBytes, 0, *stream_));
  KTG_RETURN_IF_ERROR(work->wait(collective_deadline()));
  text.resize(text.find('\0') == std::string::npos ? kMostBytes : text.find('\0'));
  if (text.empty() || text == tuning_) return ok_status();
  tuning_ = std::move(text);
  return backend_->use_tuning(tuning_);
}

}  // namespace kintsugi::launch
