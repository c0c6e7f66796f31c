// Where the kernels find each tensor inside a unit. Internal to runtime/model.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/types.h"
#include "runtime/model/param_table.h"

namespace kintsugi::runtime {

// All offsets in elements from the unit's first element; kAbsent: the model has no such tensor.
inline constexpr int64_t kAbsent = -1;

struct BlockLayout {
  int64_t norm1_w, norm1_b;
  int64_t qkv_w, qkv_b;  // q, k and v as one matrix of (H + 2 K) D rows
  int64_t q_norm, k_norm;
  int64_t o_w, o_b;
  int64_t norm2_w, norm2_b;
  int64_t up_w, up_b;  // llama: gate and up as one matrix of 2 F rows; gpt2: c_fc
  int64_t down_w, down_b;
};

struct ModelLayout {
  int64_t token_table, position_table;  // in unit 0
  BlockLayout block;                    // in every unit 1 ... L
  int64_t norm_w, norm_b;               // in unit L + 1
  int64_t head_w;                       // in unit L + 1; kAbsent when tied
  static ModelLayout of(const ModelConfig& config, const ParamTable& table);
};

// A unit's weights, as its access gave them out.
struct UnitWeights {
  const float* master;
  const void* compute;
  kernels::DType dtype;
  const float* packed;                       // null: vectors are read from master
  const std::vector<PackedVector>* vectors;  // of the unit

  const float* vector(int64_t offset) const {
    if (offset == kAbsent) return nullptr;
    if (packed == nullptr) return master + offset;
    for (const PackedVector& v : *vectors) {
      if (v.offset == offset) return packed + v.packed;
    }
    return nullptr;  // not a vector: a bug that ModelLayout rules out
  }
  const void* matrix(int64_t offset) const {
    return static_cast<const char*>(compute) + offset * kernels::size_of(dtype);
  }
};

}  // namespace kintsugi::runtime
