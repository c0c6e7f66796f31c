// Hopper's own instructions (sm_90a) as functions: barriers that count bytes, tiles moved by the copy engine, matrix
// products by warpgroups. Internal to kernels/cuda. Meaning: "PTX ISA", sections mbarrier, cp.async.bulk.tensor, wgmma.
//
// Shared memory is named by 32-bit addresses (shared_address()). Tiles that a product reads are laid out by the copy
// engine in rows of 128 bytes with the 128-byte swizzle: the 16-byte piece p of row r lies at piece p ^ (r % 8). They
// begin at multiples of 1,024 bytes.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace kintsugi::kernels::cuda::hopper {

inline constexpr int kMostSharedBytes = 232448;  // of a thread block

__device__ inline uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// ---- Barriers (8 bytes of shared memory). Phases alternate between parity 0, the first, and 1.

__device__ inline void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// After all barrier_init(), by the thread that called it; then a barrier of all that use them.
__device__ inline void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ inline void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// At the same barrier of block `rank` of the cluster.
__device__ inline void arrive_at(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n .reg .b32 there;\n mapa.shared::cluster.u32 there, %0, %1;\n"
      " mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
// One arrival, and so many bytes that copies will bring before the phase is over.
__device__ inline void arrive_and_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ inline bool passed(uint32_t barrier, uint32_t parity) {
  uint32_t passed;
  asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
               : "=r"(passed)
               : "r"(barrier), "r"(parity)
               : "memory");
  return passed != 0;
}
__device__ inline void wait(uint32_t barrier, uint32_t parity) {
  while (!passed(barrier, parity)) {
  }
}

// Barriers by number, of `threads` threads (whole warps): meet() waits for the others, leave() only counts.
__device__ inline void meet(int32_t number, int32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
__device__ inline void leave(int32_t number, int32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// ---- Clusters

__device__ inline uint32_t rank_in_cluster() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// All threads of all blocks of the cluster; each warp in one piece.
__device__ inline void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// ---- Copies of tiles. What lies outside of the tensor reads as zeros and is not written.

__device__ inline void load_tile(uint32_t to, const CUtensorMap& map, int32_t x, int32_t y, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          to),
      "l"(&map), "r"(x), "r"(y), "r"(barrier)
      : "memory");
}
__device__ inline void load_tile(uint32_t to, const CUtensorMap& map, int32_t x, int32_t y, int32_t z,
                                 uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(to),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}
// To the same address and barrier of every block of the cluster whose bit is set in `blocks`.
__device__ inline void load_tile_for_all(uint32_t to, const CUtensorMap& map, int32_t x, int32_t y, uint32_t barrier,
                                         uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(&map), "r"(x), "r"(y), "r"(barrier), "h"(blocks)
      : "memory");
}
__device__ inline void load_tile_for_all(uint32_t to, const CUtensorMap& map, int32_t x, int32_t y, int32_t z,
                                         uint32_t barrier, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier), "h"(blocks)
      : "memory");
}
// A stretch of memory; both ends at multiples of 16 bytes, and so is its length.
__device__ inline void load_bytes(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
// Ordinary stores to shared memory become visible to the copy engine: by each thread that stored, then a barrier, then
// store_tile() by one thread, which also commits and waits.
__device__ inline void publish_stores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ inline void store_tile(const CUtensorMap& map, int32_t x, int32_t y, uint32_t from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(x),
               "r"(y), "r"(from)
               : "memory");
}
__device__ inline void store_tile(const CUtensorMap& map, int32_t x, int32_t y, int32_t z, uint32_t from) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(&map), "r"(x),
               "r"(y), "r"(z), "r"(from)
               : "memory");
}
__device__ inline void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until shared memory was read by all but the last kLeft groups of this thread.
template <int kLeft>
__device__ inline void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLeft) : "memory");
}

// ---- Ordinary accesses to shared memory

__device__ inline void store_shared(uint32_t to, int32_t x) {
  asm volatile("st.shared.s32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}
__device__ inline void load_shared(int32_t& x, uint32_t from) {
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
}
__device__ inline void load_shared(float4& x, uint32_t from) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(from)
               : "memory");
}

// ---- Four 8 x 8 matrices of bf16 between shared memory and a warp's registers: lane l gives the address of row l % 8
// of matrix l / 8, and holds columns 2 (l % 4) and the next of row l / 4 of each.

