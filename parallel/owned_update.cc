#include "parallel/owned_update.h"

#include <algorithm>

namespace kintsugi::parallel {
namespace {

int64_t bytes_of(const std::vector<int64_t>& edges) { return static_cast<int64_t>(edges.size() * sizeof(int64_t)); }

// Where decay begins and ends in elements [begin, end) of the local space, counted from begin.
std::vector<int64_t> plan_decay_edges(const runtime::ParamTable& table, std::span<const runtime::StateRange> ranges,
                                      int64_t begin, int64_t end) {
  std::vector<int64_t> edges;
  const std::vector<runtime::TensorInfo>& tensors = table.tensors();
  for (const runtime::StateRange& range : ranges) {
    for (size_t t = 0; t < tensors.size(); ++t) {
      const int64_t next = t + 1 < tensors.size() ? tensors[t + 1].offset : table.total_length();
      const int64_t from = std::max(tensors[t].offset, range.begin);
      if (from >= std::min(next, range.begin + range.count)) continue;
      if (tensors[t].decay == (edges.size() % 2 == 1)) continue;
      const int64_t edge = std::clamp(range.local_begin + from - range.begin, begin, end) - begin;
      // Two at one place, as outside this part all are, say nothing.
      if (!edges.empty() && edges.back() == edge) {
        edges.pop_back();
      } else {
        edges.push_back(edge);
      }
    }
  }
  if (edges.size() % 2 == 1) edges.push_back(end - begin);
  return edges;
}

}  // namespace

OwnedUpdate::OwnedUpdate(const runtime::ParamTable& table, std::span<const runtime::StateRange> ranges,
                         std::vector<int64_t> borders)
    : borders_(std::move(borders)) {
  int64_t num_edges = 0;
  for (size_t p = 0; p + 1 < borders_.size(); ++p) {
    edges_.push_back(plan_decay_edges(table, ranges, borders_[p], borders_[p + 1]));
    first_edge_.push_back(num_edges);
    num_edges += static_cast<int64_t>(edges_.back().size());
  }
}

// A rank that owns nothing has no edges, and no backend gives nothing.
int64_t OwnedUpdate::device_bytes() const {
  int64_t bytes = 0;
  for (const std::vector<int64_t>& edges : edges_) bytes += bytes_of(edges);
  return std::max(bytes, static_cast<int64_t>(sizeof(int64_t)));
}

Status OwnedUpdate::prepare_device(runtime::Backend& backend, runtime::Stream& stream) {
  KTG_ASSIGN_OR_RETURN(device_edges_, backend.allocate(device_bytes(), "ranges of weight decay"));
  for (size_t p = 0; p < edges_.size(); ++p) {
    KTG_RETURN_IF_ERROR(
        backend.copy(device_edges_.as<int64_t>() + first_edge_[p], edges_[p].data(), bytes_of(edges_[p]), stream));
  }
  return ok_status();
}

Status OwnedUpdate::part(int part, const runtime::TrainState& state, void* copy, kernels::DType dtype,
                         const float* gradient, const kernels::AdamWScalars* scalars, const runtime::Backend& backend,
                         runtime::Stream& stream) const {
  const auto p = static_cast<size_t>(part);
  const int64_t begin = borders_[p], end = borders_[p + 1];
  const int64_t* edges =
      device_edges_.data() == nullptr ? edges_[p].data() : device_edges_.as<int64_t>() + first_edge_[p];
  uint8_t* copy_begin = copy == nullptr ? nullptr : static_cast<uint8_t*>(copy) + begin * kernels::size_of(dtype);
  return stream.launched(
      backend.kernels().optimizer->adamw(state.weights + begin, state.m + begin, state.v + begin, copy_begin,
                                         gradient + begin, end - begin, scalars, edges,
                                         static_cast<int64_t>(edges_[p].size()), dtype, stream.handle()),
      "adamw");
}

}  // namespace kintsugi::parallel
