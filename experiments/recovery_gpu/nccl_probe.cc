// Communicators alone: how long until ranks on GPUs sum again after one of them was killed, with nothing to train.
//
//   nccl_probe --ranks 4 --kills 10 [--json FILE]
//
// Each rank is a process that sums 1 MiB again and again. This program kills one at a random moment and raises the stop
// word at once (in a training run the agents do that, 0.1 ms after the death). Survivors abort NCCL; a spare process,
// whose context and libraries are loaded, takes the rank; all make a new communicator. Times are from just before
// kill(2) to the last rank:
//   drain     no kernel runs any more
//   connect   the new communicator stands
//   sum       its first sum is done
//   abort     NCCL has let go of the old communicators (beside the new ones' start)
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>
#include <vector>

#include "comm/host/host_communicator.h"
#include "comm/nccl/device_heap.h"
#include "comm/nccl/nccl_communicator.h"
#include "comm/nccl/nccl_environment.h"
#include "runtime/cuda/cuda_backend.h"

namespace kintsugi {
namespace {

constexpr int kMaxProcesses = 64;
constexpr int64_t kCount = 1 << 18;
constexpr auto kPatience = std::chrono::seconds(60);

enum Moment { kDrained, kConnected, kSummed, kAborted, kNumMoments };
constexpr const char* kNames[] = {"drain", "connect", "sum", "abort"};

struct Page {
  std::atomic<int64_t> stop_word{0};
  std::atomic<int64_t> generation{0};  // the newest that has been set up
  std::atomic<int64_t> warm{0};        // processes that could take a rank
  std::atomic<int64_t> left{0};        // survivors that have let go of the newest generation
  std::atomic<int> rank_of[kMaxProcesses];
  std::atomic<int64_t> sums{0};
  std::atomic<int64_t> at[kNumMoments][kMaxProcesses];  // by rank
  std::atomic<int64_t> free_before{0}, free_after{0};   // of device memory: the first communicators and their first sum
};

Deadline patience() { return Deadline::after(kPatience); }

Status wait_until(const std::function<bool()>& condition, const char* what) {
  const Deadline limit = patience();
  while (!condition()) {
    if (limit.passed()) return deadline_exceeded(what);
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return ok_status();
}

// One process: a rank once it is told which.
class Process {
 public:
  Process(int index, int world_size, const std::vector<int>& fds, Page& page)
      : index_(index), world_size_(world_size), fds_(fds), page_(page) {}
  ~Process() {
    end_ = true;
    if (watcher_.joinable()) watcher_.join();
  }

  Status run() {
    KTG_RETURN_IF_ERROR(prepare());
    page_.warm.fetch_add(1);
    for (int64_t last = 0;;) {
      while (page_.generation.load() <= last || page_.rank_of[index_].load() < 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
      last = page_.generation;
      KTG_RETURN_IF_ERROR(live(last, page_.rank_of[index_]));
    }
  }

 private:
  Status prepare() {
    devices_ = runtime::count_cuda_devices().count;
    if (devices_ == 0) return failed_precondition(runtime::count_cuda_devices().why_none);
    // A spare does not know its rank yet; any name that no other process has will do.
    for (const comm::EnvironmentEntry& e : comm::nccl_environment({}, {index_, world_size_, devices_})) {
      ::setenv(e.name.c_str(), e.value.c_str(), e.overrides ? 1 : 0);
    }
    KTG_ASSIGN_OR_RETURN(backend_, runtime::create_cuda_backend({.device = index_ % world_size_ % devices_}));
    KTG_ASSIGN_OR_RETURN(heap_, comm::DeviceHeap::create(*backend_, kCount * 4));
    KTG_ASSIGN_OR_RETURN(stream_, backend_->create_stream());
    for (const int fd : fds_) {
      KTG_ASSIGN_OR_RETURN(segments_.emplace_back(), comm::SharedSegment::map(fd));
    }
    KTG_RETURN_IF_ERROR(comm::warm_up_nccl());
    watcher_ = std::thread([this] {
      for (int64_t seen = 0; !end_;) {
        const int64_t stop = page_.stop_word;
        if (stop > seen && comm::NcclRegistry::process().size() > 0) {
          comm::NcclRegistry::process().abort_all(stop - 1, aborted("a peer died"));
          (void)comm::NcclRegistry::process().wait_for_aborts(patience()).ok();
          page_.at[kAborted][page_.rank_of[index_]] = monotonic_ns();
          seen = stop;
        }
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
    });
    return ok_status();
  }

  Status live(int64_t generation, int rank) {
    const StopToken stop(&page_.stop_word, generation);
    std::vector<comm::SharedSegment*> segments;
    for (const auto& s : segments_) segments.push_back(s.get());
    KTG_ASSIGN_OR_RETURN(const auto control,
                         comm::create_host_communicator({generation, rank, world_size_}, segments, {}, stop));
    if (generation == 1) KTG_RETURN_IF_ERROR(note_memory(*control, page_.free_before));
    KTG_ASSIGN_OR_RETURN(auto nccl, comm::create_nccl_communicator(
                                        {.control = control.get(), .backend = backend_.get(), .heap = heap_.get()}, {},
                                        stop, patience()));
    KTG_RETURN_IF_ERROR(nccl->barrier(patience()));
    page_.at[kConnected][rank] = monotonic_ns();
    stream_->set_stop_token(stop);
    for (bool first = true;; first = false) {
      const Status summed = sum(*nccl);
      if (!summed.ok() && summed.code() != StatusCode::kAborted) return summed;
      if (!summed.ok()) break;
      if (first) page_.at[kSummed][rank] = monotonic_ns();
      if (first && generation == 1) KTG_RETURN_IF_ERROR(note_memory(*control, page_.free_after));
      page_.sums.fetch_add(1);
    }
    stream_->set_stop_token({});
    KTG_RETURN_IF_ERROR(stream_->synchronize(patience()));
    KTG_RETURN_IF_ERROR(nccl->drain(patience()));
    page_.at[kDrained][rank] = monotonic_ns();
    nccl.reset();
    page_.left.fetch_add(1);
    return ok_status();
  }

  // Between two barriers: no rank takes or gives back any.
  Status note_memory(comm::Communicator& control, std::atomic<int64_t>& free) {
    KTG_RETURN_IF_ERROR(control.barrier(patience()));
    KTG_ASSIGN_OR_RETURN(const runtime::DeviceMemory memory, backend_->memory());
    free = memory.available_bytes;
    return control.barrier(patience());
  }

  Status sum(comm::Communicator& nccl) {
    KTG_ASSIGN_OR_RETURN(const comm::WorkPtr work,
                         nccl.all_reduce(reinterpret_cast<float*>(heap_->data()), kCount, *stream_));
    KTG_RETURN_IF_ERROR(work->wait(patience()));
    return stream_->synchronize(patience());
  }

  const int index_, world_size_;
  const std::vector<int>& fds_;
  Page& page_;
  int devices_ = 0;
  std::unique_ptr<runtime::Backend> backend_;
  std::unique_ptr<comm::DeviceHeap> heap_;
  std::unique_ptr<runtime::Stream> stream_;
  std::vector<std::unique_ptr<comm::SharedSegment>> segments_;
  std::atomic<bool> end_{false};
  std::thread watcher_;
};

class Probe {
 public:
  Probe(int ranks, unsigned seed) : ranks_(ranks), random_(seed) {}
  ~Probe() {
    for (const pid_t pid : pids_) {
      if (pid <= 0) continue;
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
    for (const int fd : fds_) ::close(fd);
  }

  Status begin() {
    void* memory = ::mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return status_from_errno(errno, "shared page");
    page_ = new (memory) Page;
    for (auto& rank : page_->rank_of) rank = -1;
    for (int r = 0; r < ranks_; ++r) {
      KTG_ASSIGN_OR_RETURN(const int fd, comm::SharedSegment::create_fd(1 << 16, ranks_, r));
      fds_.push_back(fd);
      page_->rank_of[r] = r;
    }
    for (int i = 0; i <= ranks_; ++i) start();  // one more: the spare
    KTG_RETURN_IF_ERROR(wait_until([&] { return page_->warm.load() == ranks_ + 1; }, "processes do not start"));
    page_->generation = 1;
    return wait_until([&] { return all_after(kSummed, 1); }, "the first sum is not done");
  }

  // Of one rank, where all share one GPU: the mean.
  int64_t communicator_bytes() const { return (page_->free_before - page_->free_after) / ranks_; }

  // Milliseconds from the kill to each moment.
  Result<std::vector<double>> kill_one() {
    const int64_t sums = page_->sums;
    KTG_RETURN_IF_ERROR(wait_until([&] { return page_->sums.load() > sums + 2 * ranks_; }, "nobody sums"));
    std::this_thread::sleep_for(std::chrono::microseconds(random_() % 200'000));
    const int victim_rank = static_cast<int>(random_() % static_cast<unsigned>(ranks_));
    size_t victim = 0;
    while (page_->rank_of[victim] != victim_rank || pids_[victim] <= 0) ++victim;
    const size_t spare = pids_.size() - 1;
    page_->left = 0;
    const int64_t generation = page_->generation;

    const int64_t t0 = monotonic_ns();
    ::kill(pids_[victim], SIGKILL);
    page_->stop_word = generation + 1;
    KTG_RETURN_IF_ERROR(wait_until([&] { return page_->left.load() == ranks_ - 1; }, "survivors do not let go"));
    page_->rank_of[spare] = victim_rank;
    page_->generation = generation + 1;
    KTG_RETURN_IF_ERROR(wait_until([&] { return all_after(kSummed, t0); }, "no sum in the new generation"));
    page_->at[kAborted][victim_rank] = t0;  // the spare has none to let go of
    KTG_RETURN_IF_ERROR(wait_until([&] { return all_after(kAborted, t0); }, "NCCL does not let go"));
    std::vector<double> ms;
    for (int m = 0; m < kNumMoments; ++m) {
      int64_t last = 0;
      for (int r = 0; r < ranks_; ++r) last = std::max(last, page_->at[m][r].load());
      ms.push_back(static_cast<double>(last - t0) / 1e6);
    }
    ::waitpid(pids_[victim], nullptr, 0);
    pids_[victim] = 0;
    start();
    const int64_t started = static_cast<int64_t>(pids_.size());
    KTG_RETURN_IF_ERROR(wait_until([&] { return page_->warm.load() == started; }, "the next spare does not start"));
    return ms;
  }

 private:
  bool all_after(Moment moment, int64_t t) const {
    return std::all_of(page_->at[moment], page_->at[moment] + ranks_, [t](const auto& at) { return at.load() >= t; });
  }
  void start() {
    const int index = static_cast<int>(pids_.size());
    KTG_CHECK(index < kMaxProcesses);
    const pid_t pid = ::fork();
    KTG_CHECK(pid >= 0);
    if (pid == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      const Status ended = Process(index, ranks_, fds_, *page_).run();
      std::fprintf(stderr, "process %d: %s\n", index, ended.to_string().c_str());
      ::_exit(1);
    }
    pids_.push_back(pid);
  }

  const int ranks_;
  std::mt19937 random_;
  Page* page_ = nullptr;
  std::vector<int> fds_;
  std::vector<pid_t> pids_;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

Status measure(int ranks, int kills, unsigned seed, const std::string& json_file) {
  Probe probe(ranks, seed);
  KTG_RETURN_IF_ERROR(probe.begin());
  std::vector<std::vector<double>> all(kNumMoments);
  for (int k = 0; k < kills; ++k) {
    KTG_ASSIGN_OR_RETURN(const std::vector<double> ms, probe.kill_one());
    std::printf("%3d:", k + 1);
    for (int m = 0; m < kNumMoments; ++m) {
      std::printf("  %s %.0f ms", kNames[m], ms[m]);
      all[m].push_back(ms[m]);
    }
    std::printf("\n");
    std::fflush(stdout);
  }
  const int64_t bytes = probe.communicator_bytes();
  nlohmann::ordered_json json{{"ranks", ranks}, {"kills", kills}, {"seed", seed}, {"communicator_bytes", bytes}};
  std::printf("device memory of a communicator after its first sum: %.1f MiB a rank (mean of those that share a GPU)\n",
              static_cast<double>(bytes) / (1 << 20));
  std::printf("communicators alone, %d ranks, median of %d kills:", ranks, kills);
  for (int m = 0; m < kNumMoments; ++m) {
    std::printf("  %s %.0f ms", kNames[m], median(all[m]));
    json[std::string(kNames[m]) + "_ms"] = {{"median", median(all[m])}, {"each", all[m]}};
  }
  std::printf("\n");
  if (json_file.empty()) return ok_status();
  std::ofstream file(json_file);
  file << json.dump(1) << "\n";
  file.close();
  return file ? ok_status() : failed_precondition(json_file + " cannot be written");
}

}  // namespace
}  // namespace kintsugi

int main(int argc, char** argv) {
  int ranks = 4, kills = 10;
  unsigned seed = 1;
  std::string json_file;
  CLI::App app("How long communicators alone take to mend after a rank was killed.");
  app.add_option("--ranks", ranks)->check(CLI::Range(2, 16));
  app.add_option("--kills", kills)->check(CLI::Range(1, 40));
  app.add_option("--seed", seed);
  app.add_option("--json", json_file);
  CLI11_PARSE(app, argc, argv);
  const kintsugi::Status status = kintsugi::measure(ranks, kills, seed, json_file);
  if (status.ok()) return 0;
  std::fprintf(stderr, "nccl_probe: %s\n", status.to_string().c_str());
  return 1;
}
