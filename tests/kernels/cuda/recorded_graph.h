// A stream of its own for a test, and what is queued there as a CUDA graph.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include "kernels/cuda/libraries.h"

namespace kintsugi::kernels {

// As a backend's streams are: it waits for no other.
class TestStream {
 public:
  TestStream() { EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess); }
  TestStream(const TestStream&) = delete;
  TestStream& operator=(const TestStream&) = delete;
  ~TestStream() {
    cuda::release_library_stream(stream_);
    cudaStreamDestroy(stream_);
  }
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

class RecordedGraph {
 public:
  // What `queue` queues in the stream, which is not run now.
  template <class Queue>
  RecordedGraph(cudaStream_t stream, Queue queue) : stream_(stream) {
    EXPECT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    queue();
    EXPECT_EQ(cudaStreamEndCapture(stream_, &graph_), cudaSuccess);
    EXPECT_EQ(cudaGraphInstantiate(&executable_, graph_, 0), cudaSuccess);
  }
  RecordedGraph(const RecordedGraph&) = delete;
  RecordedGraph& operator=(const RecordedGraph&) = delete;
  ~RecordedGraph() {
    cudaGraphExecDestroy(executable_);
    cudaGraphDestroy(graph_);
  }
  // So many times in a row, and waits.
  void run(int times = 1) const {
    for (int i = 0; i < times; ++i) ASSERT_EQ(cudaGraphLaunch(executable_, stream_), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  }

 private:
  cudaStream_t stream_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace kintsugi::kernels
