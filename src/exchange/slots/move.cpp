// SPDX-License-Identifier: Apache-2.0
// Moves weights through symmetric memory. All moves proceed together, one range of a slot's bytes per round: a rank copies this
// range of its source slots to its staging memory, synchronizes with the other ranks, and copies from the staging memory of its
// host to its destination slots. A round therefore reads all its sources before it overwrites any slot, for any pair of maps.
// Rounds alternate between two halves of the staging memory: before a rank overwrites a half, it synchronizes with all ranks
// that read it. Ranges for another host are sent to the rank's proxy there, once per host, which stages them.
#include <algorithm>
#include <string>
#include <vector>

#include "exchange/group/exchange_base.hpp"
#include "exchange/group/make.hpp"
#include "exchange/slots/move.hpp"
#include "exchange/slots/weight_moves.hpp"
#include "exchange/slots/weight_rails.hpp"

namespace switchyard {

using namespace detail;

namespace {

constexpr size_t kAlignment = 256;  // of ranges, for wide copies
constexpr size_t kHalves = 2;       // of the staging memory

class WeightMover final : private ExchangeBase {
 public:
  WeightMover(Group& group, const ExpertMap& from, const ExpertMap& to, std::span<const SlotArray> arrays,
              const MoveOptions& options)
      : ExchangeBase(group) {
    group_.check_usable("move_weights");
    copies_ = make_copies(group, options.stream);
    ConstructionReport mine;
    mine.report = attempt([&] {
      check(from, to, arrays);
      first_slot_ = rank() * to.slots_per_rank;
      moves_ = plan_moves(from, to, group_.host_map());
      if (moves_.max_staged > 0) choose_range(arrays, options.staging_bytes);
      // Earlier work on the stream: waiting here, before the agreement, counts against the deadline of a construction.
      copies_->wait();
    });
    group_.agree("move_weights", fields(from, to, arrays, options), mine);
    if (range_ == 0) return;
    if (moves_.max_crossing > 0) rails_ = make_rails(group, options.stream);
    try {
      construct("move_weights", "MoveOptions::staging_bytes + other objects", [&] {
        staging_ = take_heap(kHalves * moves_.max_staged * range_, 0);
        if (rails_) rails_->reserve(transfers(range_));
        return AgreedFields{};
      });
    } catch (...) {
      if (rails_) rails_->release();
      throw;
    }
  }

  /// Returns the number of bytes received from other ranks.
  int64_t run(std::span<const SlotArray> arrays) {
    int64_t received = 0;
    if (range_ == 0) return received;
    for (const SlotArray& array : arrays)
      for (size_t at = 0; at < array.slot_bytes; at += range_)
        received += round(array, at, std::min(range_, array.slot_bytes - at));
    synchronize();  // other ranks may still read this rank's memory
    if (rails_) rails_->release();
    return received;
  }

 private:
  static std::unique_ptr<WeightCopies> make_copies(Group& group, void* stream) {
    if constexpr (kHasGpuCode)
      if (group.impl().device) return copies_on_gpu(group, stream);
    return std::make_unique<WeightCopies>();
  }
  static std::shared_ptr<WeightRails> make_rails(Group& group, void* stream) {
    if constexpr (kHasGpuCode)
      if (group.impl().device) return weight_rails_on_gpu(group, stream);
    return weight_rails_on_cpu(group.impl());
  }

