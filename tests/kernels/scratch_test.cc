#include "kernels/cpu/scratch.h"

#include <gtest/gtest.h>

#include <thread>

#include "kernels/cpu/isa.h"
#include "kernels/kernel_table.h"
#include "tests/kernels/attention_problem.h"

namespace kintsugi::kernels {
namespace {

// A thread of its own, so that it holds nothing yet.
int64_t held_after_attention(const Problem& p) {
  int64_t held = 0;
  std::thread([&] {
    cpu::set_num_threads(1);
    const AttentionKernels& attention = *cpu::kernels().attention;
    const Sizes& s = p.s;
    std::vector<float> o(static_cast<size_t>(s.B * s.T * p.o_width)), lse(static_cast<size_t>(s.B * s.H * s.T));
    std::vector<float> d_qkv(static_cast<size_t>(s.B * s.T * p.qkv_width));
    float* const dq = d_qkv.data();
    EXPECT_EQ(attention.forward(o.data(), lse.data(), p.q(), p.k(), p.v(), p.shape, DType::kF32, nullptr), kKernelOk);
    EXPECT_EQ(attention.backward(dq, dq + s.H * s.D, dq + (s.H + s.K) * s.D, p.d_o.at(0), o.data(), lse.data(), p.q(),
                                 p.k(), p.v(), p.shape, nullptr, DType::kF32, nullptr),
              kKernelOk);
    held = cpu::held_scratch_bytes();
  }).join();
  return held;
}

TEST(ScratchTest, AttentionHoldsAtMostWhatIsPlannedAndNotMuchLess) {
  std::mt19937 rng(7);
  for (const Sizes& s : {Sizes{2, 256, 8, 8, 32}, Sizes{1, 1000, 4, 2, 128}, Sizes{3, 129, 6, 3, 24}}) {
    const Problem problem(s, DType::kF32, rng);
    const int64_t before = cpu::held_scratch_bytes(), held = held_after_attention(problem) - before;
    const int64_t planned = cpu::attention_scratch_bytes(problem.shape, 1);
    EXPECT_LE(held, planned) << to_string(s);
    EXPECT_GE(held, planned / 2) << to_string(s);
    EXPECT_EQ(cpu::held_scratch_bytes(), before) << "a thread that ends gives back what it held";
  }
}

}  // namespace
}  // namespace kintsugi::kernels
