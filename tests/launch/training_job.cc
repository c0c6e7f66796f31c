#include "training_job.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <thread>

#include "launch/memory_plan.h"
#include "launch/tuning_file.h"
#include "runtime/base/file_system.h"

namespace kintsugi::launch {

using comm::LocalWorld;

ScratchDir::ScratchDir() {
  std::string pattern = testing::TempDir() + "kintsugi-XXXXXX";
  path_ = mkdtemp(pattern.data());
}

ScratchDir::~ScratchDir() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

RunConfig tiny_config(const std::string& dir) {
  std::string text;
  uint32_t x = 12345;
  while (text.size() < 6000) {
    x = x * 1664525u + 1013904223u;
    text += fmt::format("{} is not {}; ", x >> 24, x >> 28);
  }
  const std::string path = dir + "/text.txt";
  EXPECT_TRUE(FileSystem::posix().write_file(path, text).ok());
  RunConfig config;
  config.model.num_layers = 2;
  config.model.dim = 48;
  config.model.num_heads = 3;
  config.model.ffn_dim = 128;
  config.model.vocab_size = 256;
  config.model.max_seq_len = 32;
  config.training.seq_len = 32;
  config.training.steps = 3;
  config.training.global_batch_size = 24;
  config.data.train = {path};
  config.data.validation = {path};
  config.data.format = "text";
  config.comm.first_bucket_bytes = 16 << 10;  // several buckets even of this model
  config.comm.bucket_bytes = 64 << 10;
  config.checkpoint.save_last = false;
  return config;
}

RunConfig diverging(RunConfig config) {
  // Each update multiplies the matrices by -1e6.
  config.optimizer.lr = 1000;
  config.optimizer.weight_decay = 1000;
  config.lr_scheduler.kind = "constant";
  config.training.steps = 9;
  return config;
}

std::vector<double> TrainingJob::Outcome::column(const std::string& name) const {
  std::vector<double> out;
  for (const nlohmann::json& line : metrics) out.push_back(line.at(name).get<double>());
  return out;
}

// One rank's link. Every incarnation of the rank uses the same.
class TrainingJob::Link final : public WorkerLink {
 public:
  Link(TrainingJob& job, int rank) : job_(job), rank_(rank) {}

  StopToken stop_token(int64_t generation) const override { return StopToken(&job_.stop_word_, generation); }
  void begun(int64_t step) override {
    const std::scoped_lock lock(job_.mutex_);
    progress_.begun_step = step;
    if (rank_ == job_.stop_rank_ && step >= job_.stop_step_) stop_requested_ = true;
  }
  void left_vote(const VoteOutcome& vote) override {
    const std::scoped_lock lock(job_.mutex_);
    progress_.vote = vote;
    progress_.reduced_step = vote.step;
  }
  void updated(int64_t step) override {
    const std::scoped_lock lock(job_.mutex_);
    if (step != progress_.reduced_step) progress_.vote = {};
    progress_.updated_step = progress_.reduced_step = step;
  }
  void alive() override {}
  void entered(EntryMilestone) override {}
  Result<Verdict> await_verdict(int64_t generation, Deadline) override { return job_.await_verdict(rank_, generation); }
  bool claim_fault(int64_t index) override {
    const std::scoped_lock lock(job_.mutex_);
    const bool first = !job_.claimed_.at(index);
    job_.claimed_[index] = true;
    return first;
  }
  bool stop_requested() const override { return stop_requested_; }
  int free_snapshot_slot(bool) override { return slot_ = (slot_ + 1) % static_cast<int>(slots_.size()); }
  Status snapshot_ready(int64_t step, int64_t cursor, int slot, bool save) override {
    const auto* bytes = static_cast<const uint8_t*>(slots_.at(slot));
    {
      const std::scoped_lock lock(job_.mutex_);
      const int64_t size = plan_memory(job_.config_, job_.world_size_).snapshot_slot_bytes;
      if (held_.size() == 2) held_.erase(held_.begin());
      held_[step] = {cursor, std::vector<uint8_t>(bytes, bytes + size)};
      progress_.held_steps[0] = held_.begin()->first;
      progress_.held_steps[1] = held_.rbegin()->first;
    }
    return save ? job_.snapshot_ready(rank_, step, cursor, slots_.at(slot)) : ok_status();
  }
  // The rank's memory goes with it here, and what was held comes back into the next one's.
  HeldSnapshot held_snapshot(int64_t step) const override {
    const std::scoped_lock lock(job_.mutex_);
    const auto held = held_.find(step);
    if (held == held_.end()) return {};
    std::copy(held->second.bytes.begin(), held->second.bytes.end(), static_cast<uint8_t*>(slots_.front()));
    return {.slot = 0, .cursor = held->second.cursor};
  }
  Status await_snapshots(Deadline) override { return ok_status(); }
  Status publish(std::string_view topic, std::string_view payload) override {
    const std::scoped_lock lock(job_.mutex_);
    if (topic == "metrics") job_.outcome_.metrics.push_back(nlohmann::json::parse(payload));
    if (topic == "log") job_.outcome_.log.emplace_back(payload);
    return ok_status();
  }
  Status finished(std::string_view summary) override { return job_.finished(rank_, summary); }

