// Where each parameter lies. All parameters of a model form one flat space of fp32 elements, cut
// into units: the token (and position) embedding; each block; the final norm and head. A unit is
// what is reduced or gathered at once. The same offsets serve the master weights, the gradients
// and both moments; padding elements are zero in all of them, always.
//
// Tensors carry Hugging Face names and shapes (rows, columns) = (output, input). Tensors that one
// matrix product uses together (q, k, v; gate, up) follow each other without a gap.
// GPT-2's Conv1D weights are kept as (output, input), transposed against Hugging Face's files.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/model/model_config.h"

namespace kintsugi::runtime {

class Backend;
class Stream;

enum class Init { kZero, kOne, kNormal };

struct TensorInfo {
  std::string name;            // "model.layers.0.self_attn.q_proj.weight"
  std::vector<int64_t> shape;  // (O, I), (V, C) or (C)
  int unit;
  int64_t offset;  // elements from the start of the flat space
  int64_t numel;
  bool decay;   // weight decay: matrices only
  bool matrix;  // read by the kernels in the compute dtype; vectors stay fp32
  Init init;
  float init_std;
};

struct UnitInfo {
  std::string name;  // "embedding", "block.0", "head"
  int64_t offset;    // a multiple of kUnitAlignment
  int64_t length;    // a multiple of kUnitAlignment, padding included
  int first_tensor, num_tensors;
};

inline constexpr int64_t kUnitAlignment = 64;  // elements: 256 bytes of fp32

class ParamTable {
 public:
  // config.validate() holds.
  static ParamTable build(const ModelConfig& config);
  const std::vector<UnitInfo>& units() const { return units_; }
  const std::vector<TensorInfo>& tensors() const { return tensors_; }
  int num_units() const { return static_cast<int>(units_.size()); }
  int64_t total_length() const;    // elements of the flat space, padding included
  int64_t num_parameters() const;  // a tied table once, no padding
  const TensorInfo* find(const std::string& name) const;
  const TensorInfo& token_table() const { return tensors_.front(); }  // (V, C)
  bool tied() const;                                                  // the head's matrix is the token table

 private:
  std::vector<UnitInfo> units_;
  std::vector<TensorInfo> tensors_;
};

// The vectors of a unit, one after another: where a mode keeps them apart from the matrices. Those that join each other
// in the unit do so here, too; the others begin at multiples of kUnitAlignment.
struct PackedVector {
  int64_t offset;  // in the unit
  int64_t packed;
  int64_t numel;
};
std::vector<PackedVector> packed_vectors(const ParamTable& table, int unit);
// A multiple of kUnitAlignment.
int64_t packed_length(const ParamTable& table, int unit);

// Initial weights of flat elements [begin, begin + count) into `out`. Counter based (Philox 4x32-10, Salmon et al.,
// SC 2011), keyed by (seed, purpose, global element index): the same whatever the layout, rank or thread count.
void init_parameters(float* out, const ParamTable& table, uint64_t seed, int64_t begin, int64_t count);
// The same bits for the whole space in memory of `backend`, drawn by its kernels where they can; otherwise drawn here,
// and `out` is memory that the host writes. Waits for `stream`.
Status init_parameters(float* out, const ParamTable& table, uint64_t seed, Backend& backend, Stream& stream);

}  // namespace kintsugi::runtime
