// SPDX-License-Identifier: Apache-2.0
// Computes both products for tiles of rows on one thread. Used for all experts on the CPU, both by ExpertMlp and by the workers
// of a fused layer.
#pragma once

#include <cstdint>
#include <string>

#include "gemm/aligned_buffer.hpp"
#include "gemm/cpu/tile_gemm.hpp"
#include "switchyard/expert.hpp"

namespace switchyard::detail {

/// Not thread-safe: use an object from one thread at a time.
class MlpTiles {
 public:
  MlpTiles(const ExpertShape& shape, WeightStorage storage);
  /// Constructor for another thread: see TileGemm.
  MlpTiles(const MlpTiles& owner, ShareWeights);

  /// WeightStorage::packed and view: see TileGemm.
  void pack(int expert, const uint16_t* w13, const uint16_t* w2);
  void bind(const uint16_t* w13, const uint16_t* w2);

  /// `h` (bf16 [rows, I]) = silu(x W1^T) * (x W3^T) for `x` (bf16 [m, H]), rows <= m. m is a value returned by padded_rows().
  void up(int expert, const uint16_t* x, int64_t m, int64_t rows, uint16_t* h);
  /// `out` (float32 [m, H]) = h W2^T for `h` (bf16 [m, I]), not rounded. m is a value returned by padded_rows().
  void down(int expert, const uint16_t* h, int64_t m, float* out);

  /// Bytes used by the object's own weights and by its scratch. Keeps no memory allocated.
  static ExpertMemory memory_required(const ExpertShape& shape, WeightStorage storage);
  ExpertMemory memory() const;
  std::string implementation() const { return gate_up_.implementation(); }

 private:
  int64_t width_;  // I
  TileGemm gate_up_, down_;
  AlignedBuffer products_;  // f32 [kTileRows, 2 I]
};

/// Returns `rows` rows of `columns` elements as a tile operand: `x` itself if no padding is needed, else a copy in `scratch`,
/// [kTileRows, columns], followed by zero rows.
const uint16_t* padded_tile(const uint16_t* x, int64_t rows, int64_t columns, uint16_t* scratch);

}  // namespace switchyard::detail
