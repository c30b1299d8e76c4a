// SPDX-License-Identifier: Apache-2.0
#include "gemm/cpu/mlp_tiles.hpp"

#include <algorithm>

#include "gemm/cpu/row_math.hpp"

namespace switchyard::detail {
namespace {

size_t product_bytes(int64_t width) { return static_cast<size_t>(kTileRows * 2 * width) * sizeof(float); }

}  // namespace

MlpTiles::MlpTiles(const ExpertShape& shape, WeightStorage storage)
    : width_(shape.intermediate),
      gate_up_(shape.num_local_experts, 2 * shape.intermediate, shape.hidden, storage),
      down_(shape.num_local_experts, shape.hidden, shape.intermediate, storage),
      products_(product_bytes(width_), "expert scratch") {}

MlpTiles::MlpTiles(const MlpTiles& owner, ShareWeights share)
    : width_(owner.width_),
      gate_up_(owner.gate_up_, share),
      down_(owner.down_, share),
      products_(product_bytes(width_), "expert scratch") {}

void MlpTiles::pack(int expert, const uint16_t* w13, const uint16_t* w2) {
  gate_up_.pack(expert, w13);
  down_.pack(expert, w2);
}

void MlpTiles::bind(const uint16_t* w13, const uint16_t* w2) {
  gate_up_.bind(w13);
  down_.bind(w2);
}

void MlpTiles::up(int expert, const uint16_t* x, int64_t m, int64_t rows, uint16_t* h) {
  float* const products = products_.as<float>();
  gate_up_.tile(expert, x, m, products);
  for (int64_t row = 0; row < rows; ++row) {
    const float* const gate = products + row * 2 * width_;
    swiglu(gate, gate + width_, width_, h + row * width_);
  }
}

void MlpTiles::down(int expert, const uint16_t* h, int64_t m, float* out) { down_.tile(expert, h, m, out); }

ExpertMemory MlpTiles::memory_required(const ExpertShape& shape, WeightStorage storage) {
  const auto gemm = [&](int64_t n, int64_t k) { return TileGemm::memory_required(shape.num_local_experts, n, k, storage); };
  const ExpertMemory gate_up = gemm(2 * shape.intermediate, shape.hidden), down = gemm(shape.hidden, shape.intermediate);
  return {gate_up.weight_bytes + down.weight_bytes,
          gate_up.scratch_bytes + down.scratch_bytes + product_bytes(shape.intermediate)};
}

ExpertMemory MlpTiles::memory() const {
  const ExpertMemory a = gate_up_.memory(), b = down_.memory();
  return {a.weight_bytes + b.weight_bytes, a.scratch_bytes + b.scratch_bytes + products_.bytes()};
}

const uint16_t* padded_tile(const uint16_t* x, int64_t rows, int64_t columns, uint16_t* scratch) {
  const int64_t m = padded_rows(rows);
  if (m == rows) return x;
  std::copy_n(x, rows * columns, scratch);
  std::fill_n(scratch + rows * columns, (m - rows) * columns, uint16_t{0});
  return scratch;
}

}  // namespace switchyard::detail
