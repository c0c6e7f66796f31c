// The page, the channel and the link between an agent and its worker, both ends in this process; and the life line
// across a fork.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <future>
#include <string>
#include <thread>

#include "launch/channel.h"
#include "launch/control_page.h"
#include "launch/futex.h"
#include "launch/life_line.h"
#include "launch/process_worker_link.h"

namespace kintsugi::launch {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr int kSlot = 2;
Deadline soon() { return Deadline::after(seconds(20)); }

class WorkerLinkTest : public ::testing::Test {
 protected:
  void SetUp() override {
    Result<UniqueFd> fd = ControlPageMap::create_fd(5, 2);
    ASSERT_TRUE(fd.ok()) << fd.status().to_string();
    page_fd_ = std::move(*fd);
    page_ = *ControlPageMap::map(page_fd_.get());
    auto ends = *Channel::create_pair();
    agent_ = std::move(ends.first);
    link_ = std::make_unique<ProcessWorkerLink>(*page_.get(), kSlot, 77, std::move(ends.second));
  }
  IncarnationSlot& slot() { return page_->slots[kSlot]; }
  Message next() { return *agent_.receive(soon()); }
  void deliver(const Verdict& v) {
    slot().verdict = v;
    slot().verdict_generation.store(v.generation);
    futex_signal(slot().mail_word);
  }
  Verdict enter(int64_t generation, StateSource source = StateSource::kFresh, int64_t committed = 0) {
    Verdict v;
    v.generation = generation;
    v.source = source;
    v.committed_step = committed;
    auto waiting = std::async(std::launch::async, [&] { return *link_->await_verdict(generation - 1, soon()); });
    EXPECT_EQ(next().type, MessageType::kParked);
    deliver(v);
    return waiting.get();
  }

