#include <cuda_runtime.h>

#include <vector>

#include "kernels/cuda/graph_fills.h"

namespace kintsugi::kernels::cuda {
namespace {

constexpr int kThreads = 256;

// `pattern`: the value repeated to four bytes. data lies at a multiple of the element's size, so byte i of it gets byte
// i % 4 of the pattern whatever the element is.
__global__ void __launch_bounds__(kThreads) fill_bytes_kernel(uint8_t* data, uint32_t pattern, int32_t bytes) {
  const auto thread = static_cast<int32_t>(threadIdx.x);
  if (reinterpret_cast<uintptr_t>(data) % 4 == 0) {
    for (int32_t i = thread; i < bytes / 4; i += kThreads) reinterpret_cast<uint32_t*>(data)[i] = pattern;
    const int32_t rest = bytes / 4 * 4 + thread;
    if (rest < bytes) data[rest] = static_cast<uint8_t>(pattern >> (8 * (rest % 4)));
    return;
  }
  for (int32_t i = thread; i < bytes; i += kThreads) data[i] = static_cast<uint8_t>(pattern >> (8 * (i % 4)));
}

uint32_t pattern_of(const cudaMemsetParams& fill) {
  if (fill.elementSize == 1) return (fill.value & 0xffu) * 0x01010101u;
  if (fill.elementSize == 2) return (fill.value & 0xffffu) * 0x00010001u;
  return fill.value;
}

// The nodes beside one and their edges.
struct Neighbours {
  std::vector<cudaGraphNode_t> nodes;
  std::vector<cudaGraphEdgeData> edges;
  // An edge that says more than "after".
  bool special() const {
    for (const cudaGraphEdgeData& edge : edges) {
      if (edge.from_port != 0 || edge.to_port != 0 || edge.type != 0) return true;
    }
    return false;
  }
};

template <class Get>
cudaError_t neighbours(Neighbours* of, cudaGraphNode_t node, Get get) {
  size_t count = 0;
  if (const cudaError_t error = get(node, nullptr, nullptr, &count); error != cudaSuccess) return error;
  of->nodes.resize(count);
  of->edges.resize(count);
  return count == 0 ? cudaSuccess : get(node, of->nodes.data(), of->edges.data(), &count);
}

cudaError_t replace(cudaGraph_t graph, cudaGraphNode_t node, const cudaMemsetParams& fill, int64_t* replaced) {
  Neighbours before, after;
  if (const cudaError_t e = neighbours(&before, node, cudaGraphNodeGetDependencies); e != cudaSuccess) return e;
  if (const cudaError_t e = neighbours(&after, node, cudaGraphNodeGetDependentNodes); e != cudaSuccess) return e;
  if (before.special() || after.special()) return cudaSuccess;

  auto* data = static_cast<uint8_t*>(fill.dst);
  uint32_t pattern = pattern_of(fill);
  auto bytes = static_cast<int32_t>(fill.width * fill.elementSize);
  void* arguments[] = {&data, &pattern, &bytes};
  cudaKernelNodeParams kernel{};
  kernel.func = reinterpret_cast<void*>(fill_bytes_kernel);
  kernel.gridDim = dim3(1);
  kernel.blockDim = dim3(kThreads);
  kernel.kernelParams = arguments;
  cudaGraphNode_t in_place = nullptr;
  if (const cudaError_t e = cudaGraphAddKernelNode(&in_place, graph, before.nodes.data(), before.nodes.size(), &kernel);
      e != cudaSuccess) {
    return e;
  }
  for (const cudaGraphNode_t& next : after.nodes) {
    if (const cudaError_t e = cudaGraphAddDependencies(graph, &in_place, &next, nullptr, 1); e != cudaSuccess) return e;
  }
  ++*replaced;
  return cudaGraphDestroyNode(node);
}

}  // namespace

cudaError_t replace_small_memsets(cudaGraph_t graph, int64_t* replaced) {
  *replaced = 0;
  size_t count = 0;
  if (const cudaError_t e = cudaGraphGetNodes(graph, nullptr, &count); e != cudaSuccess) return e;
  std::vector<cudaGraphNode_t> nodes(count);
  if (count == 0) return cudaSuccess;
  if (const cudaError_t e = cudaGraphGetNodes(graph, nodes.data(), &count); e != cudaSuccess) return e;
  for (cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type{};
    if (const cudaError_t e = cudaGraphNodeGetType(node, &type); e != cudaSuccess) return e;
    if (type != cudaGraphNodeTypeMemset) continue;
    cudaMemsetParams fill{};
    if (const cudaError_t e = cudaGraphMemsetNodeGetParams(node, &fill); e != cudaSuccess) return e;
    if (fill.height != 1 || static_cast<int64_t>(fill.width * fill.elementSize) > kMaxFillBytes) continue;
    if (const cudaError_t e = replace(graph, node, fill, replaced); e != cudaSuccess) return e;
  }
  return cudaSuccess;
}

}  // namespace kintsugi::kernels::cuda
