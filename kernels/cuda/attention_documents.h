// Packed documents for attention libraries that know no borders: a number that is added to each score, 0 inside a
// document, and so low elsewhere that the weight is exactly 0. Internal to kernels/cuda.
//   B batch   T tokens
#pragma once

#include "kernels/types.h"

namespace kintsugi::kernels::cuda {

// Elements of a row of the mask: rows begin at multiples of 16 bytes.
constexpr int64_t document_mask_stride(int64_t T) { return (T + 7) / 8 * 8; }

// mask (B, T, stride) bf16: [b][t][u] is 0 where u lies in t's document or behind it, -2^30 before it. stride as
// above. document_starts as in kernels/attention.h; mask lies at a multiple of 16 bytes. B and T above 0.
KernelError fill_document_mask(void* mask, const int32_t* document_starts, int64_t B, int64_t T, StreamHandle stream);

}  // namespace kintsugi::kernels::cuda