  UniqueFd page_fd_;
  ControlPageMap page_;
  Channel agent_;
  std::unique_ptr<ProcessWorkerLink> link_;
};

TEST_F(WorkerLinkTest, AVerdictWakesTheWorkerThatReportedItsCounters) {
  auto waiting = std::async(std::launch::async, [&] { return link_->await_verdict(0, soon()); });
  const Message parked = next();
  EXPECT_EQ(parked.type, MessageType::kParked);
  EXPECT_EQ(parked.rank, 5);
  EXPECT_EQ(parked.incarnation, 77);
  EXPECT_EQ(unpack<Progress>(parked.body).updated_step, -1);
  Verdict v;
  v.generation = 4;
  v.committed_step = 9;
  deliver(v);
  EXPECT_EQ(waiting.get()->committed_step, 9);
}

TEST_F(WorkerLinkTest, ProgressIsReadFromThePageWhateverHappensToTheWorker) {
  enter(1);
  link_->updated(0);
  link_->begun(1);
  EXPECT_EQ(page_->progress(kSlot).begun_step, 1);
  EXPECT_EQ(page_->progress(kSlot).updated_step, 0);
  link_->left_vote({.step = 1, .gradient_norm = 2.5, .loss_sum = 1, .num_tokens = 8});
  EXPECT_EQ(page_->progress(kSlot).reduced_step, 1);
  EXPECT_EQ(page_->progress(kSlot).vote.gradient_norm, 2.5);
  link_->updated(1);
  EXPECT_EQ(page_->progress(kSlot).updated_step, 1);
  EXPECT_EQ(page_->progress(kSlot).vote.num_tokens, 8) << "the vote that led here stays known";
}

TEST_F(WorkerLinkTest, LoadedStateForgetsVotesAndGradientsOfOtherSteps) {
  enter(1);
  link_->updated(0);
  link_->begun(1);
  link_->left_vote({.step = 1, .gradient_norm = 2.5, .loss_sum = 1, .num_tokens = 8});
  link_->updated(1);
  link_->updated(-1);
  EXPECT_EQ(page_->progress(kSlot).reduced_step, -1);
  link_->updated(40);
  const Progress p = page_->progress(kSlot);
  EXPECT_EQ(p.updated_step, 40);
  EXPECT_EQ(p.reduced_step, 40);
  EXPECT_EQ(p.begun_step, 40);
  EXPECT_EQ(p.vote.step, 0);
}

TEST_F(WorkerLinkTest, AVerdictThatReplacesTheStateMakesItCountNoMoreFromTheStart) {
  enter(1);
  link_->updated(0);
  enter(2, StateSource::kCheckpoint, 40);
  EXPECT_EQ(page_->progress(kSlot).updated_step, -1);
  link_->updated(40);
  enter(3, StateSource::kSurvivors, 40);
  EXPECT_EQ(page_->progress(kSlot).updated_step, 40) << "survivors keep theirs";
}

TEST_F(WorkerLinkTest, AnUpdateByTheVerdictsVoteKeepsThatVote) {
  enter(1);
  link_->updated(6);
  link_->begun(7);
  Verdict v;
  v.generation = 2;
  v.source = StateSource::kSurvivors;
  v.committed_step = 7;
  v.vote = {.step = 7, .gradient_norm = 3, .loss_sum = 1, .num_tokens = 8};
  auto waiting = std::async(std::launch::async, [&] { return *link_->await_verdict(1, soon()); });
  next();
  deliver(v);
  waiting.get();
  link_->updated(7);
  EXPECT_EQ(page_->progress(kSlot).vote.gradient_norm, 3);
}

TEST_F(WorkerLinkTest, TheFirstUpdateOfAGenerationIsReportedWithItsMilestones) {
  enter(1);
  link_->entered(EntryMilestone::kCommunicator);
  link_->entered(EntryMilestone::kState);
  link_->updated(0);
  link_->begun(1);
  link_->left_vote({.step = 1, .num_tokens = 8});
  link_->updated(1);
  const Message m = next();
  ASSERT_EQ(m.type, MessageType::kResumed);
  EXPECT_EQ(m.generation, 1);
  const auto t = unpack<EntryTimes>(m.body);
  EXPECT_LE(t.entered_ns, t.communicator_ns);
  EXPECT_LE(t.communicator_ns, t.state_ns);
  EXPECT_LE(t.state_ns, t.begun_ns);
  EXPECT_LE(t.begun_ns, t.committed_ns);
  link_->begun(2);
  link_->updated(2);
  EXPECT_FALSE(agent_.try_receive()->has_value()) << "once a generation";
}

TEST_F(WorkerLinkTest, TheStopTokenOfAGenerationIsRaisedByTheNextOne) {
  const StopToken one = link_->stop_token(1), two = link_->stop_token(2);
  EXPECT_FALSE(one.requested());
  page_->stop_generations_below(2);
  EXPECT_TRUE(one.requested());
  EXPECT_FALSE(two.requested());
  page_->stop_generations_below(1);
  EXPECT_TRUE(one.requested()) << "it never goes back";
}

TEST_F(WorkerLinkTest, AFaultIsClaimedOnceInTheJobWhoeverAsks) {
  EXPECT_TRUE(link_->claim_fault(3));
  EXPECT_GT(slot().fault_ns.load(), 0);
  EXPECT_FALSE(link_->claim_fault(3));
  page_->reset_slot(kSlot);
  EXPECT_FALSE(page_->claim_fault(3)) << "the next incarnation asks in vain";
  EXPECT_TRUE(page_->claim_fault(70));
  EXPECT_FALSE(page_->claim_fault(kMaxFaultEntries));
}

TEST_F(WorkerLinkTest, SnapshotSlotsAreHandedOverAndWaitedFor) {
  enter(1);
  const int first = link_->free_snapshot_slot(/*keep_newest=*/false);
  ASSERT_TRUE(link_->snapshot_ready(10, 320, first, /*save=*/true).ok());
  EXPECT_EQ(next().type, MessageType::kSnapshot);
  const int second = link_->free_snapshot_slot(/*keep_newest=*/false);
  EXPECT_NE(second, first);
  ASSERT_TRUE(link_->snapshot_ready(20, 640, second, /*save=*/true).ok());
  EXPECT_EQ(link_->free_snapshot_slot(/*keep_newest=*/false), -1);
  EXPECT_EQ(link_->await_snapshots(Deadline::after(milliseconds(1))).code(), StatusCode::kDeadlineExceeded);
  page_->settled_sequence = 2;
  futex_signal(page_->snapshot_word);
  EXPECT_TRUE(link_->await_snapshots(soon()).ok());
  std::string("no space").copy(page_->failure, sizeof page_->failure - 1);
  page_->failed_sequence = 2;
  EXPECT_EQ(link_->await_snapshots(soon()).message(), "no space");
}

TEST_F(WorkerLinkTest, TheNewestSnapshotInMemoryIsKeptUntilANewerOneIsComplete) {
  enter(1);
  const auto held = [&](int64_t step) { return link_->held_snapshot(step).slot; };
  const int a = link_->free_snapshot_slot(true);
  ASSERT_TRUE(link_->snapshot_ready(10, 100, a, /*save=*/false).ok());
  EXPECT_EQ(held(10), a);
  EXPECT_EQ(link_->held_snapshot(10).cursor, 100);
  const int b = link_->free_snapshot_slot(true);
  EXPECT_NE(a, b);
  EXPECT_EQ(held(10), a) << "while the other is filled";
  ASSERT_TRUE(link_->snapshot_ready(20, 200, b, /*save=*/true).ok());
  EXPECT_EQ(held(10), a);
  EXPECT_EQ(link_->free_snapshot_slot(true), a);
  EXPECT_EQ(held(10), -1) << "it may be half overwritten from here on";
  EXPECT_EQ(held(20), b);
  const Progress progress = page_->progress(kSlot);
  EXPECT_NE(std::find(std::begin(progress.held_steps), std::end(progress.held_steps), 20),
            std::end(progress.held_steps));
}

TEST_F(WorkerLinkTest, AStepThatWasKeptTwiceLeavesASlotFree) {
  enter(1);
  for (const int slot : {0, 1}) ASSERT_TRUE(link_->snapshot_ready(30, 100, slot, /*save=*/false).ok());
  const int free = link_->free_snapshot_slot(true);
  EXPECT_GE(free, 0);
  EXPECT_EQ(link_->held_snapshot(30).slot, 1 - free);
}

TEST_F(WorkerLinkTest, SnapshotsOfAnAbandonedFutureAreForgotten) {
  enter(1);
  ASSERT_TRUE(link_->snapshot_ready(10, 100, 0, /*save=*/false).ok());
  ASSERT_TRUE(link_->snapshot_ready(20, 200, 1, /*save=*/false).ok());
  enter(2, StateSource::kSnapshots, 10);
  EXPECT_EQ(link_->held_snapshot(10).slot, 0);
  EXPECT_EQ(link_->held_snapshot(20).slot, -1);
}

TEST_F(WorkerLinkTest, WaitingForSnapshotsEndsWithTheGeneration) {
  enter(1);
  ASSERT_TRUE(link_->snapshot_ready(10, 320, 0, /*save=*/true).ok());
  auto waiting = std::async(std::launch::async, [&] { return link_->await_snapshots(Deadline::never()); });
  page_->stop_generations_below(2);
  EXPECT_EQ(waiting.get().code(), StatusCode::kAborted);
}

TEST_F(WorkerLinkTest, ACompleteRankWaitsUntilAllAre) {
  enter(1);
  auto waiting = std::async(std::launch::async, [&] { return link_->finished("{}"); });
  Message m = next();
  while (m.type != MessageType::kFinished) m = next();
  EXPECT_EQ(m.body, "{}");
  slot().leave = 1;
  futex_signal(slot().mail_word);
  EXPECT_TRUE(waiting.get().ok());
}

TEST_F(WorkerLinkTest, ACompleteRankIsCalledBackWhenAPeerDies) {
  enter(1);
  auto waiting = std::async(std::launch::async, [&] { return link_->finished("{}"); });
  page_->stop_generations_below(2);
  EXPECT_EQ(waiting.get().code(), StatusCode::kAborted);
}

TEST_F(WorkerLinkTest, ALostAgentIsAnErrorNotAHang) {
  agent_.close();
  EXPECT_EQ(link_->publish("log", "x").code(), StatusCode::kUnavailable);
}

TEST(ChannelTest, MessagesArriveWholeInOrderAndWithDescriptors) {
  auto [a, b] = *Channel::create_pair();
  Message m;
  m.type = MessageType::kWrite;
  m.rank = 3;
  m.step = 1'000'000'000'000;
  m.body = std::string(Channel::kMaxBody, 'x');
  int pipe_fds[2];
  ASSERT_EQ(::pipe(pipe_fds), 0);
  m.fds.emplace_back(pipe_fds[1]);
  a.post(std::move(m));
  Message small;
  small.type = MessageType::kKill;
  a.post(std::move(small));
  const Message got = *b.receive(soon());
  EXPECT_EQ(got.step, 1'000'000'000'000);
  EXPECT_EQ(got.body.size(), Channel::kMaxBody);
  ASSERT_EQ(got.fds.size(), 1u);
  EXPECT_EQ(::write(got.fds[0].get(), "!", 1), 1);
  char c = 0;
  EXPECT_EQ(::read(pipe_fds[0], &c, 1), 1);
  EXPECT_EQ(c, '!');
  ::close(pipe_fds[0]);
  EXPECT_EQ(b.receive(soon())->type, MessageType::kKill);
}

TEST(ChannelTest, APosterNeverWaitsAndNothingIsLostWhenTheReaderIsSlow) {
  auto [a, b] = *Channel::create_pair();
  constexpr int kCount = 200;
  for (int i = 0; i < kCount; ++i) {
    Message m;
    m.type = MessageType::kPublish;
    m.step = i;
    m.body = std::string(10'000, 'x');
    a.post(std::move(m));
  }
  EXPECT_TRUE(a.wants_to_write()) << "more than a socket holds";
  for (int i = 0; i < kCount; ++i) {
    EXPECT_EQ(b.receive(soon())->step, i);
    a.flush();
  }
  EXPECT_FALSE(a.wants_to_write());
}

TEST(ChannelTest, APeersEndIsSeenAfterWhatItSent) {
  auto [a, b] = *Channel::create_pair();
  Message m;
  m.type = MessageType::kAlive;
  a.post(std::move(m));
  a.close();
  EXPECT_TRUE(b.receive(soon()).ok());
  EXPECT_EQ(b.receive(soon()).status().code(), StatusCode::kUnavailable);
}

// Between fork and the child's end only what a forked test may do: the holder is a thread, so the child makes one.
pid_t fork_holder(IncarnationSlot& slot, bool clean, int ready_fd) {
  const pid_t pid = ::fork();
  if (pid != 0) return pid;
  {
    LifeHolder holder(&slot.life);
    [[maybe_unused]] const ssize_t n = ::write(ready_fd, "r", 1);
    if (!clean) {
      while (true) ::pause();
    }
  }
  ::_exit(0);
}

TEST(LifeLineTest, AKilledHolderIsADeathAndADepartedOneIsNot) {
  for (const bool clean : {false, true}) {
    Result<UniqueFd> fd = ControlPageMap::create_fd(0, 0);
    ASSERT_TRUE(fd.ok());
    ControlPageMap page = *ControlPageMap::map(fd->get());
    int ready[2];
    ASSERT_EQ(::pipe(ready), 0);
    const pid_t pid = fork_holder(page->slots[0], clean, ready[1]);
    ASSERT_GT(pid, 0);
    char c;
    ASSERT_EQ(::read(ready[0], &c, 1), 1);
    std::promise<bool> ended;
    LifeWatcher watcher(&page->slots[0].life, [&](bool died, int64_t) { ended.set_value(died); });
    if (!clean) ::kill(pid, SIGKILL);
    EXPECT_EQ(ended.get_future().get(), !clean);
    ::waitpid(pid, nullptr, 0);
    ::close(ready[0]);
    ::close(ready[1]);
  }
}

}  // namespace
}  // namespace kintsugi::launch
