// A product of kernels/gemm.h as cuBLASLt sees it, and the algorithm chosen for it. Internal to kernels/cuda.
//
// cuBLASLt stores by columns: a row-major (R, C) array is its (C, R) matrix with leading dimension C. So
//   forward          y^T  (O, N) = w (I, O)^T . x (I, N)       K = I
//   backward_input   dx^T (I, N) = w (I, O) . dy (O, N)        K = O
//   backward_weight  dw^T (I, O) = x (I, N) . dy (O, N)^T      K = N
#pragma once

#include <cublasLt.h>

#include <vector>

#include "kernels/cuda/gemm_table.h"
#include "kernels/types.h"

namespace kintsugi::kernels::cuda {

struct Operands {
  void* d;        // y, dx or dw
  const void* a;  // w, w or x
  const void* b;  // x, dy or dy
  void* bias =
      nullptr;         // (O): what kBias and kBiasGelu add, of the problem's dtype; what kBiasGradient stores, in fp32
  void* up = nullptr;  // what kBiasGelu stores (N, O) and kGeluGradient reads (N, I), of the problem's dtype
};

// Descriptors without an owner: plain structs that live where they are declared.
class Matmul {
 public:
  // Every other member may be used only after this succeeded. Of the operands only the epilogue's matter here; when
  // only algorithms are asked for, they may be any aligned pointers.
  cublasStatus_t init(const GemmProblem& problem, const Operands& operands);

  // At most `count` algorithms, the library's favourite first, none that needs more than `scratch_bytes` or, when
  // `deterministic`, that adds partial sums in an order that may vary.
  cublasStatus_t propose(std::vector<cublasLtMatmulAlgo_t>* algorithms, int count, bool deterministic,
                         int64_t scratch_bytes);
  // Whether the library knows the algorithm, for this product and within the same bounds.
  bool accepts(const cublasLtMatmulAlgo_t& algorithm, bool deterministic, int64_t scratch_bytes);
  cublasStatus_t run(const Operands& operands, const cublasLtMatmulAlgo_t& algorithm, void* scratch,
                     int64_t scratch_bytes, cudaStream_t stream);

 private:
  cublasStatus_t add_epilogue(const GemmProblem& problem, const Operands& operands);

  cublasLtMatmulDescOpaque_t operation_;
  cublasLtMatrixLayoutOpaque_t a_, b_, d_;
  bool accumulate_ = false, aligned_ = true, fp32_input_ = false, fp32_output_ = false;
};

// At most `count` algorithms within the process's bounds (library_handles.h): those that the library proposes, eight at
// most whatever is asked for; these with tiles that divide the output well (gemm_tiles.h); and those that it proposes
// for products of half, twice, a quarter and four times a size, where it runs them here, too. Its model of the device
// is off by more than they differ.
cublasStatus_t propose_widely(std::vector<cublasLtMatmulAlgo_t>* algorithms, Matmul& matmul, const GemmProblem& problem,
                              const Operands& operands, int count);

// *algorithm: the one that use_gemm_table() gave for the product, or else the library's favourite, which is asked for
// once and kept. Allocates only then.
KernelError algorithm_for(cublasLtMatmulAlgo_t* algorithm, const GemmProblem& problem, Matmul& matmul);

// The choice for `problem` from here on.
void set_algorithm(const GemmProblem& problem, const cublasLtMatmulAlgo_t& algorithm);
void forget_algorithms();

}  // namespace kintsugi::kernels::cuda