  // With the job's mutex held.
  Progress progress_;
  std::vector<void*> slots_;

 private:
  TrainingJob& job_;
  const int rank_;
  int slot_ = 0;
  struct Held {
    int64_t cursor;
    std::vector<uint8_t> bytes;
  };
  std::map<int64_t, Held> held_;  // as the agent's memory would
  std::atomic<bool> stop_requested_{false};
};

TrainingJob::TrainingJob(const RunConfig& config, int world_size)
    : config_(config),
      world_size_(world_size),
      heaps_(world_size),
      waiting_(world_size),
      finished_(world_size),
      claimed_(config.fault.kill.size()) {
  for (int r = 0; r < world_size; ++r) links_.push_back(std::make_unique<Link>(*this, r));
}

TrainingJob::~TrainingJob() = default;

TrainingJob::Outcome TrainingJob::run() {
  std::vector<std::thread> ranks;
  for (int r = 0; r < world_size_; ++r) ranks.emplace_back([this, r] { rank_main(r); });
  for (std::thread& rank : ranks) rank.join();
  return outcome_;
}

WorkerEnvironment TrainingJob::environment(int rank) {
  WorkerEnvironment environment;
  environment.rank = environment.local_rank = rank;
  environment.world_size = world_size_;
  environment.link = links_[rank].get();
  environment.heap = heaps_[rank].get();
  environment.out_dir = out_dir_;
  environment.die = [this, rank] {
    std::unique_lock lock(mutex_);
    if (rank == dies_second_) {
      second_is_dying_ = true;
      changed_.notify_all();
      changed_.wait(lock, [&] { return stop_word_ > verdict_.generation; });
    } else {
      changed_.wait(lock, [&] { return dies_second_ < 0 || second_is_dying_; });
    }
    return device_lost("struck by the fault plan");
  };
  environment.create_communicators = [this, rank](const comm::Membership& membership,
                                                  std::span<const comm::Group> groups, StopToken stop) {
    std::shared_ptr<LocalWorld> world;
    {
      const std::scoped_lock lock(mutex_);
      if (verdict_.generation != membership.generation) {
        return Result<std::vector<std::unique_ptr<comm::Communicator>>>(aborted("the world has moved on"));
      }
      world = world_;
    }
    return world->join(rank, groups, config_.comm, stop);
  };
  if (change_) change_(environment);
  return environment;
}

void TrainingJob::rank_main(int rank) {
  for (;;) {
    const MemoryPlan plan = plan_memory(config_, world_size_);
    {
      const std::scoped_lock lock(mutex_);
      // Peers of the generation before may still be reading.
      if (heaps_[rank]) graveyard_.push_back(std::move(heaps_[rank]));
      heaps_[rank] = LocalWorld::create_heap(plan.heap_bytes());
      for (int i = 0; i < plan.num_snapshot_slots; ++i) {
        links_[rank]->slots_.push_back(heaps_[rank]->data() + i * plan.snapshot_slot_bytes);
      }
    }
    const WorkerEnvironment environment = this->environment(rank);
    Result<std::unique_ptr<Trainer>> trainer = Trainer::create(config_, environment);
    Status status = trainer.status();
    if (trainer.ok()) {
      const Result<RunOutcome> outcome = run_generations(**trainer, *links_[rank]);
      if (outcome.ok()) {
        const std::scoped_lock lock(mutex_);
        outcome_.outcome = *outcome;
        return;
      }
      status = outcome.status();
    }
    if (status.code() == StatusCode::kDeviceLost) {
      died(rank);
      continue;
    }
    const std::scoped_lock lock(mutex_);
    if (outcome_.status.ok()) outcome_.status = status;
    stop_word_ = INT64_MAX;  // no generation follows
    changed_.notify_all();
    return;
  }
}

void TrainingJob::died(int rank) {
  const std::scoped_lock lock(mutex_);
  Progress& progress = links_[rank]->progress_;
  Progress lost;
  std::copy(std::begin(progress.held_steps), std::end(progress.held_steps), std::begin(lost.held_steps));
  progress = lost;
  links_[rank]->slots_.clear();
  stop_word_ = verdict_.generation + 1;
  changed_.notify_all();
}

Result<Verdict> TrainingJob::await_verdict(int rank, int64_t generation) {
  std::unique_lock lock(mutex_);
  EXPECT_LE(generation, verdict_.generation);
  waiting_[rank] = true;
  finished_[rank] = false;
  if (std::count(waiting_.begin(), waiting_.end(), true) == world_size_) begin_next_generation();
  changed_.wait(lock, [&] { return !waiting_[rank] || stop_word_ == INT64_MAX; });
  if (stop_word_ == INT64_MAX) return failed_precondition("another rank failed");
  return verdict_;
}

void TrainingJob::begin_next_generation() {
  std::vector<Progress> progress;
  for (const auto& link : links_) progress.push_back(link->progress_);
  const std::vector<uint64_t> holders = state_holders(config_, world_size_);
  const DecisionView view{.generation = verdict_.generation + 1,
                          .ranks = progress,
                          .last = verdict_,
                          .checkpoint = resume_,
                          .holders = holders,
                          .snapshots = slots_hold_state(config_),
                          .policy = parse_state_policy(config_.recovery.source).value()};
  const Result<Decision> decision = decide(view);
  ASSERT_TRUE(decision.ok()) << decision.status().to_string();
  verdict_ = decision->verdict;
  outcome_.verdicts.push_back(verdict_);
  std::vector<comm::SymmetricHeap*> heaps;
  for (const auto& heap : heaps_) heaps.push_back(heap.get());
  world_ = LocalWorld::create(world_size_, verdict_.generation, heaps, num_channels(config_, world_size_));
  waiting_.assign(world_size_, false);
  changed_.notify_all();
}

// The agents' writers in one: a checkpoint is written once every rank's shard of its step is here.
Status TrainingJob::snapshot_ready(int rank, int64_t step, int64_t cursor, void* slot) {
  const std::scoped_lock lock(mutex_);
  if (checkpoint_dir_.empty()) return ok_status();
  const runtime::ParamTable table = runtime::ParamTable::build(config_.model);
  const int64_t bytes = state_layout(config_, table, rank, world_size_).slot_bytes();
  const float* data = static_cast<const float*>(slot);
  auto& shards = snapshots_[step];
  shards[rank].assign(data, data + bytes / static_cast<int64_t>(sizeof(float)));
  if (static_cast<int>(shards.size()) < world_size_) return ok_status();
  FileSystem& fs = FileSystem::posix();
  checkpoint::CheckpointMeta meta;
  meta.step = step;
  meta.cursor = cursor;
  meta.world_size = world_size_;
  meta.run_id = "run";
  meta.config_toml = config_.to_toml();
  meta.model = config_.model;
  meta.extra_json = to_json(snapshot_notes(slot, plan_memory(config_, world_size_)), read_tuning(out_dir_));
  KTG_ASSIGN_OR_RETURN(const std::string partial, checkpoint::begin_checkpoint(fs, checkpoint_dir_, step, "a"));
  std::vector<checkpoint::ShardRecord> records;
  for (const auto& [r, values] : shards) {
    const checkpoint::ShardView view = snapshot_view(values.data(), state_layout(config_, table, r, world_size_));
    KTG_ASSIGN_OR_RETURN(const checkpoint::ShardRecord record,
                         checkpoint::write_shard(fs, partial, table, view, meta, r));
    records.push_back(record);
  }
  resume_ = {.step = step, .dir = fmt::format("{}/step-{}", checkpoint_dir_, step)};
  return checkpoint::commit_checkpoint(fs, checkpoint_dir_, partial, meta, table, records, 0);
}

Status TrainingJob::finished(int rank, std::string_view summary) {
  std::unique_lock lock(mutex_);
  const int64_t generation = verdict_.generation;
  if (rank == 0) outcome_.summary = nlohmann::json::parse(summary);
  finished_[rank] = true;
  changed_.notify_all();
  changed_.wait(lock, [&] {
    return stop_word_ > generation || std::count(finished_.begin(), finished_.end(), true) == world_size_;
  });
  return stop_word_ > generation ? aborted("a rank died at the end") : ok_status();
}

TrainingJob::Outcome run_job(const RunConfig& config, int world_size) { return TrainingJob(config, world_size).run(); }

TrainingJob::Outcome finished_job(const RunConfig& config, int world_size) {
  TrainingJob::Outcome outcome = run_job(config, world_size);
  EXPECT_TRUE(outcome.status.ok()) << outcome.status.to_string();
  EXPECT_EQ(outcome.outcome, RunOutcome::kFinished);
  EXPECT_EQ(outcome.sha256().size(), 64u);
  return outcome;
}

}  // namespace kintsugi::launch
