// SPDX-License-Identifier: Apache-2.0
// Base of the SlotWeights backends: checks and agreement. Its own copies go through staging memory, in the foreground.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "exchange/group/exchange_base.hpp"
#include "exchange/slots/weight_moves.hpp"
#include "switchyard/expert_map.hpp"

namespace switchyard::detail {

class SlotWeightsImpl : protected ExchangeBase {
 public:
  using ExchangeBase::collective_call, ExchangeBase::home;
  static std::unique_ptr<SlotWeightsImpl> make_staged(Group& group, int slots_per_rank, std::span<const SlotArray> arrays,
                                                      const MoveOptions& options);
  static std::unique_ptr<SlotWeightsImpl> make_mapped(Group& group, int slots_per_rank, std::span<const SlotArray> arrays,
                                                      const MoveOptions& options);
  virtual ~SlotWeightsImpl() = default;
  SlotWeightsImpl(const SlotWeightsImpl&) = delete;
  SlotWeightsImpl& operator=(const SlotWeightsImpl&) = delete;

  /// Throws invalid_argument unless this object belongs to `group` and its arrays have `slots_per_rank` slots.
  void check_joined(const Group::Impl& group, int slots_per_rank) const;
  int64_t move(Group& group, const ExpertMap& from, const ExpertMap& to, void* after);
  virtual void wait(void* /*stream*/) const {}
  virtual bool ready() const { return true; }
  virtual void* ready_event() const { return nullptr; }
  std::span<const SlotArray> arrays() const { return arrays_; }

 protected:
  SlotWeightsImpl(Group& group, int slots_per_rank, std::span<const SlotArray> arrays, const MoveOptions& options)
      : ExchangeBase(group), slots_per_rank_(slots_per_rank), arrays_(arrays.begin(), arrays.end()), options_(options) {}
  /// The body of every constructor. `check`: checks of the backend.
  void construct_with(const std::function<void()>& check);
  /// Waits for the last move and for earlier work on `after`. Throws invalid_argument for an unusable stream.
  virtual void finish_earlier(Group& group, void* after) = 0;
  /// Performs or enqueues this rank's copies; the ranks have agreed on the maps. Returns the bytes from other ranks.
  virtual int64_t copy(Group& group, const ExpertMap& from, const ExpertMap& to, const WeightMoves& moves);

  const int slots_per_rank_;
  const std::vector<SlotArray> arrays_;
  const MoveOptions options_;
};

}  // namespace switchyard::detail
