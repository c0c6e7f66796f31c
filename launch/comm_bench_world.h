// The ranks of comm_bench: forked by the program itself, or started by mpirun. Either way rank 0's side creates every
// rank's shared segment and one page for the harness, and the ranks map them.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/host/shared_segment.h"

namespace kintsugi::launch {

struct HarnessPage;

// One rank's view.
class BenchWorld {
 public:
  // `fds`: the segments by rank, then the harness page. Takes them over.
  static Result<std::unique_ptr<BenchWorld>> map(std::vector<int> fds, int rank);
  ~BenchWorld();
  int rank() const { return rank_; }
  int world_size() const { return static_cast<int>(segments_.size()); }
  comm::SymmetricHeap& heap() { return *segments_[rank_]; }
  // Waits for all ranks, then makes the next generation's communicator.
  Result<std::unique_ptr<comm::Communicator>> next(const comm::CommConfig& config);
  // Of the newest communicator's generation.
  StopToken stop_token() const;
  // Tells every rank that the run is over.
  void stop();

 private:
  BenchWorld() = default;
  int rank_ = 0;
  int64_t generation_ = 0;
  std::vector<std::unique_ptr<comm::SharedSegment>> segments_;
  HarnessPage* page_ = nullptr;
};

// Segments of `heap_bytes` for each rank, and the harness page.
Result<std::vector<int>> create_bench_fds(int world_size, int64_t heap_bytes);

// Forks `world_size` processes that run `body` and end with its value; returns the first value that is not 0, else 0.
// `bound`: each keeps to a core of its own when there are enough. When one dies, the others are stopped.
int run_forked(int world_size, std::vector<int> fds, bool bound, const std::function<int(BenchWorld&)>& body);

// Under mpirun: rank 0 serves the descriptors on an abstract socket named after the job, the others fetch them.
Result<std::unique_ptr<BenchWorld>> join_launched(int rank, int world_size, const std::string& job, int64_t heap_bytes,
                                                  Deadline deadline);

}  // namespace kintsugi::launch
