// SPDX-License-Identifier: Apache-2.0
#include "gemm/cpu/tile_gemm.hpp"

#include "gemm/announce.hpp"

namespace switchyard::detail {
namespace {

size_t packed_group_bytes(const OnednnGemm& engine) {
  constexpr size_t kAlign = AlignedBuffer::kAlignment;
  return (engine.packed_bytes() + kAlign - 1) / kAlign * kAlign;
}

size_t count_bytes(int64_t rows, int64_t cols, size_t element) { return static_cast<size_t>(rows * cols) * element; }

}  // namespace

TileGemm::TileGemm(int num_groups, int64_t n, int64_t k, WeightStorage storage)
    : n_(n),
      k_(k),
      storage_(storage),
      engine_(n, k, kTileRows, storage),
      group_bytes_(packed_group_bytes(engine_)),
      weights_(static_cast<size_t>(num_groups) * group_bytes_, "packed expert weights"),
      packed_(weights_.as<std::byte>()) {}

TileGemm::TileGemm(const TileGemm& owner, ShareWeights)
    : n_(owner.n_),
      k_(owner.k_),
      storage_(owner.storage_),
      engine_(n_, k_, kTileRows, storage_),
      group_bytes_(owner.group_bytes_),
      packed_(owner.packed_),
      bound_(owner.bound_) {}

ExpertMemory TileGemm::memory_required(int num_groups, int64_t n, int64_t k, WeightStorage storage) {
  const OnednnGemm engine(n, k, kTileRows, storage);
  return {static_cast<size_t>(num_groups) * packed_group_bytes(engine), engine.scratch_bytes()};
}

void TileGemm::pack(int group, const uint16_t* b) {
  std::byte* packed = weights_.as<std::byte>() + static_cast<size_t>(group) * group_bytes_;
  announce_read(b, count_bytes(n_, k_, sizeof(uint16_t)));
  announce_write(packed, group_bytes_);
  engine_.pack(b, packed);
}

const void* TileGemm::weights(int group) const {
  if (storage_ == WeightStorage::view) return bound_ + group * n_ * k_;
  return packed_ + static_cast<size_t>(group) * group_bytes_;
}

void TileGemm::tile(int group, const uint16_t* a, int64_t m, float* c) {
  const void* b = weights(group);
  announce_read(a, count_bytes(m, k_, sizeof(uint16_t)));
  announce_read(b, storage_ == WeightStorage::view ? count_bytes(n_, k_, sizeof(uint16_t)) : group_bytes_);
  announce_write(c, count_bytes(m, n_, sizeof(float)));
  engine_.run(b, a, m, c);
}

}  // namespace switchyard::detail
