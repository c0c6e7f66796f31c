#include "launch/stop_watch.h"

#include <gtest/gtest.h>

#include <chrono>
#include <mutex>
#include <semaphore>
#include <vector>

#include "runtime/base/deadline.h"

namespace kintsugi::launch {
namespace {

using std::chrono::seconds;

class StopWatchTest : public testing::Test {
 protected:
  void SetUp() override {
    auto fd = ControlPageMap::create_fd(0, 1);
    ASSERT_TRUE(fd.ok());
    auto page = ControlPageMap::map(fd->get());
    ASSERT_TRUE(page.ok());
    page_ = std::move(*page);
  }
  ControlPageMap page_;
};

TEST_F(StopWatchTest, ARaiseIsSeenAtOnceAndTheNewestCounts) {
  std::counting_semaphore<> seen{0};
  std::vector<int64_t> stops;
  {
    const StopWatch watch(*page_.get(), {.stop =
                                             [&](int64_t generation) {
                                               stops.push_back(generation);
                                               seen.release();
                                             },
                                         .look_around = [] {}});
    int64_t slowest_ns = 0;
    for (int64_t generation = 2; generation <= 10; ++generation) {
      const int64_t began_ns = monotonic_ns();
      page_->stop_generations_below(generation);
      ASSERT_TRUE(seen.try_acquire_for(seconds(20))) << generation;
      slowest_ns = std::max(slowest_ns, monotonic_ns() - began_ns);
    }
    page_->stop_generations_below(5);  // an old one, late
    std::printf("slowest of 9: %.0f us\n", static_cast<double>(slowest_ns) / 1e3);
  }
  EXPECT_EQ(stops, (std::vector<int64_t>{2, 3, 4, 5, 6, 7, 8, 9, 10}));
}

TEST_F(StopWatchTest, ARaiseBeforeItsBeginCountsAndItLooksAroundWhileNothingHappens) {
  page_->stop_generations_below(3);
  std::counting_semaphore<> stopped{0}, looked{0};
  const StopWatch watch(*page_.get(), {.stop =
                                           [&](int64_t generation) {
                                             if (generation == 3) stopped.release();
                                           },
                                       .look_around = [&] { looked.release(); }});
  EXPECT_TRUE(stopped.try_acquire_for(seconds(20)));
  EXPECT_TRUE(looked.try_acquire_for(seconds(20)));
}

}  // namespace
}  // namespace kintsugi::launch
