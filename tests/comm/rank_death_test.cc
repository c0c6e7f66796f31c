// Ranks as processes; one is killed with SIGKILL at a random moment inside a collective, the others stop, a new process
// takes its place, and the next generation works over the same segments at once: no clearing, no handshake.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <random>

#include "tests/comm/rank_world.h"

namespace kintsugi::comm {
namespace {

constexpr int kRanks = 4;
constexpr int64_t kCount = 60'000;

// What the parent and the ranks share, as an agent and its workers do.
struct Board {
  std::atomic<int64_t> stop_word{0};      // what runs below this generation ends
  std::atomic<int64_t> go{0};             // the generation that may begin
  std::atomic<bool> finish{false};        // nothing begins any more
  std::atomic<int64_t> verified[kRanks];  // last generation whose first collectives gave the right sums
  std::atomic<int64_t> stopped[kRanks];   // last generation that this rank has left
  std::atomic<int64_t> stopped_at_ns[kRanks];
};

NullStream g_stream;
Status end(Result<WorkPtr> work, Deadline deadline) { return work.ok() ? (*work)->wait(deadline) : work.status(); }

Status check_sums(Communicator& comm, float* x) {
  for (int64_t i = 0; i < kCount; ++i) x[i] = static_cast<float>(i % 23 + comm.rank());
  KTG_RETURN_IF_ERROR(end(comm.all_reduce(x, kCount, g_stream), soon()));
  int64_t wrong = 0;
  for (int64_t i = 0; i < kCount; ++i)
    wrong += x[i] != static_cast<float>(kRanks * (i % 23) + kRanks * (kRanks - 1) / 2);
  return wrong == 0 ? ok_status() : internal_error(std::to_string(wrong) + " wrong sums");
}

// Collectives of every kind, until one fails.
Status run_until_error(Communicator& comm, float* x, float* big, Deadline deadline) {
  std::vector<float> outside(kCount);
  while (true) {
    KTG_RETURN_IF_ERROR(end(comm.all_reduce(x, kCount, g_stream), deadline));
    KTG_RETURN_IF_ERROR(end(comm.all_reduce(x, 500, g_stream), deadline));
    KTG_RETURN_IF_ERROR(end(comm.all_reduce(outside.data(), kCount, g_stream), deadline));
    KTG_RETURN_IF_ERROR(end(comm.all_gather(big, x, kCount * 4, g_stream), deadline));
    KTG_RETURN_IF_ERROR(end(comm.reduce_scatter(x, big, kCount, g_stream), deadline));
    float* parts[] = {x};
    KTG_RETURN_IF_ERROR(end(comm.all_reduce_fixed(x, parts, kRanks, kCount, g_stream), deadline));
    KTG_RETURN_IF_ERROR(comm.barrier(deadline));
  }
}

// A rank's life from `generation` on. Returns 0 when told to finish, 1 when anything is not as it should be.
int run_rank(int rank, int64_t generation, Board& board, const std::vector<int>& fds, const CommConfig& config) {
  const auto maps = RankWorld::map_all(fds);
  float* x = static_cast<float*>(maps[rank]->allocate(kCount * 4, "x").value());
  float* big = static_cast<float*>(maps[rank]->allocate(kRanks * kCount * 4, "big").value());
  while (true) {
    const StopToken stop(&board.stop_word, generation);
    auto comm = create_host_communicator({generation, rank, kRanks}, RankWorld::pointers(maps), config, stop);
    Status status = comm.ok() ? check_sums(**comm, x) : comm.status();
    if (status.ok()) {
      board.verified[rank] = generation;
      status = run_until_error(**comm, x, big, soon());
    }
    if (status.code() != StatusCode::kAborted) {
      std::fprintf(stderr, "rank %d generation %ld: %s\n", rank, static_cast<long>(generation),
                   status.to_string().c_str());
      return 1;
    }
    board.stopped_at_ns[rank] = monotonic_ns();
    board.stopped[rank] = generation;
    while (board.go.load() == generation) {
      if (board.finish) return 0;
      ::sched_yield();
    }
    generation = board.go;
  }
}

class Job {
 public:
  explicit Job(const std::string& algorithm) : world_(BackendKind::kHost, kRanks, 4 << 20) {
    config_.algorithm = algorithm;
    void* page = ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    KTG_CHECK(page != MAP_FAILED);
    board_ = new (page) Board();
  }
  ~Job() {
    for (pid_t pid : pids_) {
      if (pid > 0) kill_and_reap(pid);
    }
    ::munmap(board_, sizeof(Board));
  }
  Board& board() { return *board_; }

  void start(int rank, int64_t generation) {
    std::fflush(nullptr);
    const pid_t pid = ::fork();
    KTG_CHECK(pid >= 0);
    if (pid == 0) ::_exit(run_rank(rank, generation, *board_, world_.fds(), config_));
    pids_[rank] = pid;
  }
  void kill(int rank) { kill_and_reap(std::exchange(pids_[rank], 0)); }

