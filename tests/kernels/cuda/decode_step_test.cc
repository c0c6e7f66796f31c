// A decode step as one launch against the same step operation by operation: the same bits, in logits and in the cache,
// over several steps, launched and replayed.
//   N sequences   C width   F feed-forward width   V vocabulary   L layers   H, K, D heads, key/value heads, head size
#include "kernels/cuda/decode_step.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <deque>

#include "kernels/cuda/libraries.h"
#include "kernels/embedding.h"
#include "kernels/gemm.h"
#include "kernels/rope.h"
#include "tests/kernels/cuda/device_array.h"

namespace kintsugi::kernels {
namespace {

constexpr DType kType = DType::kBF16;
constexpr int64_t kMostPositions = 1024;

struct StepCase {
  std::vector<int32_t> lens;  // with the new token; 0: no sequence
  int64_t C, F, V, L, H, K, D;
  bool qk_norm, bias;
  int steps;
  int64_t P = 16;
};

// One model with its cache, twice: both have the same numbers before the first step.
class Model {
 public:
  Model(const StepCase& c, std::mt19937& rng)
      : case_(c),
        N_(static_cast<int64_t>(c.lens.size())),
        QKV_((c.H + 2 * c.K) * c.D),
        width_((kMostPositions + c.P - 1) / c.P),
        table_(Array::normal(kType, c.V * c.C, rng)),
        head_(Array::normal(kType, c.V * c.C, rng, scale(c.C))),
        norm_(Array::normal(DType::kF32, c.C, rng)),
        logits_(N_ * c.V * 2),
        qkv_(N_ * QKV_ * 2),
        o_(N_ * c.H * c.D * 2),
        branch_(N_ * c.C * 2),
        act_(N_ * c.F * 2),
        streams_{DeviceMemory(N_ * c.C * 2), DeviceMemory(N_ * c.C * 2)},
        scratch_(N_ * c.C * 2),
        product_(N_ * 2 * c.F * 2),
        ids_(N_ * 4),
        tables_(block_tables(rng)),
        lens_(N_ * 4),
        positions_(N_ * 4),
        slots_(N_ * 8),
        cos_sin_(rope()),
        step_workspace_(std::vector<char>(static_cast<size_t>(cuda::decode_step_workspace_bytes(sizes())))),
        workspace_(
            std::vector<char>(static_cast<size_t>(cuda::paged_attention().decode_workspace_bytes(shape(), kType)))) {
    for (int64_t l = 0; l < c.L; ++l) {
      own({QKV_ * c.C, c.C * c.H * c.D, 2 * c.F * c.C, c.C * c.F}, {c.C, c.H * c.D, c.C, c.F}, rng);
      for (const int64_t n : {c.C, c.C, QKV_, c.D, c.D}) memory_.emplace_back(Array::normal(DType::kF32, n, rng));
      for (int i = 0; i < 2; ++i) {  // keys and values
        memory_.emplace_back(Array::normal(kType, (N_ * width_ + 1) * c.P * c.K * c.D, rng));
      }
      const size_t at = memory_.size() - 11;
      const auto vector = [&](size_t i) { return memory_[at + i].as<float>(); };
      layers_.push_back({memory_[at].data(), memory_[at + 1].data(), memory_[at + 2].data(), memory_[at + 3].data(),
                         vector(4), vector(5), c.bias ? vector(6) : nullptr, c.qk_norm ? vector(7) : nullptr,
                         c.qk_norm ? vector(8) : nullptr, memory_[at + 9].data(), memory_[at + 10].data()});
    }
  }

