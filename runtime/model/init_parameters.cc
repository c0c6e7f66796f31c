// Initial weights: Philox words turned into normals by Box and Muller's transform, all in fp32 with nothing but
// +, -, *, sqrt and bit operations. Those are exact by IEEE 754, so every machine gets the same bits; libm's log
// and cos would not promise it. This file is compiled without contraction into fused multiply-adds for that reason.
#include <algorithm>
#include <bit>
#include <cmath>

#include "kernels/philox.h"
#include "runtime/backend.h"
#include "runtime/base/philox.h"
#include "runtime/model/param_table.h"

// Inlined into each of its callers, so that it is compiled for each of their instruction sets.
#define KTG_INLINE [[gnu::always_inline]] inline

namespace kintsugi::runtime {
namespace {

constexpr int64_t kLanes = 16;            // blocks of four words made side by side, so that the loops vectorise
constexpr int64_t kNormals = 4 * kLanes;  // normals a group
using Words = uint32_t[4][kLanes];

// Blocks of kLanes consecutive indices from `first`.
KTG_INLINE void philox_lanes(Words& w, uint64_t seed, uint64_t first) {
  for (int64_t i = 0; i < kLanes; ++i) {
    const uint64_t index = first + static_cast<uint64_t>(i);
    const kernels::PhiloxBlock block =
        kernels::philox4x32({{static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), 0,
                              static_cast<uint32_t>(RandomPurpose::kInitialWeights)}},
                            static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
    for (int k = 0; k < 4; ++k) w[k][i] = block.word[k];
  }
}

// sqrt(-2 ln u) for u = (top 24 bits of word + 1) / 2^24, in (0, 1]. The logarithm splits u into 2^e (1 + f),
// 1 + f in [sqrt(1/2), sqrt(2)); ln(1 + f) = f + f^2 p(f) with p fitted at Chebyshev nodes (error 4e-8).
KTG_INLINE float radius(uint32_t word) {
  const float u = static_cast<float>(static_cast<int32_t>(word >> 8) + 1) * 0x1p-24f;
  constexpr int32_t kRootHalf = 0x3f3504f3;  // bits of sqrt(1/2)
  const int32_t shifted = std::bit_cast<int32_t>(u) - kRootHalf;
  const float e = static_cast<float>(shifted >> 23);
  const float f = std::bit_cast<float>((shifted & 0x7fffff) + kRootHalf) - 1.0f;
  float p = -0.07673641f;
  p = p * f + 0.12722673f;
  p = p * f - 0.13127555f;
  p = p * f + 0.14204855f;
  p = p * f - 0.16626646f;
  p = p * f + 0.20001234f;
  p = p * f - 0.2500078f;
  p = p * f + 0.3333333f;
  p = p * f - 0.49999997f;
  const float log_u = e * 0.6931472f + (f + f * f * p);
  return std::sqrt(std::max(-2.0f * log_u, 0.0f));
}

// r cos and r sin of the angle of `word` / 2^32 turns: the top two bits choose the quarter, the rest is an angle
// t quarter turns, t in [-1/2, 1/2), whose sine and cosine are polynomials in t^2 (errors below 5e-9).
KTG_INLINE void polar(float r, uint32_t word, float* a, float* b) {
  const float t = static_cast<float>(static_cast<int32_t>((word << 2) >> 8) - (1 << 23)) * 0x1p-24f;
  const float z = t * t;
  const float sine = t * (((-0.004602149f * z + 0.07968022f) * z - 0.6459635f) * z + 1.5707964f);
  const float cosine = (((0.00090362807f * z - 0.02086007f) * z + 0.2536692f) * z - 1.2337005f) * z + 1.0f;
  const bool swap = (word >> 30) & 1;
  const uint32_t flip = word & 0x80000000u;
  const float x = swap ? -sine : cosine, y = swap ? cosine : sine;
  *a = r * std::bit_cast<float>(std::bit_cast<uint32_t>(x) ^ flip);
  *b = r * std::bit_cast<float>(std::bit_cast<uint32_t>(y) ^ flip);
}

// Standard normals number group * kNormals + 0 ... kNormals - 1; number n comes from words of index n / 4.
KTG_INLINE void normal_group_body(float* out, uint64_t seed, int64_t group) {
  Words w;
  philox_lanes(w, seed, static_cast<uint64_t>(group * kLanes));
  float n[4][kLanes];
  for (int64_t i = 0; i < kLanes; ++i) {
    polar(radius(w[0][i]), w[1][i], &n[0][i], &n[1][i]);
    polar(radius(w[2][i]), w[3][i], &n[2][i], &n[3][i]);
  }
  for (int64_t i = 0; i < kLanes; ++i) {
    for (int64_t k = 0; k < 4; ++k) out[4 * i + k] = n[k][i];
  }
}

// The same loops compiled for wider registers: the same bits, since lanes do not meet and nothing is contracted.
using NormalGroup = void (*)(float*, uint64_t, int64_t);
void normal_group_plain(float* out, uint64_t seed, int64_t group) { normal_group_body(out, seed, group); }
#if defined(__x86_64__)
__attribute__((target("avx2"))) void normal_group_avx2(float* out, uint64_t seed, int64_t group) {
  normal_group_body(out, seed, group);
}
__attribute__((target("avx512f,avx512dq"))) void normal_group_avx512(float* out, uint64_t seed, int64_t group) {
  normal_group_body(out, seed, group);
}
NormalGroup widest_normal_group() {
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq")) return normal_group_avx512;
  return __builtin_cpu_supports("avx2") ? normal_group_avx2 : normal_group_plain;
}
#else
NormalGroup widest_normal_group() { return normal_group_plain; }
#endif

// out[i] = std * (normal number begin + i).
void fill_normal(float* out, uint64_t seed, int64_t begin, int64_t count, float std) {
  static const NormalGroup normal_group = widest_normal_group();
  float group[kNormals];
  for (int64_t at = begin; at < begin + count;) {
    const int64_t inside = at % kNormals;
    const int64_t take = std::min(kNormals - inside, begin + count - at);
    normal_group(group, seed, at / kNormals);
    for (int64_t i = 0; i < take; ++i) out[at - begin + i] = std * group[inside + i];
    at += take;
  }
}

}  // namespace

void init_parameters(float* out, const ParamTable& table, uint64_t seed, int64_t begin, int64_t count) {
  const int64_t end = begin + count;
  KTG_CHECK(begin >= 0 && count >= 0 && end <= table.total_length()) << begin << " + " << count;
  std::fill(out, out + count, 0.0f);  // padding and zero tensors
  for (const TensorInfo& t : table.tensors()) {
    const int64_t lo = std::max(begin, t.offset), hi = std::min(end, t.offset + t.numel);
    if (lo >= hi || t.init == Init::kZero) continue;
    if (t.init == Init::kOne) {
      std::fill(out + (lo - begin), out + (hi - begin), 1.0f);
    } else {
      fill_normal(out + (lo - begin), seed, lo, hi - lo, t.init_std);
    }
  }
}

Status init_parameters(float* out, const ParamTable& table, uint64_t seed, Backend& backend, Stream& stream) {
  const kernels::KernelTable& k = backend.kernels();
  if (k.random == nullptr) {
    init_parameters(out, table, seed, 0, table.total_length());
    return ok_status();
  }
  KTG_RETURN_IF_ERROR(backend.zero(out, table.total_length() * static_cast<int64_t>(sizeof(float)), stream));
  for (const TensorInfo& t : table.tensors()) {
    if (t.init != Init::kNormal) continue;
    KTG_RETURN_IF_ERROR(stream.launched(
        k.random->fill_normal(out + t.offset, seed, static_cast<uint32_t>(RandomPurpose::kInitialWeights), t.offset,
                              t.numel, t.init_std, stream.handle()),
        "initial weights"));
  }
  std::vector<float> ones;
  for (const TensorInfo& t : table.tensors()) {
    if (t.init == Init::kOne) ones.resize(std::max(ones.size(), static_cast<size_t>(t.numel)), 1.0f);
  }
  for (const TensorInfo& t : table.tensors()) {
    if (t.init != Init::kOne) continue;
    const auto bytes = t.numel * static_cast<int64_t>(sizeof(float));
    KTG_RETURN_IF_ERROR(backend.copy(out + t.offset, ones.data(), bytes, stream));
  }
  // The copies read `ones`.
  return stream.synchronize(Deadline::after(std::chrono::seconds(60)));
}

}  // namespace kintsugi::runtime
