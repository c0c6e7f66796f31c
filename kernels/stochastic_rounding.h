// Stochastic rounding of fp32 to bfloat16, for host and device: up with a probability that is the distance from the
// bfloat16 below in units of the distance between the two, so that the expected value is the number itself, to the bit
// (16 bits fall away, and 16 random ones decide). A moment that changes by less than half a unit a step then still
// moves on average, where rounding to nearest would leave it for ever (Gupta et al., ICML 2015).
//
// The random bits of an element are a function of the run's seed, the step, the element's place in the whole model and
// which of its moments it is: the same in every mode, at every world size and after a resume.
#pragma once

#include "kernels/philox.h"

namespace kintsugi::kernels {

// RandomPurpose::kMomentRounding of runtime/base/philox.h.
inline constexpr uint32_t kMomentRoundingPurpose = 4;

// Of four neighbouring elements, the first of which is element 4 `quad` of the model: word[e] has 16 bits for the first
// moment of the e-th in its low half, and for the second moment in its high half.
[[gnu::always_inline]] constexpr PhiloxBlock moment_bits(uint64_t seed, int64_t step, int64_t quad) {
  const auto index = static_cast<uint64_t>(quad);
  return philox4x32({{static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), static_cast<uint32_t>(step),
                      kMomentRoundingPurpose}},
                    static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
}

// The bits of the bfloat16 for those of an fp32 number; of `random` the low 16 count. What is not finite stays so (a
// NaN is made quiet), and a number above the largest bfloat16 may become infinite.
[[gnu::always_inline]] constexpr uint16_t round_stochastically(uint32_t bits, uint32_t random) {
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  if ((bits & 0x7fffffffu) == 0x7f800000u) return static_cast<uint16_t>(bits >> 16);
  return static_cast<uint16_t>((bits + (random & 0xffffu)) >> 16);
}

}  // namespace kintsugi::kernels
