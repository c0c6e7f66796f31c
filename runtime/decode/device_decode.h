// The decode step of a backend that runs ahead of the host: its inputs stay on the device, its tokens are drawn there
// and fed to the next step there, and it is one recorded graph a batch size. The host uploads a batch when its members
// change, launches steps, and collects their tokens later. Internal to runtime/decode.
//   S sequences   M block table width   P tokens in a kv_block   V vocabulary
// It works on any backend, the CPU's included, where a step is done when it is launched.
// One thread at a time.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "runtime/decode/kv_cache.h"
#include "runtime/decode/sampler.h"
#include "runtime/model/transformer.h"

namespace kintsugi::runtime {

// The rows that a batch of S is padded to, so that few graphs serve all sizes. At most max_batch, at least S.
int64_t decode_rows(int64_t S, int64_t max_batch);

struct DeviceDecodeOptions {
  int64_t max_batch = 1;
  int64_t block_table_width = 1;
  DType dtype = DType::kF32;
  bool use_graphs = true;  // where the backend records
};

class DeviceDecode final : public PagedCacheView {
 public:
  // Bytes that create() takes from its arena.
  static int64_t planned_bytes(int64_t max_batch, int64_t block_table_width);
  // logits: (max_batch, V) of the dtype. All arguments by reference outlive it.
  static Result<std::unique_ptr<DeviceDecode>> create(const KvCache& cache, Transformer& model, UnitAccess& access,
                                                      const ModelConfig& config, void* logits,
                                                      const DeviceDecodeOptions& options, Arena& arena,
                                                      Backend& backend, Stream& stream);

  // A new batch. No step may be uncollected. Waits until the device has read the one before.
  Status clear();
  // The token `id` goes to `position` (at least 1) of the sequence whose blocks are `table`, which covers it.
  void add(int32_t id, int64_t position, const BlockTable& table, const SamplingParams& sampling);
  // `table` of row `row` has grown: launch() tells the device. Waits until it has read the last change.
  Status update_table(int64_t row, const BlockTable& table);
  // Queues one step for the batch: each row is fed its token, or the one that the last step drew for it. Steps that are
  // not collected: at most kMostInFlight.
  static constexpr int kMostInFlight = 2;
  Status launch();
  // Waits for the oldest step that is not collected: its drawn tokens by row (kernels/sampling.h says what a negative
  // one means). Valid until the next launch().
  Result<std::span<const int32_t>> collect();
  int in_flight() const { return in_flight_; }

  // Draws from logits row 0 the token after `position`, and waits for it. No step may be uncollected; the batch is
  // lost.
  Result<int32_t> draw(const SamplingParams& sampling, int64_t position);

  int64_t size() const { return size_; }
  // Launches of recorded graphs so far: for tests and reports.
  int64_t graph_launches() const { return graph_launches_; }

  void* k_cache(int64_t layer) const override { return cache_.k(layer); }
  void* v_cache(int64_t layer) const override { return cache_.v(layer); }
  const int32_t* block_tables() const override { return device_.tables; }
  const int32_t* context_lens() const override { return device_.lens; }
  const int64_t* new_slots() const override { return device_.slots; }
  int64_t kv_block_tokens() const override { return cache_.shape().kv_block_tokens; }
  int64_t block_table_width() const override { return options_.block_table_width; }

 private:
  // One block of memory, the same on the host (pinned) and on the device.
  struct Inputs {
    int64_t* slots;
    kernels::SequenceSampling* sampling;
    int32_t *drawn, *positions, *lens, *ids;
    int32_t* tables;  // (max_batch, M), last: the part that steps change alone
  };
  static Inputs lay_out(void* memory, int64_t max_batch);

  DeviceDecode(const KvCache& cache, Transformer& model, UnitAccess& access, const ModelConfig& config, void* logits,
               const DeviceDecodeOptions& options, Backend& backend, Stream& stream)
      : cache_(cache),
        model_(model),
        access_(access),
        vocab_size_(config.vocab_size),
        logits_(logits),
        options_(options),
        backend_(backend),
        stream_(stream) {}
  Status wait_for(const Event& event);
  // host_ may be written again.
  Status wait_for_upload();
  void write_table(int64_t row, const BlockTable& table);
  Status upload(const void* begin, const void* end);
  Status queue_step(int64_t rows);
  Status run_step(int64_t rows);

  const KvCache& cache_;
  Transformer& model_;
  UnitAccess& access_;
  const int64_t vocab_size_;
  void* const logits_;
  const DeviceDecodeOptions options_;
  Backend& backend_;
  Stream& stream_;
  Buffer host_memory_, host_drawn_;  // pinned
  Inputs host_{}, device_{};
  std::unique_ptr<Event> uploaded_;              // the device has read host_
  std::unique_ptr<Event> drawn_[kMostInFlight];  // host_drawn_ row i is complete
  int64_t rows_drawn_[kMostInFlight] = {};
  int oldest_ = 0, in_flight_ = 0;
  int64_t size_ = 0;
  bool batch_changed_ = false, tables_changed_ = false, upload_queued_ = false;
  // By rows. Null: run once without recording, which is when libraries choose and load what they need.
  std::map<int64_t, std::unique_ptr<Graph>> graphs_;
  bool records_ = false;
  int64_t graph_launches_ = 0;
};

}  // namespace kintsugi::runtime
