// The choice of cuBLASLt's algorithms by timing: once for a run's products, by one rank. The table (gemm_table.h) then
// goes to the other ranks and into the run's checkpoints, and each process uses it instead of timing.
//   GemmTable table = cached or empty;   table.environment = gemm_environment()
//   tune_gemms(&table, table.missing(problems), ...);   to_text(table) -> everybody;   use_gemm_table(table, &why)
// A product that the table does not hold runs with the library's own first choice, which is the same on every machine
// with the same GPU and library.
// Between init_libraries() and the first step; one thread at a time.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "kernels/cuda/gemm_table.h"
#include "kernels/types.h"

namespace kintsugi::kernels::cuda {

// Of the current device. An empty name when there is none.
GemmEnvironment gemm_environment();

struct GemmTuningOptions {
  int candidates = 24;       // algorithms a product that are timed: see propose_widely()
  int long_candidates = 12;  // of a product that takes about a millisecond or more
  int repetitions = 5;       // the candidates take turns, slow ones only once
  double lasting_ms = 0;     // above 0: the best few also run for this long at a time, and the fastest then wins
  double budget_ms = 1500;   // products whose turn comes later keep the library's first choice
};

struct GemmTuning {
  GemmProblem problem;
  double first_us = 0, best_us = 0;  // the library's first choice and the one that was taken; 0: not timed
  int candidates = 0, taken = 0;     // how many were timed, and which
};

// Scratch memory that tune_gemms() wants: operands of the largest product.
int64_t gemm_tuning_scratch_bytes(std::span<const GemmProblem> problems);

// Times the algorithms of each product on `scratch` (overwritten with random numbers) and puts the one into `table`
// that costs least: the time of a moment, weighed with what its tile draws (gemm_tiles.h), or that under a lasting
// load. The products with the most operations come first. Blocks until the timing is done. `report`: one entry a
// product, or null. A product whose operands do not fit into scratch_bytes, or that comes after the budget was used up,
// gets the library's first choice; one that the library does not know at all is left out.
KernelError tune_gemms(GemmTable* table, std::span<const GemmProblem> problems, void* scratch, int64_t scratch_bytes,
                       const GemmTuningOptions& options, StreamHandle stream, std::vector<GemmTuning>* report);

// Removes what this process may not use: a table may come from a run that allowed sums in an order that varies.
void drop_refused(GemmTable* table);

// The products of `table` run with its algorithms from here on, all others with the library's first choice. False, and
// nothing changes, when the table was made on another GPU or by another version of the library, or holds an algorithm
// that this one refuses: *why says which.
bool use_gemm_table(const GemmTable& table, std::string* why);

}  // namespace kintsugi::kernels::cuda
