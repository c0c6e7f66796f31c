// A training loop for tests of the parallel modes, and nothing else: no files, no processes, no recovery. The same
// loop serves ranks as threads on the CPU and as processes on GPUs.
//
// Samples are drawn from their global index, so every layout trains on the same data in the same order.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "parallel/communicator_groups.h"
#include "parallel/fully_sharded.h"
#include "runtime/backend.h"
#include "runtime/model/model_config.h"
#include "runtime/model/transformer.h"

namespace kintsugi::parallel {

// Where a test may hold a rank up.
enum class Moment { kAcquire, kForwardDone, kGradientsReady, kBeforeUpdate };

struct TrainOptions {
  runtime::ModelConfig model;
  ParallelConfig parallel;
  kernels::DType dtype = kernels::DType::kF32;
  MomentsOptions moments{};
  runtime::Recompute recompute = runtime::Recompute::kNone;
  bool overlap = true;
  bool graphs = false;  // on a device: the first step is queued, the second recorded, the others are replayed
  int64_t steps = 20, global_batch = 24, micro_batch = 0, seq_len = 16;
  double clip_norm = 0.8;  // the first steps are clipped, the later ones are not
  uint64_t seed = 1;
  // Called with the rank's stream; null: nobody is held up.
  std::function<void(int rank, Moment moment, runtime::Stream& stream)> hold_up;

  std::string name() const;  // for messages
};

// A rank's place in a generation. `control` synchronises what tests do on the host; null where `communicators.world`
// serves the host's memory.
struct RankPlace {
  int rank = 0, world_size = 1;
  runtime::Backend* backend = nullptr;
  runtime::Stream* stream = nullptr;
  comm::SymmetricHeap* heap = nullptr;
  Communicators communicators;
};

// What a rank has after the last step.
struct RankResult {
  std::vector<double> losses, norms;  // by step: the mean loss
  std::vector<runtime::StateRange> ranges;
  std::vector<float> weights, m, v;  // of the rank's part of the state
  FullySharded::Traffic traffic;     // of the last step; zeros in ddp
  FullySharded::Traffic plan;        // by formula
  int64_t heap_used_bytes = 0;
};

Result<RankResult> train_rank(const TrainOptions& options, const RankPlace& place);

// The whole state, put together from the ranks of the first replica.
struct Trained {
  std::vector<double> losses, norms;
  std::vector<float> weights, m, v;
  std::vector<RankResult> ranks;
};
// Checks what must hold of any layout: all ranks have the same losses and norms, replicas the same bits, every element
// lies somewhere, padding is zero.
Trained assemble(const TrainOptions& options, std::vector<RankResult> ranks);

// Wraps the communicators of a rank.
using Wrap = std::function<std::unique_ptr<comm::Communicator>(std::unique_ptr<comm::Communicator>)>;
// Ranks as threads.
Trained train_on_threads(const TrainOptions& options, int world_size, const Wrap& wrap = nullptr);

}  // namespace kintsugi::parallel
