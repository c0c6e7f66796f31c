#include "runtime/decode/device_decode.h"

#include <sched.h>

#include <algorithm>
#include <thread>

namespace kintsugi::runtime {
namespace {

constexpr int64_t kAlignment = 256;
int64_t piece_bytes(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

kernels::SequenceSampling kernel_sampling(const SamplingParams& p) {
  return {.temperature = p.temperature, .top_p = p.top_p, .top_k = p.top_k, .seed = p.seed, .stream = p.stream};
}

}  // namespace

int64_t decode_rows(int64_t S, int64_t max_batch) {
  int64_t rows = S;
  if (S > 32) {
    rows = (S + 15) / 16 * 16;
  } else if (S > 8) {
    rows = (S + 7) / 8 * 8;
  } else if (S > 2) {
    rows = (S + 3) / 4 * 4;
  }
  return std::max(S, std::min(rows, max_batch));
}

int64_t DeviceDecode::planned_bytes(int64_t max_batch, int64_t block_table_width) {
  return piece_bytes(max_batch * 8) + piece_bytes(max_batch * int64_t{sizeof(kernels::SequenceSampling)}) +
         4 * piece_bytes(max_batch * 4) + piece_bytes(max_batch * block_table_width * 4);
}

DeviceDecode::Inputs DeviceDecode::lay_out(void* memory, int64_t max_batch) {
  char* at = static_cast<char*>(memory);
  const auto take = [&at](int64_t bytes) {
    char* const piece = at;
    at += piece_bytes(bytes);
    return static_cast<void*>(piece);
  };
  Inputs inputs;
  inputs.slots = static_cast<int64_t*>(take(max_batch * 8));
  inputs.sampling = static_cast<kernels::SequenceSampling*>(take(max_batch * int64_t{sizeof(*inputs.sampling)}));
  for (int32_t** array : {&inputs.drawn, &inputs.positions, &inputs.lens, &inputs.ids}) {
    *array = static_cast<int32_t*>(take(max_batch * 4));
  }
  inputs.tables = reinterpret_cast<int32_t*>(at);
  return inputs;
}

Result<std::unique_ptr<DeviceDecode>> DeviceDecode::create(const KvCache& cache, Transformer& model, UnitAccess& access,
                                                           const ModelConfig& config, void* logits,
                                                           const DeviceDecodeOptions& options, Arena& arena,
                                                           Backend& backend, Stream& stream) {
  const int64_t most = backend.kernels().sampling->max_vocab();
  if (config.vocab_size > most) {
    return invalid_argument("vocab_size = " + std::to_string(config.vocab_size) + ": the device samples from at most " +
                            std::to_string(most) + " tokens");
  }
  std::unique_ptr<DeviceDecode> decode(
      new DeviceDecode(cache, model, access, config, logits, options, backend, stream));
  const int64_t bytes = planned_bytes(options.max_batch, options.block_table_width);
  decode->device_ = lay_out(arena.take(bytes), options.max_batch);
  KTG_ASSIGN_OR_RETURN(decode->host_memory_, backend.allocate_host(bytes, "decode inputs"));
  decode->host_ = lay_out(decode->host_memory_.data(), options.max_batch);
  KTG_ASSIGN_OR_RETURN(decode->host_drawn_,
                       backend.allocate_host(kMostInFlight * options.max_batch * 4, "drawn tokens"));
  KTG_ASSIGN_OR_RETURN(decode->uploaded_, backend.create_event());
  for (std::unique_ptr<Event>& event : decode->drawn_) {
    KTG_ASSIGN_OR_RETURN(event, backend.create_event());
  }
  decode->records_ = options.use_graphs && backend.asynchronous();
  return decode;
}

Status DeviceDecode::wait_for(const Event& event) {
  constexpr int kSpins = 20000;  // some milliseconds: a decode step
  for (int64_t polls = 0;; ++polls) {
    KTG_ASSIGN_OR_RETURN(const bool reached, event.reached());
    if (reached) return ok_status();
    if (stream_.stop_token().requested()) return aborted("stopped while a decode step was queued");
    if (polls < kSpins) {
      sched_yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
}

Status DeviceDecode::wait_for_upload() {
  if (!upload_queued_) return ok_status();
  KTG_RETURN_IF_ERROR(wait_for(*uploaded_));
  upload_queued_ = false;
  return ok_status();
}

Status DeviceDecode::clear() {
  KTG_CHECK(in_flight_ == 0) << in_flight_ << " decode steps are not collected";
  size_ = 0;
  batch_changed_ = true;
  return wait_for_upload();
}

void DeviceDecode::add(int32_t id, int64_t position, const BlockTable& table, const SamplingParams& sampling) {
  KTG_CHECK(size_ < options_.max_batch && table.size() <= options_.block_table_width && position >= 1)
      << size_ << " sequences, " << table.size() << " kv_blocks, position " << position;
  // As the last step would have left it: launch() takes the drawn token one position on.
  const int64_t row = size_++;
  host_.sampling[row] = kernel_sampling(sampling);
  host_.drawn[row] = id;
  host_.positions[row] = static_cast<int32_t>(position - 1);
  host_.lens[row] = static_cast<int32_t>(position);
  write_table(row, table);
}

Status DeviceDecode::update_table(int64_t row, const BlockTable& table) {
  KTG_RETURN_IF_ERROR(wait_for_upload());
  write_table(row, table);
  return ok_status();
}

void DeviceDecode::write_table(int64_t row, const BlockTable& table) {
  int32_t* const entries = host_.tables + row * options_.block_table_width;
  std::copy(table.blocks().begin(), table.blocks().end(), entries);
  // Entries past the last block are never followed; -1 makes sure that it would show.
  std::fill(entries + table.size(), entries + options_.block_table_width, -1);
  tables_changed_ = true;
}

Status DeviceDecode::upload(const void* begin, const void* end) {
  const auto offset = static_cast<const char*>(begin) - host_memory_.as<char>();
  return backend_.copy(reinterpret_cast<char*>(device_.slots) + offset, begin,
                       static_cast<const char*>(end) - static_cast<const char*>(begin), stream_);
}

Status DeviceDecode::queue_step(int64_t rows) {
  const kernels::SamplingKernels& k = *backend_.kernels().sampling;
  const kernels::DecodeInputs inputs{device_.ids, device_.positions, device_.lens, device_.slots, device_.tables};
  KTG_RETURN_IF_ERROR(stream_.launched(
      k.advance(inputs, device_.drawn, rows, kv_block_tokens(), options_.block_table_width, stream_.handle()),
      "advance"));
  KTG_RETURN_IF_ERROR(model_.decode(logits_, device_.ids, device_.positions, rows, *this, access_, stream_));
  return stream_.launched(k.sample(device_.drawn, logits_, device_.sampling, device_.positions, rows, vocab_size_,
                                   options_.dtype, stream_.handle()),
                          "sample");
}

Status DeviceDecode::run_step(int64_t rows) {
  const auto found = graphs_.find(rows);
  if (!records_ || found == graphs_.end()) {
    graphs_[rows] = nullptr;
    return queue_step(rows);
  }
  if (found->second == nullptr) {
    KTG_RETURN_IF_ERROR(backend_.begin_recording(stream_));
    const Status queued = queue_step(rows);
    Result<std::unique_ptr<Graph>> graph = backend_.end_recording(stream_);
    KTG_RETURN_IF_ERROR(queued);
    if (!graph.ok()) return graph.status();
    found->second = std::move(graph).value();
  }
  ++graph_launches_;
  return found->second->launch(stream_);
}

Status DeviceDecode::launch() {
  KTG_CHECK(size_ > 0 && in_flight_ < kMostInFlight) << size_ << " rows, " << in_flight_ << " steps in flight";
  const int64_t rows = decode_rows(size_, options_.max_batch);
  if (batch_changed_) {
    for (int64_t row = size_; row < rows; ++row) {  // padding: no sequence
      host_.sampling[row] = {};
      host_.drawn[row] = host_.positions[row] = host_.lens[row] = 0;
    }
    KTG_RETURN_IF_ERROR(upload(host_.slots, host_.tables));
  }
  if (batch_changed_ || tables_changed_) {
    KTG_RETURN_IF_ERROR(upload(host_.tables, host_.tables + size_ * options_.block_table_width));
    KTG_RETURN_IF_ERROR(uploaded_->record(stream_));
    upload_queued_ = true;
  }
  batch_changed_ = tables_changed_ = false;
  KTG_RETURN_IF_ERROR(run_step(rows));
  const int turn = (oldest_ + in_flight_) % kMostInFlight;
  KTG_RETURN_IF_ERROR(
      backend_.copy(host_drawn_.as<int32_t>() + turn * options_.max_batch, device_.drawn, size_ * 4, stream_));
  KTG_RETURN_IF_ERROR(drawn_[turn]->record(stream_));
  rows_drawn_[turn] = size_;
  ++in_flight_;
  return ok_status();
}

Result<std::span<const int32_t>> DeviceDecode::collect() {
  KTG_CHECK(in_flight_ > 0) << "no decode step is in flight";
  KTG_RETURN_IF_ERROR(wait_for(*drawn_[oldest_]));
  const std::span<const int32_t> drawn(host_drawn_.as<int32_t>() + oldest_ * options_.max_batch,
                                       static_cast<size_t>(rows_drawn_[oldest_]));
  oldest_ = (oldest_ + 1) % kMostInFlight;
  --in_flight_;
  return drawn;
}

Result<int32_t> DeviceDecode::draw(const SamplingParams& sampling, int64_t position) {
  KTG_RETURN_IF_ERROR(clear());
  host_.sampling[0] = kernel_sampling(sampling);
  host_.positions[0] = static_cast<int32_t>(position);
  KTG_RETURN_IF_ERROR(upload(host_.slots, host_.tables));
  KTG_RETURN_IF_ERROR(
      stream_.launched(backend_.kernels().sampling->sample(device_.drawn, logits_, device_.sampling, device_.positions,
                                                           1, vocab_size_, options_.dtype, stream_.handle()),
                       "sample"));
  int32_t* const drawn = host_drawn_.as<int32_t>();
  KTG_RETURN_IF_ERROR(backend_.copy(drawn, device_.drawn, 4, stream_));
  KTG_RETURN_IF_ERROR(drawn_[0]->record(stream_));
  KTG_RETURN_IF_ERROR(wait_for(*drawn_[0]));
  return *drawn;
}

}  // namespace kintsugi::runtime
