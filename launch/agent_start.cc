// How an agent starts: signals, its rank's memory and worker, and the meeting of all agents.
#include <fmt/format.h>
#include <signal.h>
#include <sys/signalfd.h>

#include <algorithm>
#include <cstring>

#include "launch/agent_impl.h"
#include "runtime/base/log.h"

namespace kintsugi::launch {
namespace {

constexpr auto kMeetingPatience = std::chrono::seconds(120);  // for all ranks to come

uint64_t hash_of(const std::string& text) { return std::hash<std::string>()(text); }

}  // namespace

Status Agent::take_signals() {
  ::signal(SIGPIPE, SIG_IGN);  // a reader of our output that goes away must not end a training
  sigset_t set;
  sigemptyset(&set);
  for (const int s : {SIGINT, SIGTERM, SIGUSR1}) sigaddset(&set, s);
  // Before any thread is made, so that none of them takes one.
  if (pthread_sigmask(SIG_BLOCK, &set, nullptr) != 0) return status_from_errno(errno, "signal mask");
  signals_ = UniqueFd(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!signals_.valid()) return status_from_errno(errno, "signalfd");
  loop_.add(signals_.get(), [this] { on_signal(); });
  return ok_status();
}

// The worker starts first, and sets itself up while the agents find each other.
Status Agent::start_rank() {
  const RankFacts& facts = start_.facts;
  KTG_RETURN_IF_ERROR(start_.config.ok() ? ok_status() : start_.config.status());
  const AgentConfig& config = *start_.config;
  HeldRank& held = held_[facts.rank];
  KTG_ASSIGN_OR_RETURN(held.child.page_fd, ControlPageMap::create_fd(facts.rank, config.num_snapshot_slots));
  KTG_ASSIGN_OR_RETURN(held.page, ControlPageMap::map(held.child.page_fd.get()));
  ChildSetup& setup = held.child.setup;
  setup.rank = facts.rank;
  setup.world_size = facts.world_size;
  setup.local_rank = facts.local_rank;
  setup.num_threads = start_.num_threads;
  setup.program_began_ns = start_.began_ns;
  if (config.out_dir.size() >= sizeof setup.out_dir) {
    return invalid_argument(
        fmt::format("--out: {} bytes of path, at most {}", config.out_dir.size(), sizeof setup.out_dir - 1));
  }
  std::memcpy(setup.out_dir, config.out_dir.c_str(), config.out_dir.size() + 1);
  held.child.config_toml = config.config_toml;
  held.child.segment_fds.resize(static_cast<size_t>(facts.world_size));
  hold(facts.rank, held);
  KTG_RETURN_IF_ERROR(held.processes->start());
  // Behind the worker's start: reserving its pages takes time that it needs for itself anyway.
  KTG_ASSIGN_OR_RETURN(held.child.segment_fds[static_cast<size_t>(facts.rank)],
                       program_.create_segment(config, facts.rank, facts.world_size));
  held.processes->segment_known(facts.rank);
  return ok_status();
}

void Agent::hold(int rank, HeldRank& held) {
  const auto report = [this, rank](Message m) { to_coordinator(rank, std::move(m)); };
  held.processes = std::make_unique<RankProcesses>(loop_, *held.page.get(), held.child, start_.config->spares,
                                                   held.first_incarnation, report, [&held] { held.snapshots->scan(); });
  held.snapshots = std::make_unique<SnapshotKeeper>(loop_, *held.page.get(), held.child, report);
}

Message Agent::hello() const {
  const RankFacts& facts = start_.facts;
  Hello h;
  point_.token.copy(h.token, sizeof h.token - 1);
  h.world_size = facts.world_size;
  h.local_rank = facts.local_rank;
  h.exit_code = start_status_.ok() ? 0 : exit_code_of(start_status_);
  h.config_hash = start_.config.ok() ? hash_of(start_.config->config_toml) : 0;
  Message m;
  m.type = MessageType::kHello;
  m.rank = facts.rank;
  m.body = pack(h) + start_status_.message();
  if (start_status_.ok()) {
    const ChildTemplate& child = held_.at(facts.rank).child;
    for (const UniqueFd* fd : {&child.segment_fds[static_cast<size_t>(facts.rank)], &child.page_fd}) {
      m.fds.push_back(fd->duplicate());
    }
  }
  return m;
}

Status Agent::meet() {
  const Deadline deadline = Deadline::after(kMeetingPatience);
  KTG_ASSIGN_OR_RETURN(point_, agree_on_meeting_point(start_.facts, start_.environment, deadline));
  if (start_.facts.rank == 0)
    host(deadline);
  else
    join(deadline);
  if (leaving_ || running_) return ok_status();
  return deadline_exceeded(
      fmt::format("rank {}: the {} ranks of this job did not meet within {} s; {} says there are so many",
                  start_.facts.rank, start_.facts.world_size, kMeetingPatience.count(), start_.facts.launcher_name));
}

void Agent::join(Deadline deadline) {
  while (!leaving_ && !deadline.passed()) {
    Result<Channel> channel = try_to_join(point_);
    if (channel.ok()) {
      coordinator_channel_ = std::move(*channel);
      break;
    }
    loop_.run_once(monotonic_ns() + 5 * kNsPerMs);
  }
  if (!coordinator_channel_.open()) return;
  loop_.add(
      coordinator_channel_.fd(), [this] { read_coordinator(); },
      [this] { return coordinator_channel_.wants_to_write(); });
  coordinator_channel_.post(hello());
  for (Message& m : unsent_) coordinator_channel_.post(std::move(m));
  unsent_.clear();
  running_ = true;
}

void Agent::open_job() {
  if (start_status_.ok()) {
    Result<JobOpening> opening = start_.open_job(start_.facts);
    if (opening.ok())
      job_.emplace(std::move(*opening));
    else
      start_status_ = opening.status();
  }
  if (job_.has_value()) return;
  JobOpening silent;  // only to tell everybody that nothing begins
  silent.plan.world_size = start_.facts.world_size;
  silent.publish = [](std::string_view, std::string_view) {};
  silent.plan.print = [](std::string_view) {};
  silent.plan.print_error = [](std::string_view text) { fmt::print(stderr, "{}", text); };
  job_.emplace(std::move(silent));
}

void Agent::host(Deadline deadline) {
  const auto size = static_cast<size_t>(start_.facts.world_size);
  agents_.resize(size);
  hellos_.resize(size);
  failures_.resize(size);
  memories_.resize(size);
  open_job();
  on_hello(Channel(), hello());
  std::vector<Channel> strangers;  // connected, and have not said who they are
  if (point_.listener.valid()) {
    loop_.add(point_.listener.get(), [this, &strangers] {
      Result<Channel> channel = accept_one(point_);
      if (!channel.ok()) return log().warn("{}", channel.status().message());
      if (channel->open()) strangers.push_back(std::move(*channel));
    });
  }
  const auto missing = [this] {
    return std::any_of(hellos_.begin(), hellos_.end(), [](const Hello& h) { return h.world_size == 0; });
  };
  while (missing() && !leaving_ && !deadline.passed()) {
    for (Channel& c : strangers) loop_.add(c.fd(), [] {});
    loop_.run_once(deadline.when().time_since_epoch().count());
    for (Channel& c : strangers) {
      loop_.remove(c.fd());
      Result<std::optional<Message>> message = c.try_receive();
      if (!message.ok())
        c.close();
      else if (message->has_value())
        on_hello(std::move(c), std::move(**message));
    }
    std::erase_if(strangers, [](const Channel& c) { return !c.open(); });
  }
  if (point_.listener.valid()) loop_.remove(point_.listener.get());
  point_.listener.reset();
  if (!missing()) all_here();
}

void Agent::on_hello(Channel channel, Message message) {
  if (message.type != MessageType::kHello || message.rank < 0 || message.rank >= start_.facts.world_size) return;
  std::string_view text;
  const std::optional<Hello> hello = read_hello(message.body, &text);
  if (!hello.has_value()) return log().warn("a process that is no agent tried to join");
  const Hello& h = *hello;
  const auto rank = static_cast<size_t>(message.rank);
  if (std::string_view(h.token) != point_.token) return log().warn("a process of another job tried to join");
  if (hellos_[rank].world_size != 0) return log().warn("two processes say that they are rank {}", rank);
  hellos_[rank] = h;
  failures_[rank] = text;
  if (h.exit_code == 0 && h.world_size != start_.facts.world_size) {
    hellos_[rank].exit_code = kExitBadConfig;
    failures_[rank] =
        fmt::format("it says that there are {} ranks, rank 0 says {}", h.world_size, start_.facts.world_size);
  } else if (h.exit_code == 0 && hellos_[0].exit_code == 0 && h.config_hash != hellos_[0].config_hash) {
    hellos_[rank].exit_code = kExitBadConfig;
    failures_[rank] = "its configuration differs from rank 0's";
  }
  memories_[rank] = std::move(message);
  agents_[rank] = std::move(channel);
}

void Agent::all_here() {
  point_.keeps_alive.reset();
  for (int r = 1; r < start_.facts.world_size; ++r) {
    Channel& c = agents_[static_cast<size_t>(r)];
    loop_.add(
        c.fd(), [this, r] { read_agent(r); }, [&c] { return c.wants_to_write(); });
  }
  running_ = true;
  for (const Hello& h : hellos_) job_->plan.local_ranks.push_back(h.local_rank);
  coordinator_ = std::make_unique<Coordinator>(
      job_->plan, [this](int agent, Message m) { to_agent(agent, std::move(m)); }, job_->publish, monotonic_ns());
  for (size_t r = 0; r < hellos_.size(); ++r) {
    if (hellos_[r].exit_code == 0) continue;
    return coordinator_->end(hellos_[r].exit_code, r == 0 ? failures_[r] : fmt::format("rank {}: {}", r, failures_[r]));
  }
  for (size_t r = 0; r < memories_.size(); ++r) {
    for (size_t to = 0; to < memories_.size(); ++to) {
      if (to == r) continue;
      Message m;
      m.type = MessageType::kPeer;
      m.rank = static_cast<int32_t>(r);
      for (const UniqueFd& fd : memories_[r].fds) m.fds.push_back(fd.duplicate());
      to_agent(static_cast<int>(to), std::move(m));
    }
  }
  memories_.clear();
}

}  // namespace kintsugi::launch
