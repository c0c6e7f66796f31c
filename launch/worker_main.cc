#include "launch/worker_main.h"

#include <fmt/format.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <optional>
#include <thread>

#include "launch/channel.h"
#include "launch/child_process.h"
#include "launch/exit_code.h"
#include "launch/life_line.h"
#include "launch/process_worker_link.h"
#include "launch/scheduling.h"
#include "launch/start_times.h"
#include "runtime/base/log.h"

namespace kintsugi::launch {
namespace {

using std::chrono::minutes;

// The agent has the setup ready when it starts a child; segments come when all ranks have met.
constexpr auto kSetupPatience = minutes(10);

struct Child {
  Channel channel{UniqueFd(kChildChannelFd)};
  ChildContext context;
  ControlPageMap page;

  Status take_setup() {
    KTG_ASSIGN_OR_RETURN(const Message m, channel.receive(Deadline::after(kSetupPatience)));
    if (m.type != MessageType::kSetup || m.fds.size() != 1)
      return internal_error("a child's first message is no setup");
    std::string_view toml;
    context.setup = unpack<ChildSetup>(m.body, &toml);
    context.config_toml = toml;
    context.segment_fds.resize(static_cast<size_t>(context.setup.world_size));
    KTG_ASSIGN_OR_RETURN(page, ControlPageMap::map(m.fds[0].get()));
    context.page = page.get();
    return ok_status();
  }

  Status take_segments(int count) {
    for (int i = 0; i < count;) {
      KTG_ASSIGN_OR_RETURN(Message m, channel.receive(Deadline::after(kSetupPatience)));
      if (m.type != MessageType::kSegment || m.fds.size() != 1) return internal_error("want a segment");
      UniqueFd& fd = context.segment_fds.at(static_cast<size_t>(m.rank));
      if (!fd.valid()) ++i;
      fd = std::move(m.fds[0]);
    }
    return ok_status();
  }

  // A replacement's start begins with itself, and a spare's is nobody's loss.
  void time_start(int64_t began_ns) {
    const ChildSetup& setup = context.setup;
    if (setup.is_spare != 0) return;
    const bool first = setup.incarnation == 1;
    context.start_times = std::make_shared<StartTimes>(first ? setup.program_began_ns : setup.spawned_ns);
    if (first) context.start_times->mark("agent", setup.spawned_ns);
    context.start_times->mark("process", began_ns);
  }

  // What ps and top show; the kernel would say "exe".
  void name_process(const char* role) const {
    const std::string name = fmt::format("train-{}-{}", role, context.setup.rank);
    ::prctl(PR_SET_NAME, name.substr(0, 15).c_str());
  }

