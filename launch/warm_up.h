// One micro-batch over private memory, so that the first real step of a spare finds its code loaded, its matrix
// products prepared and its activations mapped.
#pragma once

#include "runtime/backend.h"
#include "runtime/model/transformer.h"

namespace kintsugi::launch {

// Takes memory for twice the largest unit and gives it back. The weights are zero: only shapes matter. documents: the
// run's batches say where documents begin.
Status warm_up(runtime::Transformer& model, runtime::Backend& backend, int64_t B, int64_t T, bool documents,
               runtime::Stream& stream);

}  // namespace kintsugi::launch
