// SPDX-License-Identifier: Apache-2.0
// Moves weights through symmetric memory. All moves proceed together, one range of a slot's bytes per round: a rank copies this
// range of its source slots to its staging memory, synchronizes with the other ranks, and copies from their staging memory to
// its destination slots. A round therefore reads all its sources before it overwrites any slot, for any pair of maps. Rounds
// alternate between two halves of the staging memory: before a rank overwrites a half, it synchronizes with all ranks that read
// it. On several hosts, a round gathers the ranges of all ranks in host memory instead.
#include <algorithm>
#include <string>
#include <vector>

#include "exchange/group/exchange_base.hpp"
#include "exchange/group/make.hpp"
#include "exchange/slots/move.hpp"
#include "exchange/slots/weight_moves.hpp"

namespace switchyard {

using namespace detail;

namespace {

constexpr size_t kAlignment = 256;  // of ranges, for wide copies

class WeightMover final : private ExchangeBase {
 public:
  WeightMover(Group& group, const ExpertMap& from, const ExpertMap& to, std::span<const SlotArray> arrays,
              const MoveOptions& options)
      : ExchangeBase(group), spans_hosts_(group.hosts() > 1) {
    group_.check_usable("move_weights");
    copies_ = make_copies(group, options.stream);
    ConstructionReport mine;
    mine.report = attempt([&] {
      check(from, to, arrays);
      first_slot_ = rank() * to.slots_per_rank;
      moves_ = plan_moves(from, to);
      if (moves_.max_sent > 0) choose_range(arrays, options.staging_bytes);
      // Earlier work on the stream: waiting here, before the agreement, counts against the deadline of a construction.
      copies_->wait();
    });
    group_.agree("move_weights", fields(from, to, arrays, options), mine);
    if (range_ == 0) return;
    construct("move_weights", "MoveOptions::staging_bytes + other objects", [&] {
      if (spans_hosts_) {
        sent_.resize(moves_.max_sent * range_);
        gathered_.resize(static_cast<size_t>(world()) * sent_.size());
      } else {
        staging_ = take_heap(halves() * moves_.max_sent * range_, 0);
      }
      return AgreedFields{};
    });
  }

  /// Returns the number of bytes received from other ranks.
  int64_t run(std::span<const SlotArray> arrays) {
    int64_t received = 0;
    if (range_ == 0) return received;
    for (const SlotArray& array : arrays)
      for (size_t at = 0; at < array.slot_bytes; at += range_)
        received += round(array, at, std::min(range_, array.slot_bytes - at));
    group_.all_gather("", 1, synchronized_, "move_weights", Operation::barrier);  // others may still read this rank's memory
    return received;
  }

 private:
  static std::unique_ptr<WeightCopies> make_copies(Group& group, void* stream) {
    if constexpr (kHasGpuCode)
      if (group.impl().device) return copies_on_gpu(group, group.hosts() > 1, stream);
    return std::make_unique<WeightCopies>();
  }

  size_t halves() const { return spans_hosts_ ? 1 : 2; }

  /// Sets range_; 0 if all arrays are empty.
  void choose_range(std::span<const SlotArray> arrays, size_t staging_bytes) {
    size_t largest = 0;
    for (const SlotArray& array : arrays) largest = std::max(largest, array.slot_bytes);
    const size_t least = kAlignment * halves() * moves_.max_sent;
    if (staging_bytes < least)
      invalid_value("MoveOptions::staging_bytes", std::to_string(staging_bytes),
                    "at least " + std::to_string(least) + " for these maps");
    size_t fits = staging_bytes / halves() / moves_.max_sent;
    if (spans_hosts_) fits = std::max(fits / static_cast<size_t>(world()), kAlignment);  // the gathered memory is as large
    range_ = std::min(fits, largest + kAlignment - 1) / kAlignment * kAlignment;
  }

  void check(const ExpertMap& from, const ExpertMap& to, std::span<const SlotArray> arrays) const {
    check_maps(from, to, world());
    check_arrays(arrays);
    for (const SlotArray& array : arrays) copies_->check(array);
  }

  static AgreedFields fields(const ExpertMap& from, const ExpertMap& to, std::span<const SlotArray> arrays,
                             const MoveOptions& options) {
    AgreedFields all = agreed_maps(from, to);
    for (const AgreedField& field : agreed_arrays(arrays, options)) all.push_back(field);
    return all;
  }

