// train: trains a transformer on any number of ranks, and mends itself when one dies.
//
// One program in three roles. A launcher (mpirun, srun, torchrun, or a shell) starts it once a rank: that is the agent.
// The agent starts it again as its worker, which trains; as spares, which wait to take a worker's place; and as a
// writer of checkpoints.
#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "comm/host/shared_segment.h"
#include "comm/nccl/nccl_environment.h"
#include "launch/agent.h"
#include "launch/checkpoint_writer.h"
#include "launch/console.h"
#include "launch/exit_code.h"
#include "launch/gpu_worker.h"
#include "launch/memory_plan.h"
#include "launch/rank_facts.h"
#include "launch/run_config.h"
#include "launch/run_folder.h"
#include "launch/scheduling.h"
#include "launch/step_console.h"
#include "launch/train_options.h"
#include "launch/train_program.h"
#include "launch/worker_main.h"
#include "runtime/base/log.h"

namespace kintsugi::launch {
namespace {

const char* environment(const char* name) { return std::getenv(name); }

Result<AgentConfig> configure(const TrainOptions& options, int world_size) {
  KTG_ASSIGN_OR_RETURN(RunConfig config, RunConfig::load(options.config_path, options.sets));
  KTG_RETURN_IF_ERROR(config.resolve_device());
  KTG_RETURN_IF_ERROR(config.validate(world_size));
  if (config.on_cuda() && world_size > 1) KTG_RETURN_IF_ERROR(comm::check_nccl_config(config.comm));
  if (config.fault.kill.size() > kMaxFaultEntries) {
    return invalid_argument(
        fmt::format("fault.kill: {} entries, at most {}", config.fault.kill.size(), kMaxFaultEntries));
  }
  if (world_size > 64) return invalid_argument(fmt::format("{} ranks: this version takes at most 64", world_size));
  KTG_RETURN_IF_ERROR(check_host_memory(config, world_size, host_memory_bytes()));
  const MemoryPlan plan = plan_memory(config, world_size);
  AgentConfig agent;
  agent.config_toml = config.to_toml();
  agent.out_dir = options.out_dir;
  agent.heap_bytes = plan.heap_bytes();
  agent.reserve_heap = !config.on_cuda();  // on a GPU the state itself lies elsewhere
  agent.num_snapshot_slots = plan.num_snapshot_slots;
  agent.num_channels = num_channels(config, world_size);
  agent.spares = config.recovery.spares;
  KTG_ASSIGN_OR_RETURN(agent.policy.source, parse_state_policy(config.recovery.source));
  agent.policy.max_restarts = config.recovery.max_restarts;
  agent.policy.hang_timeout_ms = config.recovery.hang_timeout_ms;
  agent.policy.ack_timeout_ms = config.recovery.ack_timeout_ms;
  agent.policy.total_steps = config.training.steps;
  agent.policy.holders = state_holders(config, world_size);
  agent.policy.snapshots = slots_hold_state(config);
  return agent;
}

// Rank 0: says what is going to happen, and opens the run's folder.
Result<JobOpening> open_job(const TrainOptions& options, const AgentConfig& agent, const RankFacts& facts,
                            const CpuShare& cpus, Console& out, Console& error) {
  KTG_ASSIGN_OR_RETURN(const RunConfig config, RunConfig::parse(agent.config_toml, options.config_path));
  const std::string run_id = new_run_id();
  KTG_ASSIGN_OR_RETURN(RunFolder folder, open_run_folder(options.out_dir, options.resume, run_id));
  KTG_RETURN_IF_ERROR(FileSystem::posix().write_file(options.out_dir + "/config.toml", agent.config_toml));
  // What the other modes would need; of a GPU's memory the agents know nothing.
  std::string modes;
  if (!config.on_cuda()) {
    KTG_ASSIGN_OR_RETURN(modes, report_plan(config, {.world_size = facts.world_size}));
  }
  out.print(fmt::format("{}\n{}{}{} rank{} by {}; {}\nrun folder: {}\n{}{}", agent.config_toml,
                        plan_memory(config, facts.world_size).to_string(), modes, facts.world_size,
                        facts.world_size == 1 ? "" : "s", facts.launcher_name, cpus.note, options.out_dir, folder.note,
                        folder.note.empty() ? "" : "\n"));
  const auto print = [&out](std::string_view text) { out.print(text); };
  KTG_ASSIGN_OR_RETURN(
      auto console, StepConsole::open(config, options.out_dir, std::max<int64_t>(folder.resume_from.step, 0), print));
  JobOpening opening;
  opening.plan = {.world_size = facts.world_size,
                  .launcher = facts.launcher_name,
                  .run_id = run_id,
                  .out_dir = options.out_dir,
                  .ends_with_an_agent = facts.ends_with_a_process,
                  .policy = agent.policy,
                  .resume_from = folder.resume_from,
                  .history_id = folder.history.run_id,
                  .parent_history_id = folder.history.parent_run_id,
                  .parent_step = folder.history.parent_step,
                  .print = print,
                  .print_error = [&error](std::string_view text) { error.print(text); }};
  // A checkpoint that was asked for by name is not silently replaced by another.
  if (options.resume.from.empty()) {
    opening.plan.fall_back = [dir = folder.checkpoint_dir, bad = std::vector<std::string>(),
                              run_id](const std::string& bad_dir) mutable -> Result<Fallback> {
      bad.push_back(bad_dir);
      KTG_ASSIGN_OR_RETURN(const RunFolder next, fall_back_from(dir, bad, fmt::format("{}-{}", run_id, bad.size())));
      return Fallback{.checkpoint = next.resume_from,
                      .history_id = next.history.run_id,
                      .parent_history_id = next.history.parent_run_id,
                      .parent_step = next.history.parent_step};
    };
  }
  opening.publish = [console = std::shared_ptr<StepConsole>(std::move(console))](
                        std::string_view topic, std::string_view payload) { console->publish(topic, payload); };
  opening.clean_up = [dir = folder.checkpoint_dir] {
    const Status removed = checkpoint::remove_stale(FileSystem::posix(), dir);
    if (!removed.ok()) log().warn("{}", removed.message());
  };
  opening.keeps_alive = std::make_shared<UniqueFd>(std::move(folder.lock));
  return opening;
}

Result<UniqueFd> create_segment(const AgentConfig& config, int rank, int world_size) {
  KTG_ASSIGN_OR_RETURN(const int fd, comm::SharedSegment::create_fd(config.heap_bytes, world_size, rank,
                                                                    config.reserve_heap, config.num_channels));
  return UniqueFd(fd);
}

// Where programs keep what they can make again; empty when the environment does not say.
std::string cache_dir() {
  if (const char* dir = environment("XDG_CACHE_HOME"); dir != nullptr && *dir == '/')
    return std::string(dir) + "/kintsugi";
  if (const char* home = environment("HOME"); home != nullptr && *home == '/')
    return std::string(home) + "/.cache/kintsugi";
  return "";
}

Result<TrainerHolder> create_trainer(ChildContext& context, WorkerLink& link) {
  KTG_ASSIGN_OR_RETURN(RunConfig config, RunConfig::parse(context.config_toml, "the run's configuration"));
  KTG_RETURN_IF_ERROR(set_log_level(config.log.level));
  auto segments = std::make_shared<std::vector<std::unique_ptr<comm::SharedSegment>>>();
  std::vector<comm::SharedSegment*> views;
  for (const UniqueFd& fd : context.segment_fds) {
    KTG_ASSIGN_OR_RETURN(segments->emplace_back(), comm::SharedSegment::map(fd.get()));
    views.push_back(segments->back().get());
  }
  context.segment_fds.clear();
  WorkerEnvironment env;
  env.rank = context.setup.rank;
  env.world_size = context.setup.world_size;
  env.local_rank = context.setup.local_rank;
  env.num_threads = context.setup.num_threads;
  env.link = &link;
  env.out_dir = context.setup.out_dir;
  env.cache_dir = cache_dir();
  env.warm_up = context.setup.is_spare != 0;
  env.start_times = context.start_times;
  use_segments(env, std::move(views), config.comm);
  std::shared_ptr<void> gpu;
  if (config.on_cuda()) {
    KTG_ASSIGN_OR_RETURN(gpu, use_gpu(env, config, *context.page));
  }
  TrainerHolder holder;
  KTG_ASSIGN_OR_RETURN(holder.trainer, Trainer::create(config, env));
  log().info("process {} is ready: {} threads", ::getpid(), env.num_threads);
  holder.keeps_alive = std::make_shared<std::pair<decltype(segments), decltype(gpu)>>(segments, gpu);
  return holder;
}

TrainProgram real_program() {
  return {
      .create_segment = create_segment, .create_trainer = create_trainer, .create_writer = create_checkpoint_writer};
}

// One rank speaks. When its words come with an exit code that makes a launcher end the other ranks, they wait for that
// instead of ending first and taking the speaker down.
int speak_for_all(const CommandLineOutcome& outcome, int rank) {
  if (rank == 0) return stop_as_told(outcome);
  if (outcome.exit_code != kExitOk) ::poll(nullptr, 0, 2000);
  return outcome.exit_code;
}

int print_plan(const TrainOptions& options) {
  const Result<RunConfig> config = RunConfig::load(options.config_path, options.sets);
  const Result<std::string> report =
      config.ok() ? report_plan(*config, options.plan_request) : Result<std::string>(config.status());
  if (!report.ok()) {
    fmt::print(stderr, "error: {}\n", report.status().message());
    return kExitBadConfig;
  }
  fmt::print("{}", *report);
  return kExitOk;
}

int agent_main(int argc, char** argv) {
  const int64_t began_ns = monotonic_ns();
  TrainOptions options;
  const CommandLineOutcome outcome = parse_command_line(argc, argv, &options);
  if (outcome.run && options.plan) return print_plan(options);
  const Result<RankFacts> facts = find_rank_facts(options.ranks, environment);
  if (!outcome.run) return speak_for_all(outcome, facts.ok() ? facts->rank : 0);
  if (!facts.ok()) {
    fmt::print(stderr, "error: {}\n", facts.status().message());
    return kExitBadConfig;
  }
  if (facts->local_size != facts->world_size && facts->world_size > 0) {
    return speak_for_all(
        {.run = false,
         .exit_code = kExitBadConfig,
         .text = fmt::format("error: {}: {} of {} ranks are on this host; this version runs on one host\n",
                             facts->launcher_name, facts->local_size, facts->world_size)},
        facts->rank);
  }
  Console out(STDOUT_FILENO), error(STDERR_FILENO);
  const CpuShare cpus = take_cpu_share(*facts, environment);
  // For every thread of every child: OpenMP keeps the number per thread, and a spare is made on one and trains on
  // another.
  ::setenv("OMP_NUM_THREADS", std::to_string(cpus.num_threads).c_str(), /*overwrite=*/1);
  limit_spinning(environment);
  const Result<AgentConfig> config = configure(options, std::max(1, facts->world_size));
  return run_agent({.facts = *facts,
                    .environment = environment,
                    .num_threads = cpus.num_threads,
                    .began_ns = began_ns,
                    .config = config,
                    .open_job = [&](const RankFacts& f) { return open_job(options, *config, f, cpus, out, error); }},
                   real_program());
}

}  // namespace
}  // namespace kintsugi::launch

int main(int argc, char** argv) {
  using namespace kintsugi::launch;
  const std::string_view role = argc > 1 ? argv[1] : "";
  if (role == "--role=worker") return worker_main(real_program());
  if (role == "--role=writer") return writer_main(real_program());
  return agent_main(argc, argv);
}