  /// Sets range_; 0 if all arrays are empty.
  void choose_range(std::span<const SlotArray> arrays, size_t staging_bytes) {
    size_t largest = 0;
    for (const SlotArray& array : arrays) largest = std::max(largest, array.slot_bytes);
    const size_t ranges = kHalves * moves_.max_staged + moves_.max_crossing, least = kAlignment * ranges;
    if (staging_bytes < least)
      invalid_value("MoveOptions::staging_bytes", std::to_string(staging_bytes),
                    "at least " + std::to_string(least) + " for these maps");
    range_ = std::min(staging_bytes / ranges, largest + kAlignment - 1) / kAlignment * kAlignment;
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

  /// The n-th of the ranges of `bytes` bytes in the staging memory of rank `r` in this round.
  std::byte* staged(int r, size_t n, size_t bytes) {
    const size_t half = static_cast<size_t>(rounds_) % kHalves * moves_.max_staged * range_;
    return group_.heap->view().base[r] + staging_ + half + n * bytes;
  }
  /// This rank's transfers to and from ranks of other hosts in a round with ranges of `bytes` bytes.
  std::vector<RailTransfer> transfers(size_t bytes) const {
    std::vector<RailTransfer> all;
    const auto transfer_with = [&](int peer) -> RailTransfer& {
      const auto found =
          std::find_if(all.begin(), all.end(), [&](const RailTransfer& transfer) { return transfer.peer == peer; });
      return found != all.end() ? *found : all.emplace_back(RailTransfer{peer});
    };
    for (const WeightParcel& parcel : moves_.parcels) {
      if (!parcel.crosses()) continue;
      if (parcel.source_rank == rank()) transfer_with(parcel.staged_rank).send = parcel.slots.size() * bytes;
      if (parcel.staged_rank == rank()) transfer_with(parcel.source_rank).receive = parcel.slots.size() * bytes;
    }
    return all;
  }
  void synchronize() { group_.all_gather("", 1, synchronized_, "move_weights", Operation::barrier); }
  std::byte* in(const SlotArray& array, int slot, size_t at) const {
    return static_cast<std::byte*>(array.data) + static_cast<size_t>(slot - first_slot_) * array.slot_bytes + at;
  }

  int64_t round(const SlotArray& array, size_t at, size_t bytes) {
    int64_t from_others = 0;
    for (const WeightParcel& parcel : moves_.parcels) {
      if (parcel.source_rank != rank()) continue;
      std::byte* const to = parcel.crosses() ? rails_->outgoing(parcel.staged_rank) : staged(rank(), parcel.staged_at, bytes);
      for (size_t n = 0; n < parcel.slots.size(); ++n) copies_->copy(to + n * bytes, in(array, parcel.slots[n], at), bytes);
    }
    if (rails_) carry(bytes);
    copies_->wait();
    synchronize();
    for (const WeightMove& move : moves_.of_rank[static_cast<size_t>(rank())]) {
      copies_->copy(in(array, move.slot, at), staged(move.staged_rank, move.staged_at, bytes), bytes);
      if (move.source_rank != rank()) from_others += static_cast<int64_t>(bytes);
    }
    copies_->wait();
    ++rounds_;
    return from_others;
  }
  /// Exchanges ranges with ranks of other hosts, and stages those received.
  void carry(size_t bytes) {
    rails_->exchange(transfers(bytes));
    for (const WeightParcel& parcel : moves_.parcels)
      if (parcel.crosses() && parcel.staged_rank == rank())
        copies_->copy(staged(rank(), parcel.staged_at, bytes), rails_->incoming(parcel.source_rank),
                      parcel.slots.size() * bytes);
  }

  int first_slot_ = 0;  ///< of this rank
  std::unique_ptr<WeightCopies> copies_;
  std::shared_ptr<WeightRails> rails_;  ///< null: no weights cross hosts
  WeightMoves moves_;
  size_t range_ = 0;    ///< bytes of a slot per round
  size_t staging_ = 0;  ///< offset of the halves in the heap, each for max_staged ranges
  int64_t rounds_ = 0;
  char synchronized_[kMaxRanks] = {};
};

}  // namespace

namespace detail {

void check_arrays(std::span<const SlotArray> arrays) {
  for (size_t i = 0; i < arrays.size(); ++i) {
    const std::string array = "arrays[" + std::to_string(i) + "]";
    if (arrays[i].slot_bytes > 0 && arrays[i].data == nullptr) invalid(array + ".data", " is null");
    if (arrays[i].slot_bytes > size_t{PTRDIFF_MAX})
      invalid_value((array + ".slot_bytes").c_str(), std::to_string(arrays[i].slot_bytes),
                    "at most " + std::to_string(PTRDIFF_MAX));
  }
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
