#include "launch/checkpoint_writer.h"

#include <map>
#include <utility>

#include "checkpoint/checkpoint.h"
#include "comm/host/shared_segment.h"
#include "launch/fault_plan.h"
#include "launch/memory_plan.h"
#include "launch/run_config.h"
#include "launch/run_folder.h"
#include "launch/tuning_file.h"
#include "runtime/base/file_system.h"
#include "runtime/data/tokenizer.h"

namespace kintsugi::launch {
namespace {

// The real file system, with the two moments at which fault.kill may end a writer: a shard's bytes written but not
// synced, and a whole checkpoint not yet renamed.
class FaultyFileSystem final : public FileSystem {
 public:
  explicit FaultyFileSystem(std::vector<FaultPlan> plans) : plans_(std::move(plans)) {}
  void set_step(int64_t step) { step_ = step; }

  Result<std::string> read_file(const std::string& path) override { return real_.read_file(path); }
  Status write_file(const std::string& path, std::string_view contents) override {
    return real_.write_file(path, contents);
  }
  Status append_file(const std::string& path, std::string_view contents) override {
    return real_.append_file(path, contents);
  }
  Status truncate_file(const std::string& path, int64_t size_bytes) override {
    return real_.truncate_file(path, size_bytes);
  }
  Status sync_file(const std::string& path) override {
    KTG_RETURN_IF_ERROR(at(FaultPoint::kWrite));
    return real_.sync_file(path);
  }
  Status sync_dir(const std::string& path) override { return real_.sync_dir(path); }
  Status rename(const std::string& from, const std::string& to) override {
    KTG_RETURN_IF_ERROR(at(FaultPoint::kRename));
    return real_.rename(from, to);
  }
  Status remove_file(const std::string& path) override { return real_.remove_file(path); }
  Status remove_tree(const std::string& path) override { return real_.remove_tree(path); }
  Status create_dirs(const std::string& path) override { return real_.create_dirs(path); }
  Result<std::vector<std::string>> list_dir(const std::string& path) override { return real_.list_dir(path); }
  bool exists(const std::string& path) override { return real_.exists(path); }
  Result<int64_t> file_size(const std::string& path) override { return real_.file_size(path); }
  Result<int64_t> free_bytes(const std::string& path) override { return real_.free_bytes(path); }

 private:
  Status at(FaultPoint point) {
    for (const FaultPlan& plan : plans_) KTG_RETURN_IF_ERROR(plan.at(point, step_));
    return ok_status();
  }

  FileSystem& real_ = FileSystem::posix();
  std::vector<FaultPlan> plans_;
  int64_t step_ = -1;
};

class CheckpointWriter final : public ShardWriter {
 public:
  CheckpointWriter(RunConfig config, ChildContext& context)
      : config_(std::move(config)),
        rank_(context.setup.rank),
        world_size_(context.setup.world_size),
        out_dir_(context.setup.out_dir),
        checkpoint_dir_(checkpoint_dir_of(out_dir_)),
        table_(runtime::ParamTable::build(config_.model)),
        plan_(plan_memory(config_, world_size_)),
        shard_fs_(plans(context, rank_, rank_ + 1)),
        commit_fs_(plans(context, 0, world_size_)) {}

  Status open(ChildContext& context) {
    KTG_ASSIGN_OR_RETURN(segment_, comm::SharedSegment::map(context.segment_fds.at(static_cast<size_t>(rank_)).get()));
    KTG_ASSIGN_OR_RETURN(slots_, allocate_snapshot_slots(*segment_, plan_));
    KTG_ASSIGN_OR_RETURN(const auto tokenizer, runtime::create_tokenizer(config_.data.tokenizer));
    meta_.world_size = world_size_;
    meta_.config_toml = config_.to_toml();
    meta_.tokenizer = tokenizer->serialized();
    meta_.model = config_.model;
    return ok_status();
  }

