// SPDX-License-Identifier: Apache-2.0
/// \file
/// The weights of a layer's experts, for objects that compute with several of them.
#pragma once

namespace switchyard {

/// Weights of the SwiGLU experts of one rank, L of them. Type and sizes are those of the object that takes them; the memory is
/// the caller's. All may be null on a rank without experts.
struct MoeWeights {
  const void* w13 = nullptr;         ///< [L, 2 * I, H]: of each expert first the I gate rows, then the I up rows
  const void* w2 = nullptr;          ///< [L, H, I]
  const void* w13_scales = nullptr;  ///< fp8: [L, 2 * ceil(I / 128), ceil(H / 128)]; else null
  const void* w2_scales = nullptr;   ///< fp8: [L, ceil(H / 128), ceil(I / 128)]; else null
  /// GPUs: cudaStream_t in whose order the object reads what it does not leave to its calls; null: the legacy default stream.
  void* stream = nullptr;
};

}  // namespace switchyard
