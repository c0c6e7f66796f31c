// The fp32 vectors of all units (norms, biases), which kernels read unrounded where they read the rest in another type:
// a small table that every rank has whole, gathered once after each update, on the communicator of the gradients, which
// has nothing to do then: on that of the weights it would wait behind whole units. In fp32 it is empty, because vectors
// are then part of the gathered units, and with one shard, whose master weights are whole.
#pragma once

#include <vector>

#include "comm/communicator.h"
#include "parallel/sharded/shard_plan.h"
#include "runtime/backend.h"

namespace kintsugi::parallel {

class VectorTable {
 public:
  VectorTable(const runtime::ParamTable& table, const ShardPlan& plan, runtime::Backend* backend,
              FullySharded::Traffic& traffic);
  // `backend` may be null where nothing is allocated. `local`: this rank's master weights.
  Status allocate(const float* local);
  // What allocate() takes.
  int64_t memory_bytes() const { return (length_ + most_ * (1 + plan_.num_shards)) * 4; }
  // Bytes that this rank gives; 0: nothing is gathered.
  int64_t bytes_a_rank() const { return most_ * 4; }
  void set_communicator(comm::Communicator* communicator) {
    communicator_ = communicator;
    work_.reset();
    forget();
  }
  void forget() { sent_off_ = unpacked_ = false; }
  // Collective, unless it has been done since forget(): starts the gather.
  Status start(runtime::Stream& stream);
  // The same, and makes the stream wait for what comes; then unpack() queues its copies. Needed until known().
  Status receive(runtime::Stream& stream, Deadline deadline);
  Status unpack(runtime::Stream& stream);
  // Waits for a gather that has been started.
  Status settle(Deadline deadline);
  bool known() const { return unpacked_ || length_ == 0; }
  // The unit's vectors as runtime::packed_vectors() lays them out.
  bool empty() const { return length_ == 0; }
  const float* of_unit(int unit) const { return table_.as<float>() + begin_[static_cast<size_t>(unit)]; }

 private:
  struct Piece {
    int64_t at;     // in the table
    int64_t sent;   // in what its owner sends
    int64_t local;  // in its owner's local space
    int64_t count;
  };
  const ShardPlan& plan_;
  runtime::Backend* backend_;
  FullySharded::Traffic& traffic_;
  std::vector<int64_t> begin_;              // of each unit's vectors
  std::vector<std::vector<Piece>> pieces_;  // by shard
  int64_t length_ = 0, most_ = 0;           // of the table; of what any shard sends
  bool sent_off_ = false, unpacked_ = false;
  comm::WorkPtr work_;
  const float* local_ = nullptr;
  runtime::Buffer table_, sent_, received_;
  comm::Communicator* communicator_ = nullptr;
};

}  // namespace kintsugi::parallel