  /// The staging memory of rank `r` for the n-th slot that it sends in this round; on several hosts, of this rank only.
  std::byte* staged(int r, int n) {
    if (spans_hosts_) return sent_.data() + static_cast<size_t>(n) * range_;
    const auto slot = static_cast<size_t>(n) + static_cast<size_t>(rounds_) % halves() * moves_.max_sent;
    return group_.heap->view().base[r] + staging_ + slot * range_;
  }
  /// The contents of that memory; valid after this rank has synchronized with the others.
  const std::byte* received(int r, int n) {
    if (!spans_hosts_) return staged(r, n);
    return gathered_.data() + (static_cast<size_t>(r) * moves_.max_sent + static_cast<size_t>(n)) * range_;
  }
  void synchronize() {
    if (spans_hosts_)
      group_.all_gather(sent_.data(), sent_.size(), gathered_.data(), "move_weights", Operation::all_gather);
    else
      group_.all_gather("", 1, synchronized_, "move_weights", Operation::barrier);
  }
  std::byte* in(const SlotArray& array, int slot, size_t at) const {
    return static_cast<std::byte*>(array.data) + static_cast<size_t>(slot - first_slot_) * array.slot_bytes + at;
  }

  int64_t round(const SlotArray& array, size_t at, size_t bytes) {
    const auto me = static_cast<size_t>(rank());
    int64_t from_others = 0;
    for (size_t n = 0; n < moves_.sent_by[me].size(); ++n)
      copies_->stage(staged(rank(), static_cast<int>(n)), in(array, moves_.sent_by[me][n], at), bytes);
    copies_->wait();
    synchronize();
    for (const WeightMove& move : moves_.of_rank[me]) {
      copies_->unstage(in(array, move.slot, at), received(move.source_rank, move.sent), bytes);
      if (move.source_rank != rank()) from_others += static_cast<int64_t>(bytes);
    }
    copies_->wait();
    ++rounds_;
    return from_others;
  }

  int first_slot_ = 0;      ///< of this rank
  const bool spans_hosts_;  ///< the group spans several hosts
  std::unique_ptr<WeightCopies> copies_;
  WeightMoves moves_;
  size_t range_ = 0;    ///< bytes of a slot per round
  size_t staging_ = 0;  ///< one host: offset of the halves in the heap, each for max_sent ranges
  int64_t rounds_ = 0;
  char synchronized_[kMaxRanks] = {};
  std::vector<std::byte> sent_, gathered_;  ///< several hosts: [max_sent] and [world, max_sent] ranges
};

}  // namespace

namespace detail {

void check_arrays(std::span<const SlotArray> arrays) {
  for (size_t i = 0; i < arrays.size(); ++i)
    if (arrays[i].slot_bytes > 0 && arrays[i].data == nullptr) invalid("arrays[" + std::to_string(i) + "].data", " is null");
}

void check_maps(const ExpertMap& from, const ExpertMap& to, int world) {
  check_expert_map(from);
  check_expert_map(to);
  if (from.num_experts != to.num_experts || from.world != to.world || from.slots_per_rank != to.slots_per_rank)
    invalid("from and to have different numbers of experts, ranks or slots");
  if (to.world != world)
    invalid_value("ExpertMap::world", std::to_string(to.world), std::to_string(world) + ", the number of ranks");
}

AgreedFields agreed_maps(const ExpertMap& from, const ExpertMap& to) {
  uint64_t maps = 0;
  for (const ExpertMap* map : {&from, &to})
    for (const int32_t e : map->expert_of_slot) maps = mix_hash(maps, static_cast<uint64_t>(e));
  return {agreed("ExpertMap::num_experts", to.num_experts), agreed("ExpertMap::slots_per_rank", to.slots_per_rank),
          agreed("a hash of from and to", static_cast<int64_t>(maps))};
}

AgreedFields agreed_arrays(std::span<const SlotArray> arrays, const MoveOptions& options) {
  uint64_t sizes = 0;
  for (const SlotArray& array : arrays) sizes = mix_hash(sizes, array.slot_bytes);
  return {agreed("the number of arrays", static_cast<int64_t>(arrays.size())),
          agreed("a hash of slot_bytes", static_cast<int64_t>(sizes)),
          agreed("MoveOptions::staging_bytes", static_cast<int64_t>(options.staging_bytes))};
}

}  // namespace detail

int64_t move_weights(Group& group, const ExpertMap& from, const ExpertMap& to, std::span<const SlotArray> arrays,
                     const MoveOptions& options) {
  return group.impl().collective_call("move_weights",
                                      [&] { return WeightMover(group, from, to, arrays, options).run(arrays); });
}

}  // namespace switchyard