  Status start_log(const char* role) {
    if (context.setup.out_dir[0] == '\0') return ok_status();
    return init_log({.level = "info",
                     .file = fmt::format("{}/log/rank-{}.log", context.setup.out_dir, context.setup.rank),
                     .prefix = fmt::format("rank {} {}", context.setup.rank, role)});
  }
};

// A spare starts beside training, so all that start-up costs runs on a thread that yields; the thread that trains
// later cannot get its priority back without privilege, and keeps it.
Result<TrainerHolder> create_trainer(const TrainProgram& program, Child& child, ProcessWorkerLink& link) {
  if (child.context.setup.is_spare == 0) return program.create_trainer(child.context, link);
  std::optional<Result<TrainerHolder>> made;
  std::thread([&] {
    make_thread_yielding();
    made.emplace(program.create_trainer(child.context, link));
  }).join();
  return std::move(*made);
}

int fail(ProcessWorkerLink& link, const Status& status) {
  log().error("{}", status.to_string());
  const int code = exit_code_of(status);
  (void)link.failed(code, status.message()).ok();  // without an agent nobody is left to be told
  return code;
}

// Trains through all generations.
int train(Trainer& trainer, ProcessWorkerLink& link) {
  while (true) {
    const Result<RunOutcome> outcome = run_generations(trainer, link);
    if (link.complete()) return kExitOk;
    if (outcome.ok()) {
      if (*outcome == RunOutcome::kFinished) return kExitOk;
      const Status left = link.finished("", /*stopped=*/true);
      if (left.ok()) return kExitOk;
      if (left.code() != StatusCode::kAborted) return fail(link, left);
      continue;  // a peer died before it had saved: once more, with its replacement
    }
    const StatusCode code = outcome.status().code();
    log().warn("{}", outcome.status().to_string());
    if (code == StatusCode::kDataLoss && link.loading_checkpoint()) {
      if (!link.bad_checkpoint(outcome.status()).ok()) return kExitFailure;
      continue;
    }
    // A replacement can do what this process cannot. It ends as if it had been killed: that is noticed at once, and
    // nothing is asked of the device any more.
    if (code == StatusCode::kDeviceLost) ::_exit(kExitFailure);
    if (code != StatusCode::kUnavailable && code != StatusCode::kDeadlineExceeded) return fail(link, outcome.status());
    // The communicator failed though nobody is known to be dead: a new generation shows who still answers.
    if (const Status told = link.trouble(outcome.status()); !told.ok()) return kExitFailure;
  }
}

void write_or_commit(ShardWriter& writer, const Message& request, Message& answer) {
  std::string_view rest;
  const auto ticket = unpack<SaveTicket>(request.body, &rest);
  answer.rank = request.rank;
  answer.step = request.step;
  answer.generation = ticket.number;
  Result<std::string> result = internal_error("not a writer's message");
  if (request.type == MessageType::kWrite) {
    answer.type = MessageType::kWritten;
    result = writer.write(request.step, static_cast<int>(request.value), ticket);
  } else if (request.type == MessageType::kCommit) {
    answer.type = MessageType::kCommitted;
    std::vector<std::string> records;
    for (size_t begin = 0; begin < rest.size();) {
      const size_t end = rest.find('\n', begin);
      records.emplace_back(rest.substr(begin, end - begin));
      begin = end == std::string_view::npos ? rest.size() : end + 1;
    }
    result = writer.commit(request.step, ticket, records);
  }
  answer.value = result.ok() ? kSaved : kSaveFailed;
  answer.body = result.ok() ? *result : result.status().message();
}

}  // namespace

int worker_main(const TrainProgram& program) {
  const int64_t began_ns = monotonic_ns();
  Child child;
  if (!child.take_setup().ok()) return kExitFailure;  // the agent is gone, or about to be
  child.time_start(began_ns);
  const ChildSetup& setup = child.context.setup;
  child.name_process("worker");
  LifeHolder life(&child.page->slots[setup.slot].life);
  Message alive;
  alive.type = MessageType::kAlive;
  if (!child.channel.send(alive, Deadline::after(kSetupPatience)).ok()) return kExitFailure;
  if (!child.take_segments(setup.world_size).ok()) return kExitFailure;
  const Status logging = child.start_log(setup.is_spare != 0 ? "spare" : "worker");
  ProcessWorkerLink link(*child.page.get(), setup.slot, setup.incarnation, std::move(child.channel));
  if (!logging.ok()) return fail(link, logging);
  if (child.context.start_times) child.context.start_times->mark("setup");
  Result<TrainerHolder> holder = create_trainer(program, child, link);
  if (!holder.ok()) return fail(link, holder.status());
  return train(*holder->trainer, link);
}

int writer_main(const TrainProgram& program) {
  make_thread_yielding();
  Child child;
  if (!child.take_setup().ok()) return kExitFailure;
  child.name_process("writer");
  while (!child.context.segment_fds[static_cast<size_t>(child.context.setup.rank)].valid()) {
    if (!child.take_segments(1).ok()) return kExitFailure;
  }
  if (!child.start_log("writer").ok()) return kExitFailure;
  Result<std::unique_ptr<ShardWriter>> writer = program.create_writer(child.context);
  while (true) {
    // Between two checkpoints there is nothing to do, for as long as it takes; the agent's end closes the channel.
    Result<Message> request = child.channel.receive(Deadline::never());
    if (request.status().code() == StatusCode::kDeadlineExceeded) continue;
    if (!request.ok()) return kExitOk;
    if (request->type == MessageType::kSegment) continue;
    if (request->type == MessageType::kAbandon) {
      if (!writer.ok()) continue;
      const Status removed = (*writer)->abandon(request->step, unpack<SaveTicket>(request->body));
      if (!removed.ok()) log().warn("step {}: {}", request->step, removed.message());
      continue;
    }
    Message answer;
    if (writer.ok()) {
      write_or_commit(**writer, *request, answer);
    } else {
      answer.type = request->type == MessageType::kWrite ? MessageType::kWritten : MessageType::kCommitted;
      answer.rank = request->rank;
      answer.step = request->step;
      answer.generation = unpack<SaveTicket>(request->body).number;
      answer.value = kSaveFailed;
      answer.body = writer.status().message();
    }
    if (answer.value != kSaved) log().error("step {}: {}", answer.step, answer.body);
    if (!child.channel.send(answer, Deadline::after(kSetupPatience)).ok()) return kExitOk;
  }
}

}  // namespace kintsugi::launch