  PagedShape shape() const {
    return {N_, case_.H, case_.K, case_.D, case_.P, width_, QKV_, case_.H * case_.D, scale(case_.D)};
  }
  DecodeStep sizes() const {
    DecodeStep s{};
    s.L = case_.L, s.C = case_.C, s.F = case_.F, s.V = case_.V;
    s.shape = shape();
    return s;
  }
  DecodeStep step() const {
    DecodeStep s = sizes();
    s.layers = layers_.data();
    s.token_table = table_.data(), s.head = head_.data(), s.norm = norm_.as<float>();
    s.eps = 1e-5f;
    s.ids = ids_.as<int32_t>();
    s.block_tables = tables_.as<int32_t>(), s.context_lens = lens_.as<int32_t>();
    s.cos_sin = cos_sin_.as<float>(), s.positions = positions_.as<int32_t>(), s.slots = slots_.as<int64_t>();
    return s;
  }
  // The inputs of step `number`.
  void set_inputs(int number) {
    std::vector<int32_t> ids, lens, positions;
    std::vector<int64_t> slots;
    for (int64_t n = 0; n < N_; ++n) {
      const int32_t first = case_.lens[static_cast<size_t>(n)], len = first == 0 ? 0 : first + number;
      ids.push_back(static_cast<int32_t>((7 * number + 3 * n + 1) % case_.V));
      lens.push_back(len);
      positions.push_back(std::max(len - 1, 0));
      slots.push_back(len == 0 ? -1
                               : host_tables_[static_cast<size_t>(n * width_ + (len - 1) / case_.P)] * case_.P +
                                     (len - 1) % case_.P);
    }
    const auto upload = [](const DeviceMemory& to, const auto& from) {
      ASSERT_EQ(cudaMemcpy(to.data(), from.data(), from.size() * sizeof(from[0]), cudaMemcpyHostToDevice), cudaSuccess);
    };
    upload(ids_, ids);
    upload(lens_, lens);
    upload(positions_, positions);
    upload(slots_, slots);
  }
  void poison() {
    for (const DeviceMemory* m : {&logits_, &qkv_, &o_, &branch_, &act_}) {
      const Array now = m->array(kType);
      ASSERT_EQ(cudaMemset(m->data(), 0xff, static_cast<size_t>(now.size() * 2)), cudaSuccess);
    }
  }
  void* workspace() const { return workspace_.data(); }
  void* step_workspace() const { return step_workspace_.data(); }
  void* logits() const { return logits_.data(); }
  Array logits_now() const { return logits_.array(kType); }

  KernelError one_by_one() {
    const DecodeLayerKernels& k = cuda::decode_layer();
    const DecodeStep s = step();
    int present = 0;
    KernelError error =
        cuda::embedding().forward(streams_[0].data(), s.ids, s.token_table, nullptr, nullptr, N_, s.C, kType, nullptr);
    const auto normed = [&](void* y, const void* branch, const float* weights, const void* w, const float* bias,
                            int64_t O, bool swiglu) {
      if (error != kKernelOk) return;
      error = k.norm_linear(y,
                            {streams_[1 - present].data(), streams_[present].data(), branch, weights, s.eps,
                             scratch_.data(), product_.data()},
                            w, bias, N_, s.C, O, swiglu, nullptr);
      if (branch != nullptr) present = 1 - present;
    };
    const auto plain = [&](void* y, const void* x, const void* w, int64_t I) {
      if (error == kKernelOk) error = cuda::gemm().linear_forward(y, x, w, nullptr, N_, I, s.C, kType, nullptr);
    };
    for (int64_t l = 0; l < s.L; ++l) {
      const DecodeStepLayer& layer = s.layers[l];
      normed(qkv_.data(), l == 0 ? nullptr : branch_.data(), layer.norm1, layer.qkv_w, layer.qkv_b, QKV_, false);
      const DecodeRotation rotation{layer.q_norm, layer.k_norm, s.eps, s.cos_sin, s.positions, s.slots};
      if (error == kKernelOk) {
        error = k.attention(o_.data(), qkv_.data(), layer.k_cache, layer.v_cache, s.block_tables, s.context_lens,
                            s.shape, rotation, workspace(), nullptr);
      }
      plain(branch_.data(), o_.data(), layer.o_w, case_.H * case_.D);
      normed(act_.data(), branch_.data(), layer.norm2, layer.up_w, nullptr, s.F, true);
      plain(branch_.data(), act_.data(), layer.down_w, s.F);
    }
    normed(logits(), branch_.data(), s.norm, s.head, nullptr, s.V, false);
    return error;
  }
  // Keys and values of all layers.
  std::vector<Array> caches() const {
    std::vector<Array> out;
    for (size_t l = 0; l < layers_.size(); ++l) {
      for (const size_t i : {9, 10}) out.push_back(memory_[11 * l + i].array(kType));
    }
    return out;
  }
  void use_caches_of(const Model& other) {
    for (size_t l = 0; l < layers_.size(); ++l) {
      layers_[l] = other.layers_[l];
      for (const size_t i : {9, 10}) {
        const Array from = other.memory_[11 * l + i].array(kType);
        ASSERT_EQ(cudaMemcpy(memory_[11 * l + i].data(), from.data(), static_cast<size_t>(from.size() * 2),
                             cudaMemcpyHostToDevice),
                  cudaSuccess);
      }
      layers_[l].k_cache = memory_[11 * l + 9].data();
      layers_[l].v_cache = memory_[11 * l + 10].data();
    }
  }

