#include "parallel/owned_update.h"

#include <algorithm>

namespace kintsugi::parallel {
namespace {

// Where decay begins and ends in the range, counted from its begin.
std::vector<int64_t> plan_decay_edges(const runtime::ParamTable& table, const runtime::StateRange& range) {
  std::vector<int64_t> edges;
  const std::vector<runtime::TensorInfo>& tensors = table.tensors();
  for (size_t t = 0; t < tensors.size(); ++t) {
    const int64_t next = t + 1 < tensors.size() ? tensors[t + 1].offset : table.total_length();
    const int64_t from = std::max(tensors[t].offset, range.begin);
    if (from >= std::min(next, range.begin + range.count)) continue;
    if (tensors[t].decay != (edges.size() % 2 == 1)) edges.push_back(from - range.begin);
  }
  if (edges.size() % 2 == 1) edges.push_back(range.count);
  return edges;
}

// What of the ranges lies in [begin, end) of the local space; neighbours both there and in the model are one.
std::vector<runtime::StateRange> within(std::span<const runtime::StateRange> ranges, int64_t begin, int64_t end) {
  std::vector<runtime::StateRange> out;
  for (const runtime::StateRange& range : ranges) {
    const int64_t from = std::max(begin, range.local_begin), to = std::min(end, range.local_begin + range.count);
    if (from >= to) continue;
    const runtime::StateRange cut{
        .begin = range.begin + from - range.local_begin, .count = to - from, .local_begin = from};
    const bool continues = !out.empty() && out.back().begin + out.back().count == cut.begin &&
                           out.back().local_begin + out.back().count == cut.local_begin;
    if (continues) {
      out.back().count += cut.count;
    } else {
      out.push_back(cut);
    }
  }
  return out;
}

std::vector<runtime::StateRange> cut(const std::vector<runtime::StateRange>& ranges, int64_t longest) {
  std::vector<runtime::StateRange> out;
  for (const runtime::StateRange& range : ranges) {
    for (int64_t at = 0; at < range.count; at += longest) {
      out.push_back({.begin = range.begin + at,
                     .count = std::min(longest, range.count - at),
                     .local_begin = range.local_begin + at});
    }
  }
  return out;
}

}  // namespace

OwnedUpdate::OwnedUpdate(const runtime::ParamTable& table, std::span<const runtime::StateRange> ranges,
                         const std::vector<int64_t>& borders, const MomentsOptions& moments)
    : moments_(moments) {
  for (size_t p = 0; p + 1 < borders.size(); ++p) {
    first_piece_.push_back(pieces_.size());
    std::vector<runtime::StateRange> of_part = within(ranges, borders[p], borders[p + 1]);
    if (moments.on_host) of_part = cut(of_part, moments.bucket);
    for (const runtime::StateRange& range : of_part) {
      const std::vector<int64_t> edges = plan_decay_edges(table, range);
      pieces_.push_back({.range = range,
                         .first_edge = static_cast<int64_t>(edges_.size()),
                         .num_edges = static_cast<int64_t>(edges.size())});
      edges_.insert(edges_.end(), edges.begin(), edges.end());
    }
  }
  first_piece_.push_back(pieces_.size());
}

// A rank that owns nothing has no edges, and no backend gives nothing.
int64_t OwnedUpdate::edges_bytes() const {
  return static_cast<int64_t>(std::max<size_t>(edges_.size(), 1) * sizeof(int64_t));
}

int64_t OwnedUpdate::longest_piece() const {
  int64_t longest = 1;
  for (const Piece& piece : pieces_) longest = std::max(longest, piece.range.count);
  return longest;
}

int64_t OwnedUpdate::device_bytes() const {
  return edges_bytes() + (moments_.on_host ? MomentStage::device_bytes(moments_, longest_piece()) : 0);
}

Status OwnedUpdate::allocate_moments(const StateMemory& memory, runtime::Backend& backend, comm::SymmetricHeap& heap,
                                     runtime::TrainState& state) {
  if (moments_.on_host) {
    KTG_ASSIGN_OR_RETURN(host_moments_, backend.allocate_host(memory.host_moments_bytes, "moments"));
    KTG_ASSIGN_OR_RETURN(stage_, MomentStage::create(moments_, longest_piece(), backend));
    state.m = host_moments_.data();
  } else {
    KTG_ASSIGN_OR_RETURN(state.m, heap.allocate(memory.moments_bytes, "moments"));
  }
  state.moments_dtype = moments_.dtype;
  state.v = state.at(1, state.length);
  return ok_status();
}

Status OwnedUpdate::prepare_device(runtime::Backend& backend, runtime::Stream& stream) {
  KTG_ASSIGN_OR_RETURN(device_edges_, backend.allocate(edges_bytes(), "ranges of weight decay"));
  return backend.copy(device_edges_.data(), edges_.data(), static_cast<int64_t>(edges_.size() * sizeof(int64_t)),
                      stream);
}

Status OwnedUpdate::part(int part, const runtime::TrainState& state, void* copy, kernels::DType dtype,
                         const kernels::Gradient& gradient, const kernels::AdamWScalars* scalars,
                         const runtime::Backend& backend, runtime::Stream& stream) const {
  const int64_t* edges = device_edges_.data() == nullptr ? edges_.data() : device_edges_.as<int64_t>();
  const auto p = static_cast<size_t>(part);
  if (stage_) KTG_RETURN_IF_ERROR(stage_->begin(stream));
  for (size_t i = first_piece_[p]; i < first_piece_[p + 1]; ++i) {
    const auto& [range, first_edge, num_edges] = pieces_[i];
    const int64_t begin = range.local_begin;
    kernels::Moments moments{.m = state.at(1, begin), .v = state.at(2, begin), .dtype = state.moments_dtype};
    if (stage_) {
      KTG_ASSIGN_OR_RETURN(moments, stage_->bring(state, begin, range.count, stream));
    }
    moments.first_index = range.begin;
    uint8_t* copy_begin = copy == nullptr ? nullptr : static_cast<uint8_t*>(copy) + begin * kernels::size_of(dtype);
    KTG_RETURN_IF_ERROR(stream.launched(
        backend.kernels().optimizer->adamw(state.weights + begin, moments, copy_begin, gradient.from(begin),
                                           range.count, scalars, edges + first_edge, num_edges, dtype, stream.handle()),
        "adamw"));
    if (stage_) KTG_RETURN_IF_ERROR(stage_->take_back(state, begin, range.count, stream));
  }
  return stage_ ? stage_->end(stream) : ok_status();
}

}  // namespace kintsugi::parallel
