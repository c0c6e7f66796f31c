// What of AttentionKernels is a call of another family after attention's own kernels, where these do not include it.
#pragma once

#include "kernels/attention.h"
#include "kernels/rope.h"

namespace kintsugi::kernels {

// The last step of AttentionKernels::backward: dq and dk as before the rotation, in place. Nothing without one.
// kRope: the implementation's getter.
template <const RopeKernels& (*kRope)()>
KernelError turn_back(void* dq, void* dk, const AttentionShape& s, DType dtype, StreamHandle stream) {
  if (s.cos_sin == nullptr) return kKernelOk;
  const RopeKernels& rope = kRope();
  const int64_t N = s.B * s.T;
  const bool side_by_side =
      s.q_stride == s.k_stride && static_cast<char*>(dq) + s.H * s.D * size_of(dtype) == static_cast<char*>(dk);
  if (side_by_side) return rope.rotate(dq, s.positions, s.cos_sin, N, s.H + s.K, s.D, s.q_stride, true, dtype, stream);
  const KernelError error = rope.rotate(dq, s.positions, s.cos_sin, N, s.H, s.D, s.q_stride, true, dtype, stream);
  if (error != kKernelOk) return error;
  return rope.rotate(dk, s.positions, s.cos_sin, N, s.K, s.D, s.k_stride, true, dtype, stream);
}

}  // namespace kintsugi::kernels
