// A model's weights where nothing is trained: inference, evaluation, their tests and measurements.
#pragma once

#include <memory>

#include "runtime/backend.h"
#include "runtime/model/param_table.h"
#include "runtime/model/transformer.h"

namespace kintsugi::runtime {

struct ModelWeights {
  Buffer master;                           // fp32, the flat space of the table
  Buffer compute;                          // the same as the kernels read it; empty for fp32
  std::unique_ptr<FlatUnitAccess> access;  // to both, without gradients

  // Memory on the backend, its contents undefined. `params` must outlive it.
  static Result<ModelWeights> allocate(const ParamTable& params, DType dtype, Backend& backend);
  // After each change of `master`: makes the copy anew, and waits for it.
  Status changed(Backend& backend, Stream& stream);

  int64_t size_bytes() const { return master.size_bytes() + compute.size_bytes(); }

 private:
  DType dtype_ = DType::kF32;
};

}  // namespace kintsugi::runtime
