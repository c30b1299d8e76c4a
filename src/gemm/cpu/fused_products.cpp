// SPDX-License-Identifier: Apache-2.0
#include "gemm/cpu/fused_products.hpp"

#include <algorithm>
#include <vector>

#include "gemm/checks.hpp"
#include "gemm/cpu/mlp_tiles.hpp"
#include "gemm/cpu/row_math.hpp"

namespace switchyard::detail {
namespace {

size_t rows_bytes(const ExpertShape& s) {
  return static_cast<size_t>(kTileRows * std::max(s.hidden, s.intermediate)) * sizeof(uint16_t);
}
size_t out_bytes(const ExpertShape& s) { return static_cast<size_t>(kTileRows * s.hidden) * sizeof(float); }

/// One worker's tiles and scratch memory.
struct Worker {
  template <class... Tiles>
  explicit Worker(const ExpertShape& shape, const Tiles&... from)
      : tiles(from...), rows(rows_bytes(shape), "rows of a tile"), out(out_bytes(shape), "outputs of a tile") {}
  MlpTiles tiles;
  AlignedBuffer rows;  // bf16 [kTileRows, max(H, I)]: padded rows
  AlignedBuffer out;   // f32 [kTileRows, H]
};

class CpuProducts final : public ExpertProducts {
 public:
  CpuProducts(const ExpertShape& shape, const uint16_t* w13, const uint16_t* w2, WeightStorage storage, int workers)
      : shape_(shape) {
    workers_.push_back(std::make_unique<Worker>(shape, shape, storage));
    MlpTiles& first = workers_.front()->tiles;
    const int64_t size = shape.intermediate * shape.hidden;
    if (storage == WeightStorage::view)
      first.bind(w13, w2);
    else
      for (int expert = 0; expert < shape.num_local_experts; ++expert)
        first.pack(expert, w13 + expert * 2 * size, w2 + expert * size);
    while (workers_.size() < static_cast<size_t>(workers))
      workers_.push_back(std::make_unique<Worker>(shape, first, ShareWeights{}));
  }

  int64_t tile_rows(int64_t left) const override { return next_tile_rows(left); }

  void up(int worker, int expert, const void* x, int64_t rows, void* h) override {
    Worker& w = *workers_[static_cast<size_t>(worker)];
    const uint16_t* const tile = padded_tile(static_cast<const uint16_t*>(x), rows, shape_.hidden, w.rows.as<uint16_t>());
    w.tiles.up(expert, tile, padded_rows(rows), rows, static_cast<uint16_t*>(h));
  }
  void down(int worker, int expert, const void* h, int64_t rows, void* y) override {
    Worker& w = *workers_[static_cast<size_t>(worker)];
    const uint16_t* const tile = padded_tile(static_cast<const uint16_t*>(h), rows, shape_.intermediate, w.rows.as<uint16_t>());
    w.tiles.down(expert, tile, padded_rows(rows), w.out.as<float>());
    round_to_bf16(w.out.as<float>(), rows * shape_.hidden, static_cast<uint16_t*>(y));
  }

  std::string implementation() const override { return workers_.front()->tiles.implementation(); }

 private:
  const ExpertShape shape_;
  std::vector<std::unique_ptr<Worker>> workers_;  // the first one owns the weights and is destroyed last
};

}  // namespace

std::shared_ptr<ExpertProducts> make_expert_products(const char* object, const ExpertShape& shape, const void* w13,
                                                     const void* w2, WeightStorage storage, int workers) {
  const bool experts = shape.num_local_experts > 0;
  require(!experts || w13 != nullptr, object, "w13 is null");
  require(!experts || w2 != nullptr, object, "w2 is null");
  return std::make_shared<CpuProducts>(shape, static_cast<const uint16_t*>(w13), static_cast<const uint16_t*>(w2), storage,
                                       workers);
}

ExpertMemory expert_products_memory(const ExpertShape& shape, WeightStorage storage) {
  const ExpertMemory tiles = MlpTiles::memory_required(shape, storage);
  return {tiles.weight_bytes, tiles.scratch_bytes + rows_bytes(shape) + out_bytes(shape)};
}

}  // namespace switchyard::detail
