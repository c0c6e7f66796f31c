// The products that make weight gradients, beside the chain of backward, which does not wait for them. They run on a
// stream of their own that the device serves after the chain's, one after another: so they fill what the chain's
// kernels leave of it, the ends of their waves and all the multiprocessors that wait for memory. Internal to
// runtime/model. One thread at a time.
//
// What such a product reads must stay as it is until it has run. Its x are activations, which nobody overwrites before
// join(); its dy often is one of backward's few buffers: whoever writes one of these calls before_write() first. The
// chain never gets further ahead than that.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "runtime/backend.h"

namespace kintsugi::runtime {

class WeightGradientQueue {
 public:
  // The products take at most `multiprocessors` of the device; 0: all.
  static Result<std::unique_ptr<WeightGradientQueue>> create(Backend& backend, int64_t multiprocessors);

  // Queues `product` behind what `chain` holds by now. It reads `dy`.
  Status add(const void* dy, Stream& chain, const std::function<Status(Stream&)>& product);
  // What is queued on `chain` from here on runs when no product reads `buffer` as its dy any more.
  Status before_write(const void* buffer, Stream& chain);
  // The same when all products have ended. Every recording needs it at its end, and after an error it has the chain's
  // end mean the end of everything.
  Status join(Stream& chain);

 private:
  struct Reader {
    const void* dy;
    std::unique_ptr<Event> done;
    bool pending;
  };
  explicit WeightGradientQueue(Backend& backend) : backend_(backend) {}
  Result<Reader*> reader_of(const void* dy);

  Backend& backend_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Event> chain_here_, all_done_;
  std::vector<Reader> readers_;  // one a buffer, made when it is first read
  bool joined_ = true;
};

}  // namespace kintsugi::runtime