  Result<std::string> write(int64_t step, int slot, const SaveTicket& ticket) override {
    shard_fs_.set_step(step);
    KTG_ASSIGN_OR_RETURN(const std::string dir,
                         checkpoint::begin_checkpoint(shard_fs_, checkpoint_dir_, step, ticket.attempt));
    void* const memory = slots_.at(static_cast<size_t>(slot));
    const checkpoint::ShardView view = snapshot_view(memory, state_layout(config_, table_, rank_, world_size_));
    notes_[step] = snapshot_notes(memory, plan_);
    KTG_ASSIGN_OR_RETURN(const checkpoint::ShardRecord record,
                         checkpoint::write_shard(shard_fs_, dir, table_, view, meta(step, ticket), rank_));
    return checkpoint::to_json(record);
  }

  Result<std::string> commit(int64_t step, const SaveTicket& ticket, const std::vector<std::string>& records) override {
    commit_fs_.set_step(step);
    std::vector<checkpoint::ShardRecord> shards;
    for (const std::string& text : records) {
      KTG_ASSIGN_OR_RETURN(shards.emplace_back(), checkpoint::shard_record_from_json(text));
    }
    KTG_ASSIGN_OR_RETURN(const std::string dir,
                         checkpoint::begin_checkpoint(commit_fs_, checkpoint_dir_, step, ticket.attempt));
    checkpoint::CheckpointMeta whole = meta(step, ticket);
    whole.extra_json = to_json(notes_[step], read_tuning(out_dir_));
    notes_.erase(notes_.begin(), notes_.upper_bound(step));
    KTG_RETURN_IF_ERROR(checkpoint::commit_checkpoint(commit_fs_, checkpoint_dir_, dir, whole, table_, shards,
                                                      config_.checkpoint.keep));
    return checkpoint_dir_ + "/step-" + std::to_string(step);
  }

  Status abandon(int64_t step, const SaveTicket& ticket) override {
    notes_.erase(step);
    return checkpoint::abandon_checkpoint(FileSystem::posix(), checkpoint_dir_, step, ticket.attempt);
  }

 private:
  static std::vector<FaultPlan> plans(ChildContext& context, int begin, int end) {
    const Result<RunConfig> config = RunConfig::parse(context.config_toml, "the run's configuration");
    std::vector<FaultPlan> out;
    if (!config.ok()) return out;  // the agent has checked it
    const Result<std::vector<FaultEntry>> entries = config->fault.entries(context.setup.world_size);
    if (!entries.ok() || entries->empty()) return out;
    for (int r = begin; r < end; ++r) {
      out.emplace_back(*entries, r, [page = context.page](int64_t index) { return page->claim_fault(index); });
    }
    return out;
  }

  checkpoint::CheckpointMeta meta(int64_t step, const SaveTicket& ticket) const {
    checkpoint::CheckpointMeta m = meta_;
    m.step = step;
    m.cursor = ticket.cursor;
    m.run_id = ticket.run_id;
    m.parent_run_id = ticket.parent_run_id;
    m.parent_step = ticket.parent_step;
    if (const auto at = notes_.find(step); at != notes_.end()) m.extra_json = to_json(at->second);
    return m;
  }

  const RunConfig config_;
  const int rank_;
  const int world_size_;
  const std::string out_dir_, checkpoint_dir_;
  const runtime::ParamTable table_;
  const MemoryPlan plan_;
  // Of the shards whose checkpoints are not committed yet, by step; every rank's are the same. A shard may be written
  // before the checkpoint of the one in front of it is committed.
  std::map<int64_t, SnapshotNotes> notes_;
  FaultyFileSystem shard_fs_;   // dies for this rank's entries
  FaultyFileSystem commit_fs_;  // for any rank's: there is one commit
  std::unique_ptr<comm::SharedSegment> segment_;
  std::vector<void*> slots_;
  checkpoint::CheckpointMeta meta_;
};

}  // namespace

Result<std::unique_ptr<ShardWriter>> create_checkpoint_writer(ChildContext& context) {
  KTG_ASSIGN_OR_RETURN(RunConfig config, RunConfig::parse(context.config_toml, "the run's configuration"));
  auto writer = std::make_unique<CheckpointWriter>(std::move(config), context);
  KTG_RETURN_IF_ERROR(writer->open(context));
  return std::unique_ptr<ShardWriter>(std::move(writer));
}

}  // namespace kintsugi::launch
