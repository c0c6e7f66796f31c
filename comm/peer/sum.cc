#include "comm/peer/sum.h"

#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "comm/reduction_tree.h"
#include "runtime/base/check.h"

namespace kintsugi::comm {

namespace {

// clang-format off
namespace sse {
#define KTG_VECTOR_BYTES 16
#define KTG_STREAM(p, v) _mm_stream_ps(p, reinterpret_cast<__m128>(v))
#include "comm/peer/sum_loops.h"
#undef KTG_VECTOR_BYTES
#undef KTG_STREAM
}  // namespace sse

#pragma GCC push_options
#pragma GCC target("avx2")
namespace avx2 {
#define KTG_VECTOR_BYTES 32
#define KTG_STREAM(p, v) _mm256_stream_ps(p, reinterpret_cast<__m256>(v))
#include "comm/peer/sum_loops.h"
#undef KTG_VECTOR_BYTES
#undef KTG_STREAM
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f")
namespace avx512 {
#define KTG_VECTOR_BYTES 64
#define KTG_STREAM(p, v) _mm512_stream_ps(p, reinterpret_cast<__m512>(v))
#include "comm/peer/sum_loops.h"
#undef KTG_VECTOR_BYTES
#undef KTG_STREAM
}  // namespace avx512
#pragma GCC pop_options
// clang-format on

using EvenFn = void (*)(float* const*, int, const float* const*, int64_t);
using AddFn = void (*)(float*, const float*, const float*, int64_t);

struct Loops {
  EvenFn even[2][4];  // [stream][log2 sources]
  AddFn add;
};

#define KTG_LOOPS(isa)                                                                                     \
  Loops {                                                                                                  \
    {{isa::sum_even<1, false>, isa::sum_even<2, false>, isa::sum_even<4, false>, isa::sum_even<8, false>}, \
     {isa::sum_even<1, true>, isa::sum_even<2, true>, isa::sum_even<4, true>, isa::sum_even<8, true>}},    \
        isa::add_block                                                                                     \
  }

const Loops& loops_of(InstructionSet set) {
  static const Loops kSse = KTG_LOOPS(sse);
  static const Loops kAvx2 = KTG_LOOPS(avx2);
  static const Loops kAvx512 = KTG_LOOPS(avx512);
  return set == InstructionSet::kAvx512 ? kAvx512 : set == InstructionSet::kAvx2 ? kAvx2 : kSse;
}

const Loops& best_loops() {
  static const Loops& chosen = loops_of(usable_instruction_sets().back());
  return chosen;
}

bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 64 == 0; }

constexpr int64_t kBlock = 512;  // floats of one stack entry: 8 entries fit into the first-level cache

void sum_by_postfix(const Loops& loops, float* const* dsts, int num_dsts, const float* const* srcs, const SumTree& tree,
                    int64_t n, bool stream) {
  constexpr int kMaxDepth = 10;  // 1 + log2 of the most leaves, and one to spare
  KTG_CHECK(tree.stack_depth() <= kMaxDepth) << tree.stack_depth();
  alignas(64) float scratch[kMaxDepth][kBlock];
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t size = std::min(kBlock, n - begin);
    const float* stack[kMaxDepth];
    int top = 0;
    for (int16_t op : tree.postfix()) {
      if (op != SumTree::kAdd) {
        stack[top++] = srcs[op] + begin;
        continue;
      }
      --top;
      loops.add(scratch[top - 1], stack[top - 1], stack[top], size);
      stack[top - 1] = scratch[top - 1];
    }
    float* outs[kMaxSumSources];
    for (int d = 0; d < num_dsts; ++d) outs[d] = dsts[d] + begin;
    loops.even[stream][0](outs, num_dsts, &stack[0], size);
  }
}

}  // namespace

void SumTree::finish() {
  int depth = 0;
  for (int16_t op : postfix_) {
    depth += op == kAdd ? -1 : 1;
    stack_depth_ = std::max(stack_depth_, depth);
  }
}

namespace {
void emit(LeafRange node, const std::vector<LeafRange>& sources, size_t& next, std::vector<int16_t>& postfix) {
  if (sources[next] == node) {
    postfix.push_back(static_cast<int16_t>(next++));
    return;
  }
  const int64_t mid = tree_split(node);
  emit({node.begin, mid}, sources, next, postfix);
  emit({mid, node.end}, sources, next, postfix);
  postfix.push_back(SumTree::kAdd);
}
}  // namespace

