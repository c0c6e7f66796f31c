// A rank of comm_bench on a GPU: what BenchWorld is on the host, with a device, its heap and NCCL.
#pragma once

#include <memory>

#include "comm/bench/bench.h"
#include "comm/nccl/device_heap.h"
#include "launch/comm_bench_world.h"

namespace kintsugi::launch {

class GpuBench {
 public:
  // In a process that has not touched CUDA. NCCL_BUFFSIZE counts once a process: options.nccl_buffsize.
  static Result<std::unique_ptr<GpuBench>> create(BenchWorld& world, const comm::BenchOptions& options);
  // Rank 0's lines above the table.
  std::string banner() const;
  comm::BenchPlace place();

 private:
  explicit GpuBench(BenchWorld& world) : world_(world) {}
  Result<std::unique_ptr<comm::Communicator>> next(comm::CommConfig config);

  BenchWorld& world_;
  int64_t nccl_buffsize_ = 0;
  std::string notes_;
  int num_gpus_ = 0;
  std::unique_ptr<runtime::Backend> backend_;
  std::unique_ptr<comm::DeviceHeap> heap_;
  runtime::Buffer staging_;  // of all_reduce_fixed; empty where another operation is timed
  std::unique_ptr<runtime::Stream> stream_;
  std::unique_ptr<comm::Communicator> control_;  // of the newest communicator
};

}  // namespace kintsugi::launch
