// SPDX-License-Identifier: Apache-2.0
// The public class SlotWeights and the parts common to its backends.
#include "exchange/slots/weights.hpp"

#include <string>

#include "base/as_error.hpp"
#include "exchange/group/make.hpp"
#include "exchange/slots/move.hpp"

namespace switchyard {

using namespace detail;

namespace detail {

namespace {

class StagedWeights final : public SlotWeightsImpl {
 public:
  StagedWeights(Group& group, int slots_per_rank, std::span<const SlotArray> arrays, const MoveOptions& options)
      : SlotWeightsImpl(group, slots_per_rank, arrays, options) {
    construct_with([] {});
  }

 private:
  void finish_earlier(Group& group, void* after) override {
    if constexpr (kHasGpuCode) {
      if (!group_.device) return;
      const auto calls = copies_on_gpu(group, after);
      for (const SlotArray& array : arrays_) calls->check(array);  // also rejects a stream that is being captured
      calls->wait();
    }
  }
};

/// Throws invalid_argument unless every slot that differs is empty in one of the maps.
void check_in_background(const ExpertMap& from, const ExpertMap& to) {
  for (size_t p = 0; p < to.expert_of_slot.size(); ++p) {
    const int32_t before = from.expert_of_slot[p], after = to.expert_of_slot[p];
    if (before >= 0 && after >= 0 && before != after)
      invalid("from", ": slot " + std::to_string(p) + " holds expert " + std::to_string(before) + ", and expert " +
                          std::to_string(after) + " in `to`: only empty slots can be written in the background (vacate)");
  }
}

}  // namespace

std::unique_ptr<SlotWeightsImpl> SlotWeightsImpl::make_staged(Group& group, int slots_per_rank,
                                                              std::span<const SlotArray> arrays, const MoveOptions& options) {
  return std::make_unique<StagedWeights>(group, slots_per_rank, arrays, options);
}

void SlotWeightsImpl::construct_with(const std::function<void()>& check) {
  construct("SlotWeights", "", [&] {
    check_range("slots_per_rank", slots_per_rank_, 1, 1 << 20);
    check_arrays(arrays_);
    check();
    AgreedFields fields = agreed_arrays(arrays_, options_);
    fields.push_back(agreed("slots_per_rank", slots_per_rank_));
    return fields;
  });
}

void SlotWeightsImpl::check_joined(const Group::Impl& group, int slots_per_rank) const {
  if (&group != &group_) invalid("group", " is not the group of the weights");
  if (slots_per_rank != slots_per_rank_)
    invalid_value("ExpertMap::slots_per_rank", std::to_string(slots_per_rank),
                  std::to_string(slots_per_rank_) + ", as in the constructor of SlotWeights");
}

int64_t SlotWeightsImpl::move(Group& group, const ExpertMap& from, const ExpertMap& to, void* after) {
  constexpr const char* kMove = "SlotWeights::move";
  group_.check_usable(kMove);
  WeightMoves moves;
  ConstructionReport mine;
  mine.report = attempt([&] {
    check_maps(from, to, world());
    check_joined(group.impl(), to.slots_per_rank);
    check_in_background(from, to);
    moves = plan_moves(from, to, group_.host_map());
    finish_earlier(group, after);
  });
  AgreedFields fields{agreed("the number of the SlotWeights", static_cast<int64_t>(object_))};
  for (const AgreedField& field : agreed_maps(from, to)) fields.push_back(field);
  group_.agree(kMove, fields, mine);
  return copy(group, from, to, moves);
}

int64_t SlotWeightsImpl::copy(Group& group, const ExpertMap& from, const ExpertMap& to, const WeightMoves&) {
  return move_weights(group, from, to, arrays_, options_);
}

}  // namespace detail

SlotWeights::SlotWeights(Group& group, int slots_per_rank, std::span<const SlotArray> arrays, const MoveOptions& options)
    : impl_(group.impl().collective_call("SlotWeights", [&] {
        if constexpr (kHasGpuCode)
          if (group.impl().device && group.hosts() == 1)
            return SlotWeightsImpl::make_mapped(group, slots_per_rank, arrays, options);
        return SlotWeightsImpl::make_staged(group, slots_per_rank, arrays, options);
      })) {}
SlotWeights::SlotWeights(SlotWeights&&) noexcept = default;
SlotWeights& SlotWeights::operator=(SlotWeights&& other) noexcept {
  if (this != &other) replace_at_home(impl_.pointer(), std::move(other.impl_.pointer()));
  return *this;
}
SlotWeights::~SlotWeights() { replace_at_home(impl_.pointer(), {}); }

int64_t SlotWeights::move(Group& group, const ExpertMap& from, const ExpertMap& to, void* after) {
  return impl_->collective_call("SlotWeights::move", [&] { return impl_->move(group, from, to, after); });
}
void SlotWeights::wait(void* stream) const {
  as_error("SlotWeights::wait", [&] { impl_->wait(stream); });
}
bool SlotWeights::ready() const { return impl_->ready(); }
void* SlotWeights::ready_event() const { return impl_->ready_event(); }

}  // namespace switchyard
