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
      edges.push_back(std::clamp(range.local_begin + from - range.begin, begin, end) - begin);
    }
  }
  if (edges.size() % 2 == 1) edges.push_back(end - begin);
  return edges;
}

}  // namespace

OwnedUpdate::OwnedUpdate(const runtime::ParamTable& table, std::span<const runtime::StateRange> ranges, int64_t length)
    : borders_{0, length / 2, length} {
  for (size_t h = 0; h < 2; ++h) edges_[h] = plan_decay_edges(table, ranges, borders_[h], borders_[h + 1]);
}

// A rank that owns nothing has no edges, and no backend gives nothing.
int64_t OwnedUpdate::device_bytes() const {
  return std::max(bytes_of(edges_[0]) + bytes_of(edges_[1]), static_cast<int64_t>(sizeof(int64_t)));
}

Status OwnedUpdate::prepare_device(runtime::Backend& backend, runtime::Stream& stream) {
  KTG_ASSIGN_OR_RETURN(device_edges_, backend.allocate(device_bytes(), "ranges of weight decay"));
  auto* to = device_edges_.as<int64_t>();
  for (const std::vector<int64_t>& edges : edges_) {
    KTG_RETURN_IF_ERROR(backend.copy(to, edges.data(), bytes_of(edges), stream));
    to += edges.size();
  }
  return ok_status();
}

Status OwnedUpdate::half(int half, const runtime::TrainState& state, void* copy, kernels::DType dtype,
                         const float* gradient, const kernels::AdamWScalars* scalars, const runtime::Backend& backend,
                         runtime::Stream& stream) const {
  const auto h = static_cast<size_t>(half);
  const int64_t begin = borders_[h], end = borders_[h + 1];
  const int64_t* edges = edges_[h].data();
  if (device_edges_.data() != nullptr) edges = device_edges_.as<int64_t>() + (half == 0 ? 0 : edges_[0].size());
  uint8_t* copy_begin = copy == nullptr ? nullptr : static_cast<uint8_t*>(copy) + begin * kernels::size_of(dtype);
  return stream.launched(
      backend.kernels().optimizer->adamw(state.weights + begin, state.m + begin, state.v + begin, copy_begin,
                                         gradient + begin, end - begin, scalars, edges,
                                         static_cast<int64_t>(edges_[h].size()), dtype, stream.handle()),
      "adamw");
}

}  // namespace kintsugi::parallel
