// SPDX-License-Identifier: Apache-2.0
// The interface through which a fused layer on the CPU (exchange/fused) multiplies: the exchange library contains no products.
#pragma once

#include <cstdint>

namespace switchyard::detail {

/// Both matrix products of one rank's experts on the CPU. MoeLayer supplies those of ExpertMlp (fused_products.hpp). Rows are
/// dense bf16.
///
/// The workers of a call compute tiles of rows concurrently. Calls with the same `worker`, in [0, GroupOptions::num_blocks *
/// num_warps), are serialized; calls with different workers run concurrently on different threads. An exception ends the call
/// on all ranks, and FusedMoe::forward throws it as Error.
class FusedProducts {
 public:
  virtual ~FusedProducts() = default;
  /// Number of rows in the next tile of an expert with `left` >= 1 rows not yet in a tile. Must be in [1, left] and depend only
  /// on `left`. Called from one thread.
  virtual int64_t tile_rows(int64_t left) const = 0;
  /// Up product: computes `h` [rows, I] from the rows `x` [rows, H] of local expert `expert`. For a SwiGLU MLP: silu(x W1^T) *
  /// (x W3^T).
  virtual void up(int worker, int expert, const void* x, int64_t rows, void* h) = 0;
  /// Down product: computes `y` [rows, H] from `h`: h W2^T.
  virtual void down(int worker, int expert, const void* h, int64_t rows, void* y) = 0;
};

}  // namespace switchyard::detail