 private:
  static float scale(int64_t n) { return 1.0f / std::sqrt(static_cast<float>(n)); }
  void own(std::vector<int64_t> sizes, std::vector<int64_t> inputs, std::mt19937& rng) {
    for (size_t i = 0; i < sizes.size(); ++i)
      memory_.emplace_back(Array::normal(kType, sizes[i], rng, scale(inputs[i])));
  }
  std::vector<int32_t> block_tables(std::mt19937& rng) {
    for (int64_t i = 0; i < N_ * width_; ++i) host_tables_.push_back(static_cast<int32_t>(i + 1));
    std::shuffle(host_tables_.begin(), host_tables_.end(), rng);
    return host_tables_;
  }
  std::vector<float> rope() const {
    std::vector<float> table(static_cast<size_t>(kMostPositions * case_.D));
    fill_rope_table(table.data(), kMostPositions, case_.D, 10000.0);
    return table;
  }

  const StepCase case_;
  const int64_t N_, QKV_, width_;
  std::vector<int32_t> host_tables_;
  DeviceMemory table_, head_, norm_, logits_, qkv_, o_, branch_, act_, streams_[2], scratch_, product_, ids_, tables_,
      lens_, positions_, slots_, cos_sin_, step_workspace_, workspace_;
  std::deque<DeviceMemory> memory_;  // 11 a layer, as DecodeStepLayer has them
  std::vector<DecodeStepLayer> layers_;
};

void expect_same(const Array& got, const Array& expected, const std::string& what) {
  if (got.same_bits(expected)) return;
  int64_t wrong = 0;
  for (int64_t i = 0; i < got.size(); ++i) {
    const float a = got.get(i), b = expected.get(i);
    if (a == b || (std::isnan(a) && std::isnan(b))) continue;
    if (++wrong <= 4) ADD_FAILURE() << what << ": element " << i << " is " << a << ", one by one " << b;
  }
  EXPECT_EQ(wrong, 0) << what << ", of " << got.size();
}

class DecodeStepTest : public ::testing::TestWithParam<StepCase> {
 protected:
  static void SetUpTestSuite() {
    ASSERT_EQ(cuda::init_libraries({}), kKernelOk);
    ASSERT_EQ(cudaHostAlloc(&report_, sizeof(*report_), cudaHostAllocMapped), cudaSuccess);
    *report_ = 0;
  }
  inline static unsigned* report_ = nullptr;
};

TEST_P(DecodeStepTest, HasTheBitsOfTheOperationsOneByOne) {
  std::mt19937 rng(kSeed);
  Model one_launch(GetParam(), rng);
  std::mt19937 again(kSeed);
  Model one_by_one(GetParam(), again);
  one_by_one.use_caches_of(one_launch);
  ASSERT_TRUE(cuda::decode_step_applies(one_launch.step()));
  for (const int window : {0, 1, 100}) {
    for (int number = 0; number < GetParam().steps; ++number) {
      const std::string what = "window " + std::to_string(window) + " step " + std::to_string(number);
      one_launch.set_inputs(number);
      one_launch.poison();
      ASSERT_EQ(cuda::decode_step(one_launch.logits(), one_launch.step(), one_launch.step_workspace(),
                                  {.window = window, .max_slots = window == 1 ? 6 : 0, .report = report_}, nullptr),
                kKernelOk);
      const cudaError_t ended = cudaDeviceSynchronize();
      ASSERT_EQ(ended, cudaSuccess) << cudaGetErrorString(ended) << ", waited for " << *report_ << ", " << what;
      one_by_one.set_inputs(number);
      ASSERT_EQ(one_by_one.one_by_one(), kKernelOk);
      expect_same(one_launch.logits_now(), one_by_one.logits_now(), what + " logits");
      const std::vector<Array> caches = one_launch.caches(), expected = one_by_one.caches();
      for (size_t i = 0; i < caches.size(); ++i) {
        expect_same(caches[i], expected[i], what + (i % 2 == 0 ? " keys " : " values ") + std::to_string(i / 2));
      }
      if (HasFailure()) return;
    }
  }
}

TEST_P(DecodeStepTest, ReplaysAlikeAsARecordedLaunch) {
  std::mt19937 rng(kSeed);
  Model model(GetParam(), rng);
  model.set_inputs(0);
  cudaStream_t stream;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), cudaSuccess);
  EXPECT_EQ(cuda::decode_step(model.logits(), model.step(), model.step_workspace(), {.report = report_}, stream),
            kKernelOk);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  std::vector<Array> seen;
  for (int i = 0; i < 3; ++i) {
    for (int j = 0; j < 5; ++j) ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
    const cudaError_t ended = cudaStreamSynchronize(stream);
    ASSERT_EQ(ended, cudaSuccess) << cudaGetErrorString(ended) << ", waited for " << *report_;
    seen.push_back(model.logits_now());
    expect_same(seen.back(), seen.front(), "replays " + std::to_string(i));
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

INSTANTIATE_TEST_SUITE_P(Shapes, DecodeStepTest,
                         testing::Values(StepCase{{1}, 64, 96, 100, 1, 2, 1, 32, false, false, 3},
                                         StepCase{{60}, 256, 512, 1000, 3, 8, 2, 64, false, false, 10},
                                         StepCase{{120}, 1024, 3072, 2011, 2, 16, 8, 128, true, false, 12},
                                         StepCase{{300}, 2048, 1000, 333, 2, 12, 1, 80, true, true, 3},
                                         StepCase{{15, 200}, 264, 520, 777, 2, 4, 2, 72, false, true, 4, 5},
                                         StepCase{{130, 0, 1, 65}, 512, 2056, 515, 2, 8, 4, 64, true, true, 4},
                                         StepCase{{700, 900, 641}, 256, 264, 300, 1, 8, 8, 64, false, false, 3},
                                         StepCase{{400}, 1024, 5000, 9000, 1, 16, 4, 64, false, false, 2}));

TEST(DecodeStepSizesTest, WhatDoesNotFitIsRefused) {
  DecodeStep s{};
  s.L = 2, s.C = 4096, s.F = 14336, s.V = 1000;
  s.shape = {1, 32, 8, 128, 16, 64, 6144, 4096, 0.1f};
  EXPECT_TRUE(cuda::decode_step_applies(s));
  for (const auto& change : std::vector<void (*)(DecodeStep&)>{
           [](DecodeStep& x) { x.shape.S = 5; }, [](DecodeStep& x) { x.shape.S = 0; },
           [](DecodeStep& x) { x.shape.S = 4; }, [](DecodeStep& x) { x.L = cuda::kMaxStepLayers + 1; },
           [](DecodeStep& x) { x.C = 4100; }, [](DecodeStep& x) { x.shape.D = 256; },
           [](DecodeStep& x) { x.shape.K = 7; }, [](DecodeStep& x) { x.V = 1 << 23; }}) {
    DecodeStep changed = s;
    change(changed);
    EXPECT_FALSE(cuda::decode_step_applies(changed));
  }
}

}  // namespace
}  // namespace kintsugi::kernels