__device__ inline void load_matrices(uint32_t (&m)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row));
}
__device__ inline void store_matrices(uint32_t row, const uint32_t (&m)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(m[0]), "r"(m[1]),
               "r"(m[2]), "r"(m[3]));
}

// ---- Registers of a warpgroup: fewer for one that only copies, more for those that multiply.

template <int kRegisters>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- Products of a warpgroup (128 threads): d (64, n) fp32 in registers, += a (64, 16) b (16, n), b in shared memory,
// a there or in registers. Thread t's d[4 j + e]: row 16 (t / 32) + (t % 32) / 4 + 8 (e / 2), column 8 j + 2 (t % 4) +
// e % 2.

// a: 64 rows; b (kTransposeB = 0): n rows; both with the summed index along the row, of which 64 elements are a tile's
// row. 16 further along the row: + 2.
__device__ inline uint64_t rows_operand(uint32_t tile) {
  return uint64_t{(tile & 0x3ffff) >> 4} | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}
// b (kTransposeB = 1): rows are the summed index, of 64 of the n columns each; `pitch`: bytes from the tile of 64
// columns to that of the next 64. 16 rows further: + 128.
__device__ inline uint64_t columns_operand(uint32_t tile, uint32_t pitch) {
  return uint64_t{(tile & 0x3ffff) >> 4} | uint64_t{pitch >> 4} << 16 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}

// Before the first of some products: what the registers and shared memory hold is what they see.
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until all but the last kLeft committed groups are complete.
template <int kLeft>
__device__ inline void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}
// The compiler moves no use of d across.
template <int kCount>
__device__ inline void pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

#define KTG_OUT8(d, i)                                                                                        \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])

// d = a b when `accumulate` is 0, else d += a b.
template <int kTransposeB>
__device__ inline void multiply(float (&d)[80], uint64_t a, uint64_t b, int32_t accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %82, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n160k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79}, "
      "%80, %81, p, 1, 1, 0, %83;\n}"
      : KTG_OUT8(d, 0), KTG_OUT8(d, 8), KTG_OUT8(d, 16), KTG_OUT8(d, 24), KTG_OUT8(d, 32), KTG_OUT8(d, 40),
        KTG_OUT8(d, 48), KTG_OUT8(d, 56), KTG_OUT8(d, 64), KTG_OUT8(d, 72)
      : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposeB));
}

template <int kTransposeB>
__device__ inline void multiply(float (&d)[96], uint64_t a, uint64_t b, int32_t accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %98, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}, "
      "%96, %97, p, 1, 1, 0, %99;\n}"
      : KTG_OUT8(d, 0), KTG_OUT8(d, 8), KTG_OUT8(d, 16), KTG_OUT8(d, 24), KTG_OUT8(d, 32), KTG_OUT8(d, 40),
        KTG_OUT8(d, 48), KTG_OUT8(d, 56), KTG_OUT8(d, 64), KTG_OUT8(d, 72), KTG_OUT8(d, 80), KTG_OUT8(d, 88)
      : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposeB));
}

template <int kTransposeB>
__device__ inline void multiply(float (&d)[32], uint64_t a, uint64_t b, int32_t accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, p, 1, 1, 0, %35;\n}"
      : KTG_OUT8(d, 0), KTG_OUT8(d, 8), KTG_OUT8(d, 16), KTG_OUT8(d, 24)
      : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposeB));
}
// a in registers: each warp its 16 rows, as load_matrices() brings them (matrices 0 and 1: the upper and the lower 8
// rows of the first 8 columns, 2 and 3: of the next).
template <int kTransposeB>
__device__ inline void multiply(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int32_t accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}"
      : KTG_OUT8(d, 0), KTG_OUT8(d, 8), KTG_OUT8(d, 16), KTG_OUT8(d, 24)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransposeB));
}

template <int kTransposeB>
__device__ inline void multiply(float (&d)[64], const uint32_t (&a)[4], uint64_t b, int32_t accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}"
      : KTG_OUT8(d, 0), KTG_OUT8(d, 8), KTG_OUT8(d, 16), KTG_OUT8(d, 24), KTG_OUT8(d, 32), KTG_OUT8(d, 40),
        KTG_OUT8(d, 48), KTG_OUT8(d, 56)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransposeB));
}

#undef KTG_OUT8

}  // namespace kintsugi::kernels::cuda::hopper
