#include "runtime/model/weight_gradient_queue.h"

#include <algorithm>

namespace kintsugi::runtime {

Result<std::unique_ptr<WeightGradientQueue>> WeightGradientQueue::create(Backend& backend, int64_t multiprocessors) {
  std::unique_ptr<WeightGradientQueue> queue(new WeightGradientQueue(backend));
  KTG_ASSIGN_OR_RETURN(queue->stream_, backend.create_stream(StreamPriority::kLow));
  KTG_ASSIGN_OR_RETURN(queue->chain_here_, backend.create_event());
  KTG_ASSIGN_OR_RETURN(queue->all_done_, backend.create_event());
  KTG_RETURN_IF_ERROR(backend.limit_products(*queue->stream_, multiprocessors));
  return queue;
}

Result<WeightGradientQueue::Reader*> WeightGradientQueue::reader_of(const void* dy) {
  for (Reader& reader : readers_) {
    if (reader.dy == dy) return &reader;
  }
  KTG_ASSIGN_OR_RETURN(std::unique_ptr<Event> done, backend_.create_event());
  readers_.push_back({.dy = dy, .done = std::move(done), .pending = false});
  return &readers_.back();
}

Status WeightGradientQueue::add(const void* dy, Stream& chain, const std::function<Status(Stream&)>& product) {
  KTG_ASSIGN_OR_RETURN(Reader * reader, reader_of(dy));
  KTG_RETURN_IF_ERROR(chain_here_->record(chain));
  joined_ = false;
  KTG_RETURN_IF_ERROR(chain_here_->wait_on(*stream_));
  KTG_RETURN_IF_ERROR(product(*stream_));
  // The products run in order, so the latest reader of a buffer is the last one.
  KTG_RETURN_IF_ERROR(reader->done->record(*stream_));
  reader->pending = true;
  return ok_status();
}

Status WeightGradientQueue::before_write(const void* buffer, Stream& chain) {
  for (Reader& reader : readers_) {
    if (reader.dy != buffer || !reader.pending) continue;
    reader.pending = false;
    return reader.done->wait_on(chain);
  }
  return ok_status();
}

Status WeightGradientQueue::join(Stream& chain) {
  if (joined_) return ok_status();
  joined_ = true;
  // An event of a recording means nothing outside of it.
  for (Reader& reader : readers_) reader.pending = false;
  KTG_RETURN_IF_ERROR(all_done_->record(*stream_));
  return all_done_->wait_on(chain);
}

}  // namespace kintsugi::runtime
