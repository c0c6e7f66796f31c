#include "parallel/recorded_step.h"

#include <algorithm>

#include "runtime/base/check.h"

namespace kintsugi::parallel {

Status RecordedStep::begin_graph() {
  KTG_RETURN_IF_ERROR(backend_.begin_recording(*stream_));
  in_graph_ = true;
  return ok_status();
}

Status RecordedStep::end_graph() {
  in_graph_ = false;
  KTG_ASSIGN_OR_RETURN(std::unique_ptr<runtime::Graph> graph, backend_.end_recording(*stream_));
  if (graph->num_operations() == 0) return ok_status();
  KTG_RETURN_IF_ERROR(graph->launch(*stream_));
  pieces_.push_back({.graph = std::move(graph), .call = nullptr});
  return ok_status();
}

Status RecordedStep::record(runtime::Stream& stream, const std::function<Status()>& body) {
  recorded_ = false;
  pieces_.clear();
  whole_from_ = 0;
  stream_ = &stream;
  Status status = begin_graph();
  if (status.ok()) status = body();
  if (in_graph_) {
    // After an error it is dropped, and never runs.
    const Status ended = status.ok() ? end_graph() : backend_.end_recording(stream).status();
    if (status.ok()) status = ended;
  }
  in_graph_ = false;
  stream_ = nullptr;
  recorded_ = status.ok();
  if (!recorded_) pieces_.clear();
  return status;
}

Status RecordedStep::outside(std::function<Status()> call) {
  if (!in_graph_) return call();
  KTG_RETURN_IF_ERROR(end_graph());
  KTG_RETURN_IF_ERROR(call());
  pieces_.push_back({.graph = nullptr, .call = std::move(call)});
  return begin_graph();
}

Status RecordedStep::replay(runtime::Stream& stream) const {
  KTG_CHECK(recorded_);
  for (size_t i = 0; i < pieces_.size(); ++i) {
    if (i < whole_from_ && stream.stop_token().requested()) return aborted("stopped between two pieces of a step");
    KTG_RETURN_IF_ERROR(pieces_[i].graph ? pieces_[i].graph->launch(stream) : pieces_[i].call());
  }
  return ok_status();
}

int64_t RecordedStep::num_graphs() const {
  return std::count_if(pieces_.begin(), pieces_.end(), [](const Piece& piece) { return piece.graph != nullptr; });
}

}  // namespace kintsugi::parallel
