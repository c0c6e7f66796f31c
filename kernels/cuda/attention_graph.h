// One pass of attention as a graph of cuDNN's, with the execution plans that were built for it. Internal to
// kernels/cuda; only attention_graph.cc knows cudnn_frontend. Not thread-safe, but several may be built at once, each
// with a handle of its own.
#pragma once

#include <cudnn.h>

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/attention.h"
#include "kernels/cuda/attention_cudnn.h"

namespace kintsugi::kernels::cuda {

// Of the device that is current. Null with the reason when there is none.
using CudnnHandle = std::shared_ptr<cudnnContext>;
CudnnHandle make_cudnn_handle(cudnnStatus_t* status);

// Which of the plans that the library lists are built: the one of a name, or else the first that can be built; all of
// the first one's engine; all that any of its heuristics lists.
enum class WantedPlans : uint8_t { kOne, kOfOneEngine, kAll };

class AttentionGraph {
 public:
  // Blocks: 0.5 s a plan and more where the driver has not compiled it before. Of the shape's pointers only whether
  // they are null bears on the graph. Null with the reason when the library has no plan. `name` is for kOne.
  static std::unique_ptr<AttentionGraph> build(const AttentionShape& shape, AttentionPass pass, WantedPlans wanted,
                                               const std::string& name, CudnnHandle handle, std::string* why_not);
  ~AttentionGraph();

  // Those that were built, in the library's order; at least one.
  struct Plan {
    int64_t index = -1;  // in the library's list; -1: its only one
    std::string name;
    int64_t workspace_bytes = 0;
  };
  const std::vector<Plan>& plans() const { return plans_; }

  // The plan that run() takes: at first the first.
  const Plan& chosen() const { return plans_[chosen_]; }
  void choose(size_t plan);
  // False, and nothing changes, when no plan of the name was built.
  bool choose(const std::string& name);

  // Operands in the order q, k, v, o, lse, d_o, dq, dk, dv, the mask of documents: those that the pass has.
  KernelError run(std::span<void* const> operands, void* workspace, cudaStream_t stream);

 private:
  struct Frontend;
  AttentionGraph();
  std::string build_listed(const AttentionShape& shape, AttentionPass pass, WantedPlans wanted, const std::string& name,
                           bool fallback);

  CudnnHandle handle_;  // outlives the graph, which may refer to it
  std::unique_ptr<Frontend> frontend_;
  std::vector<Plan> plans_;
  size_t chosen_ = 0;
};

}  // namespace kintsugi::kernels::cuda
