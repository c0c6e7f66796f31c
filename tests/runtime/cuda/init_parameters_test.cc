// The device's initial weights have the host's bits.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "runtime/cuda/cuda_backend.h"
#include "runtime/model/param_table.h"

namespace kintsugi::runtime {
namespace {

const Deadline kDeadline = Deadline::after(std::chrono::seconds(60));

class InitParametersOnDeviceTest : public testing::Test {
 protected:
  void SetUp() override {
    auto backend = create_cuda_backend({});
    ASSERT_TRUE(backend.ok()) << backend.status().to_string();
    backend_ = std::move(*backend);
    stream_ = *backend_->create_stream();
  }
  // Poisoned with NaN, then written by `fill`, then read back.
  std::vector<float> filled(int64_t count, const std::function<Status(float*)>& fill) {
    std::vector<float> out(static_cast<size_t>(count), std::numeric_limits<float>::quiet_NaN());
    const int64_t bytes = count * 4;
    auto memory = backend_->allocate(bytes, "test");
    EXPECT_TRUE(memory.ok()) << memory.status().to_string();
    EXPECT_TRUE(backend_->copy(memory->data(), out.data(), bytes, *stream_).ok());
    const Status status = fill(memory->as<float>());
    EXPECT_TRUE(status.ok()) << status.to_string();
    EXPECT_TRUE(backend_->copy(out.data(), memory->data(), bytes, *stream_).ok());
    EXPECT_TRUE(stream_->synchronize(kDeadline).ok());
    return out;
  }
  static void expect_equal_bits(const std::vector<float>& got, const std::vector<float>& want) {
    ASSERT_EQ(got.size(), want.size());
    int shown = 0;
    for (size_t i = 0; i < got.size() && shown < 5; ++i) {
      if (std::memcmp(&got[i], &want[i], 4) == 0) continue;
      ADD_FAILURE() << "element " << i << ": " << got[i] << ", want " << want[i];
      ++shown;
    }
  }

  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Stream> stream_;
};

TEST_F(InitParametersOnDeviceTest, EveryTensorOfBothFamiliesHasTheHostsBits) {
  for (const char* family : {"llama", "gpt2"}) {
    SCOPED_TRACE(family);
    ModelConfig config;
    config.family = family;
    config.num_layers = 3;
    config.dim = 264;
    config.num_heads = 12;
    config.num_kv_heads = std::string_view(family) == "llama" ? 3 : 12;
    config.ffn_dim = 707;
    config.vocab_size = 50'257;
    ASSERT_TRUE(config.validate().ok()) << config.validate().to_string();
    const ParamTable table = ParamTable::build(config);
    std::vector<float> want(static_cast<size_t>(table.total_length()));
    init_parameters(want.data(), table, 0x1234567890abcdef, 0, table.total_length());
    const std::vector<float> got = filled(table.total_length(), [&](float* out) {
      return init_parameters(out, table, 0x1234567890abcdef, *backend_, *stream_);
    });
    expect_equal_bits(got, want);
  }
}

TEST_F(InitParametersOnDeviceTest, AnyRangeIsThatPartOfTheWhole) {
  const auto* random = backend_->kernels().random;
  ASSERT_NE(random, nullptr);
  constexpr int64_t kCount = 5000;
  const auto draw = [&](int64_t begin, int64_t count, int64_t offset) {
    return filled(kCount + 8, [&](float* out) {
      return stream_->launched(random->fill_normal(out + offset, 7, 1, begin, count, 0.02f, stream_->handle()),
                               "normal");
    });
  };
  const std::vector<float> whole = draw(0, kCount, 0);
  for (const auto& [begin, count, offset] :
       {std::tuple{1, 1, 0}, {3, 6, 1}, {4, 4, 0}, {5, 1023, 3}, {1026, 3974, 2}}) {
    SCOPED_TRACE(testing::Message() << begin << " + " << count);
    const std::vector<float> part = draw(begin, count, offset);
    expect_equal_bits({part.begin() + offset, part.begin() + offset + count},
                      {whole.begin() + begin, whole.begin() + begin + count});
    for (int64_t i = 0; i < kCount + 8; ++i) {
      if (i >= offset && i < offset + count) continue;
      ASSERT_TRUE(std::isnan(part[i])) << "written beside: " << i;
    }
  }
}

}  // namespace
}  // namespace kintsugi::runtime
