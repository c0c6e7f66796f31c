// The processes of one rank, seen from its agent: the active worker, its spares, and the dead that are still being
// reaped. A spare is a worker that has not been given a verdict yet: making it the active one is all that a replacement
// takes.
//
// All on the agent's main thread, except the watchers, which raise the stop words of all ranks of the host at once.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "launch/agent_messages.h"
#include "launch/channel.h"
#include "launch/child_process.h"
#include "launch/control_page.h"
#include "launch/event_loop.h"
#include "launch/life_line.h"

namespace kintsugi::launch {

// What every child of an agent is given; the setup's slot and incarnation are filled in for each.
struct ChildTemplate {
  ChildSetup setup;
  std::string config_toml;
  UniqueFd page_fd;
  std::vector<UniqueFd> segment_fds;  // by rank; not valid: not known yet
};

struct SpawnedChild {
  ChildProcess process;
  Channel channel;
};
// Starts this program in another role ("worker", "writer") and sends it its setup.
Result<SpawnedChild> spawn_child(const char* role, const ChildTemplate& child, const ChildSetup& setup);
// A message with rank `rank`'s segment.
Message segment_message(int rank, const UniqueFd& fd);

class RankProcesses {
 public:
  using Report = std::function<void(Message)>;
  // `report` takes what the coordinator must know, `on_snapshot` says that the page may hold a new one.
  // Processes are numbered from `first_incarnation`.
  RankProcesses(EventLoop& loop, ControlPage& page, const ChildTemplate& child, int64_t num_spares,
                int64_t first_incarnation, Report report, std::function<void()> on_snapshot);
  // Kills and reaps all that is left.
  ~RankProcesses();

  // Starts the first worker.
  Status start();
  // A segment has become known: children that run get it, too.
  void segment_known(int rank);
  // Pages whose stop words are raised when this rank's worker dies: all of this host.
  void set_host_pages(std::vector<ControlPage*> pages);

  void announce(int64_t generation);
  // Dropped when `incarnation` is not the active one any more: its death is on its way to the coordinator.
  void deliver(const Verdict& verdict, int64_t incarnation);
  void kill_late(int64_t incarnation);
  // The job is complete: workers may end by themselves, and spares are ended.
  void leave();
  // Kills all.
  void end();
  bool all_gone() const { return incarnations_.empty(); }
  Roster roster() const;
  // The active worker's count of signs of life, and the generation it runs; generation 0: none.
  std::pair<int64_t, int64_t> heartbeat() const;

 private:
  struct Incarnation {
    int64_t id;
    int slot;
    SpawnedChild child;
    std::unique_ptr<LifeWatcher> watcher;
    std::atomic<bool> active{false};
    std::atomic<int64_t> ended_ns{0};  // by the watcher
    std::atomic<int64_t> announced_ns{0};
    bool is_spare = false;
    bool parked = false;  // it waits for its first verdict
    bool failed = false;  // it said so
    bool killed_late = false;
    bool gone = false;  // dead, and that has been dealt with
  };

  Status spawn(bool as_spare);
  void on_message(Incarnation& child, Message message);
  void drain(Incarnation& child);
  void watched_end(Incarnation& child, bool died, int64_t now_ns);  // on the watcher's thread
  void on_watch_event();
  void on_exit(Incarnation& child);
  void bury(Incarnation& child, int64_t detected_ns);
  void activate_replacement();
  void refill_spares();
  void report_roster();
  Incarnation* active();
  int free_slot() const;

  EventLoop& loop_;
  ControlPage& page_;
  const ChildTemplate& child_;
  const int64_t num_spares_;
  const Report report_;
  const std::function<void()> on_snapshot_;
  UniqueFd watch_event_;
  std::list<Incarnation> incarnations_;
  int64_t next_incarnation_;
  int64_t wasted_spares_ = 0;  // in a row that ended before they were ready
  bool leaving_ = false;
  std::atomic<int64_t> delivered_generation_{0};
  std::mutex host_pages_mutex_;
  std::vector<ControlPage*> host_pages_;
};

}  // namespace kintsugi::launch
