// SPDX-License-Identifier: Apache-2.0
/// \file
/// Weights of a layer's experts, for objects that compute with several weight sets.
#pragma once

namespace switchyard {

/// Weights of the L SwiGLU experts of one rank. The consuming object determines their type and sizes; the caller owns the
/// memory. All pointers may be null on a rank without experts.
struct MoeWeights {
  const void* w13 = nullptr;         ///< [L, 2 * I, H]: for each expert, the I gate rows followed by the I up rows
  const void* w2 = nullptr;          ///< [L, H, I]
  const void* w13_scales = nullptr;  ///< fp8: [L, 2 * ceil(I / 128), ceil(H / 128)]; else null
  const void* w2_scales = nullptr;   ///< fp8: [L, ceil(H / 128), ceil(I / 128)]; else null
  /// GPUs: cudaStream_t for reads outside calls, for example of scales at construction; null: the legacy default stream.
  void* stream = nullptr;
};

}  // namespace switchyard