  // True once `words` of all ranks but `except` are at least `value`; false when a rank has ended instead.
  bool reached(const std::atomic<int64_t>* words, int64_t value, int except = -1) {
    const Deadline limit = soon();
    for (int r = 0; r < kRanks; ++r) {
      while (r != except && words[r].load() < value) {
        if (limit.passed() || ::waitpid(pids_[r], nullptr, WNOHANG) != 0) return false;
        ::sched_yield();
      }
    }
    return true;
  }
  bool finish() {
    board_->finish = true;
    board_->stop_word = int64_t{1} << 40;
    bool good = true;
    for (pid_t& pid : pids_) {
      int status = 0;
      good &= ::waitpid(std::exchange(pid, 0), &status, 0) > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0;
    }
    return good;
  }

 private:
  static void kill_and_reap(pid_t pid) {
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
  }
  RankWorld world_;
  CommConfig config_;
  Board* board_ = nullptr;
  pid_t pids_[kRanks] = {};
};

class RankDeathTest : public testing::TestWithParam<const char*> {};

TEST_P(RankDeathTest, TheNextGenerationWorksAfterAKillAtAnyMoment) {
  constexpr unsigned kSeed = 11;
  constexpr int kKills = 60;
  SCOPED_TRACE(kSeed);
  std::mt19937 random(kSeed);
  Job job(GetParam());
  Board& board = job.board();
  board.go = 1;
  board.stop_word = 1;
  for (int r = 0; r < kRanks; ++r) job.start(r, 1);
  std::vector<int64_t> stop_ns;
  for (int64_t generation = 1; generation <= kKills; ++generation) {
    // Every third kill may fall into the set-up or the first collective.
    if (generation % 3 != 0) {
      ASSERT_TRUE(job.reached(board.verified, generation)) << "generation " << generation;
    }
    // The moment of the kill is what is random here; nothing waits for this sleep.
    const timespec pause{.tv_sec = 0, .tv_nsec = static_cast<long>(random() % 3'000'000)};
    ::nanosleep(&pause, nullptr);
    const int victim = static_cast<int>(random() % kRanks);
    job.kill(victim);
    const int64_t announced = monotonic_ns();
    board.stop_word = generation + 1;
    ASSERT_TRUE(job.reached(board.stopped, generation, victim)) << "generation " << generation;
    for (int r = 0; r < kRanks; ++r) {
      if (r != victim) stop_ns.push_back(board.stopped_at_ns[r] - announced);
    }
    board.go = generation + 1;
    job.start(victim, generation + 1);
  }
  ASSERT_TRUE(job.reached(board.verified, kKills + 1));
  EXPECT_TRUE(job.finish());
  std::sort(stop_ns.begin(), stop_ns.end());
  const int64_t median_us = stop_ns[stop_ns.size() / 2] / 1000;
  std::printf("stop word to stopped: median %ld us, slowest %ld us\n", static_cast<long>(median_us),
              static_cast<long>(stop_ns.back() / 1000));
  EXPECT_LT(median_us, 100'000);  // a few milliseconds on a quiet machine
}

INSTANTIATE_TEST_SUITE_P(Algorithms, RankDeathTest, testing::Values("direct", "ring", "tree"),
                         [](const testing::TestParamInfo<const char*>& name) { return std::string(name.param); });

TEST(RankDeathTest, WithoutAStopWordSurvivorsEndAtTheirDeadline) {
  RankWorld world(BackendKind::kHost, kRanks, 4 << 20);
  std::vector<float*> x;
  for (int r = 0; r < kRanks; ++r) x.push_back(world.floats(r, kCount));
  world.begin(1);
  const pid_t victim = ::fork();
  ASSERT_GE(victim, 0);
  if (victim == 0) {  // takes part once, then is gone without a word
    [[maybe_unused]] const Status ignored =
        end(world.join(0, CommConfig{})->all_reduce(x[0], kCount, g_stream), soon());
    ::raise(SIGKILL);
  }
  std::vector<std::unique_ptr<Communicator>> comms;
  std::vector<std::thread> survivors;
  for (int r = 1; r < kRanks; ++r) comms.push_back(world.join(r, CommConfig{}));
  for (int r = 1; r < kRanks; ++r) {
    survivors.emplace_back([&, r] {
      Communicator& comm = *comms[r - 1];
      EXPECT_TRUE(end(comm.all_reduce(x[r], kCount, g_stream), soon()).ok());
      const Status got = end(comm.all_reduce(x[r], kCount, g_stream), Deadline::after(std::chrono::milliseconds(100)));
      const bool told = got.code() == StatusCode::kAborted &&
                        got.message().find("DEADLINE_EXCEEDED") != std::string::npos;  // by the first that gave up
      EXPECT_TRUE(told || got.code() == StatusCode::kDeadlineExceeded) << got.to_string();
    });
  }
  for (auto& t : survivors) t.join();
  int status = 0;
  EXPECT_EQ(::waitpid(victim, &status, 0), victim);
  EXPECT_TRUE(WIFSIGNALED(status));
  world.run(2, CommConfig{}, [&](Communicator& comm) { EXPECT_TRUE(check_sums(comm, x[comm.rank()]).ok()); });
}

}  // namespace
}  // namespace kintsugi::comm
