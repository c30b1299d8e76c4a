// SPDX-License-Identifier: Apache-2.0
// Internal to move_weights().
#pragma once

#include <cstddef>
#include <cstring>
#include <memory>
#include <span>

#include "exchange/group/impl.hpp"
#include "switchyard/expert_map.hpp"

namespace switchyard::detail {

/// Performs a rank's copies between slots and staging memory, in order. This base class copies CPU memory.
class WeightCopies {
 public:
  virtual ~WeightCopies() = default;
  /// Throws invalid_argument unless the rank can copy to and from the array.
  virtual void check(const SlotArray&) const {}
  virtual void copy(std::byte* to, const std::byte* from, size_t bytes) { std::memcpy(to, from, bytes); }
  /// Waits for all copies.
  virtual void wait() {}
};

/// Throws invalid_argument if an array of weights is null.
void check_arrays(std::span<const SlotArray> arrays);
/// Throws invalid_argument unless both maps are valid, of equal sizes, and for `world` ranks.
void check_maps(const ExpertMap& from, const ExpertMap& to, int world);
/// The properties of a change of the map that must be equal on all ranks.
AgreedFields agreed_maps(const ExpertMap& from, const ExpertMap& to);
/// The properties of arrays and options that must be equal on all ranks.
AgreedFields agreed_arrays(std::span<const SlotArray> arrays, const MoveOptions& options);

/// Copies by a GPU on `stream`.
std::unique_ptr<WeightCopies> copies_on_gpu(Group& group, void* stream);

}  // namespace switchyard::detail