SumTree SumTree::over(int num_sources) { return of_parts(num_sources, num_sources); }

SumTree SumTree::of_parts(int64_t num_leaves, int world_size) {
  std::vector<LeafRange> sources;
  for (int r = 0; r < world_size; ++r) {
    for (LeafRange part : maximal_subtrees(num_leaves, owned_leaves(num_leaves, r, world_size)))
      sources.push_back(part);
  }
  KTG_CHECK(static_cast<int>(sources.size()) <= kMaxSumSources) << sources.size();
  SumTree tree;
  tree.num_sources_ = static_cast<int>(sources.size());
  size_t next = 0;
  emit({0, num_leaves}, sources, next, tree.postfix_);
  const int64_t size = sources[0].end - sources[0].begin;
  tree.even_ = sources.size() <= 8 && std::has_single_bit(sources.size()) &&
               std::all_of(sources.begin(), sources.end(), [&](LeafRange s) { return s.end - s.begin == size; }) &&
               std::has_single_bit(static_cast<uint64_t>(size));
  tree.even_ = tree.even_ || sources.size() == 1;
  tree.finish();
  return tree;
}

namespace {
void sum_with(const Loops& loops, float* const* dsts, int num_dsts, const float* const* srcs, const SumTree& tree,
              int64_t n, bool stream) {
  // Streaming stores need aligned destinations; a head of unaligned floats is done first when all agree.
  const uintptr_t misaligned = num_dsts > 0 ? reinterpret_cast<uintptr_t>(dsts[0]) % 64 : 0;
  for (int d = 1; d < num_dsts; ++d) stream &= reinterpret_cast<uintptr_t>(dsts[d]) % 64 == misaligned;
  stream &= n >= 64;
  if (stream && misaligned != 0) {
    const int64_t head = static_cast<int64_t>(64 - misaligned) / 4;
    sum_with(loops, dsts, num_dsts, srcs, tree, head, false);
    float* rest_dsts[kMaxSumSources];
    const float* rest_srcs[kMaxSumSources];
    for (int d = 0; d < num_dsts; ++d) rest_dsts[d] = dsts[d] + head;
    for (int s = 0; s < tree.num_sources(); ++s) rest_srcs[s] = srcs[s] + head;
    sum_with(loops, rest_dsts, num_dsts, rest_srcs, tree, n - head, true);
    return;
  }
  if (tree.is_even()) {
    loops.even[stream][std::bit_width(static_cast<unsigned>(tree.num_sources())) - 1](dsts, num_dsts, srcs, n);
  } else {
    sum_by_postfix(loops, dsts, num_dsts, srcs, tree, n, stream);
  }
  if (stream) _mm_sfence();
}
}  // namespace

void tree_sum(float* const* dsts, int num_dsts, const float* const* srcs, const SumTree& tree, int64_t n,
              bool stream_stores) {
  sum_with(best_loops(), dsts, num_dsts, srcs, tree, n, stream_stores);
}

std::vector<InstructionSet> usable_instruction_sets() {
  std::vector<InstructionSet> sets = {InstructionSet::kSse};
  if (__builtin_cpu_supports("avx2")) sets.push_back(InstructionSet::kAvx2);
  if (__builtin_cpu_supports("avx512f")) sets.push_back(InstructionSet::kAvx512);
  return sets;
}

void tree_sum_with(InstructionSet set, float* const* dsts, int num_dsts, const float* const* srcs, const SumTree& tree,
                   int64_t n, bool stream_stores) {
  sum_with(loops_of(set), dsts, num_dsts, srcs, tree, n, stream_stores);
}

void copy_bytes(void* dst, const void* src, int64_t size_bytes, bool stream_stores) {
  if (dst == src || size_bytes == 0) return;
  if (!stream_stores || !aligned(dst) || reinterpret_cast<uintptr_t>(src) % 4 != 0) {
    std::memcpy(dst, src, static_cast<size_t>(size_bytes));
    return;
  }
  const int64_t floats = size_bytes / 4;
  float* dsts[1] = {static_cast<float*>(dst)};
  const float* srcs[1] = {static_cast<const float*>(src)};
  best_loops().even[1][0](dsts, 1, srcs, floats);
  std::memcpy(static_cast<char*>(dst) + floats * 4, static_cast<const char*>(src) + floats * 4,
              static_cast<size_t>(size_bytes % 4));
  _mm_sfence();
}

}  // namespace kintsugi::comm
