// What an agent does when another one dies: the rank's memory is mapped here as well, so another agent of the host
// takes the rank, starts a worker for it over the same memory, and the job recovers as from any dead worker. Only where
// the launcher lets the others live.
#include <fmt/format.h>

#include <cstdio>

#include "launch/agent_impl.h"

namespace kintsugi::launch {
namespace {

// The kernel ends a dead agent's children; how long that takes grows with their memory.
constexpr int64_t kAdoptionPollNs = 2 * kNsPerMs;

}  // namespace

void Agent::add_peer(Message m) {
  KTG_CHECK(m.fds.size() == 2) << m.fds.size() << " descriptors of rank " << m.rank;
  Result<ControlPageMap> page = ControlPageMap::map(m.fds[1].get());
  if (!page.ok()) {
    Message failed;
    failed.type = MessageType::kFailed;
    failed.value = kExitFailure;
    failed.body = page.status().message();
    return to_coordinator(start_.facts.rank, std::move(failed));
  }
  peers_[m.rank] = Peer{.page_fd = std::move(m.fds[1]), .page = std::move(*page)};
  own().child.segment_fds[static_cast<size_t>(m.rank)] = std::move(m.fds[0]);
  own().processes->segment_known(m.rank);
  if (peers_.size() + 1 == static_cast<size_t>(start_.facts.world_size)) own().processes->set_host_pages(host_pages());
}

std::vector<ControlPage*> Agent::host_pages() {
  std::vector<ControlPage*> pages{own().page.get()};
  for (const auto& [rank, peer] : peers_) pages.push_back(peer.page.get());
  return pages;
}

// Agent 0, which has every page of the job.
void Agent::agent_lost(int agent) {
  coordinator_->on_agent_lost(agent, [this](int rank) { return peers_.at(rank).page->newest_progress(); });
}

void Agent::coordinator_lost() {
  if (leaving_) return;
  const auto zero = peers_.find(0);
  if (zero != peers_.end() && zero->second.page->obituary.exchange(1) == 0) {
    fmt::print(stderr,
               "error: the agent of rank 0 is gone, and with it the job's control (ranks of other agents can be "
               "adopted, rank 0's cannot); --resume goes on from the newest checkpoint\n");
  }
  stop_now(kExitFailure);
}

void Agent::adopt(const Message& m) {
  const auto peer = peers_.find(m.rank);
  KTG_CHECK(peer != peers_.end() && !held_.contains(m.rank)) << "adoption of rank " << m.rank;
  HeldRank& held = held_[m.rank];
  held.first_incarnation = m.incarnation;
  ChildTemplate& child = held.child;
  child.setup = own().child.setup;
  child.setup.rank = m.rank;
  child.setup.local_rank = static_cast<int32_t>(m.value);
  child.config_toml = own().child.config_toml;
  child.page_fd = peer->second.page_fd.duplicate();
  for (const UniqueFd& fd : own().child.segment_fds) child.segment_fds.push_back(fd.duplicate());
  Result<ControlPageMap> page = ControlPageMap::map(child.page_fd.get());
  KTG_CHECK(page.ok()) << page.status().message();  // it is mapped here already
  held.page = std::move(*page);
  // Whoever died may have been told to stop, and this agent not yet, or the other way round.
  if (own().page->stop_requested.load() != 0) held.page->stop_requested = 1;
  start_adopted();
}

// No process may come to the rank's memory while one of the dead agent's still writes to it.
void Agent::start_adopted() {
  adoption_due_ns_ = kNever;
  for (auto& [rank, held] : held_) {
    if (held.processes) continue;
    if (!held.page->all_processes_ended()) {
      adoption_due_ns_ = monotonic_ns() + kAdoptionPollNs;
      continue;
    }
    hold(rank, held);
    held.processes->set_host_pages(host_pages());
    if (const Status started = held.processes->start(); !started.ok()) {
      Message failed;
      failed.type = MessageType::kFailed;
      failed.value = kExitFailure;
      failed.body = started.with_context("no worker can be started for the adopted rank").message();
      to_coordinator(rank, std::move(failed));
      continue;
    }
    held.snapshots->take_over();
    for (Message& m : std::exchange(held.waiting, {})) for_rank(held, std::move(m));
  }
}

}  // namespace kintsugi::launch
