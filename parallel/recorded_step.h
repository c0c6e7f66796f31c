// A step of a device as graphs, and the calls between them that no graph can hold: those of communicators (one that is
// captured in a living graph cannot be aborted) and waits for other streams.
//
// The step is described once, by a function that queues it. record() runs that function: what it queues is recorded,
// each graph is launched as soon as it is complete, so that a call finds its place behind it, and the calls are made
// and kept. replay() does the same again without the function. Not thread safe.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "runtime/backend.h"

namespace kintsugi::parallel {

class RecordedStep {
 public:
  explicit RecordedStep(runtime::Backend& backend) : backend_(backend) {}
  bool recorded() const { return recorded_; }

  // Queues one step by `body` and records it. After an error nothing is recorded, and the stream records no more.
  Status record(runtime::Stream& stream, const std::function<Status()>& body);
  // Inside `body`: makes `call` between two graphs, now and in every replay. Outside a recording: makes it.
  Status outside(std::function<Status()> call);
  // Inside `body`: what follows belongs together, and a replay that has come here goes on to its end.
  void begin_whole() { whole_from_ = pieces_.size(); }

  // Needs recorded(). kAborted when the stream's stop token asks for it before what belongs together has begun.
  Status replay(runtime::Stream& stream) const;
  int64_t num_graphs() const;

 private:
  struct Piece {  // one of the two
    std::unique_ptr<runtime::Graph> graph;
    std::function<Status()> call;
  };
  Status begin_graph();
  // Launches what has been recorded, if it is anything.
  Status end_graph();

  runtime::Backend& backend_;
  runtime::Stream* stream_ = nullptr;  // while recording
  bool in_graph_ = false, recorded_ = false;
  std::vector<Piece> pieces_;
  size_t whole_from_ = 0;
};

}  // namespace kintsugi::parallel
