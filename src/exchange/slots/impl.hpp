// SPDX-License-Identifier: Apache-2.0
// Base of the SlotSelector backends: argument checks and agreement on the map. A backend stores the table and the counters.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "exchange/group/exchange_base.hpp"
#include "exchange/slots/weights.hpp"
#include "plan/slot_table.hpp"
#include "switchyard/expert_map.hpp"

namespace switchyard::detail {

inline size_t bytes_of(const ExpertIds& ids) {
  return static_cast<size_t>(ids.num_tokens * ids.topk) * (ids.is_int64 ? sizeof(int64_t) : sizeof(int32_t));
}

/// Memory of the backend for the results of one call of another object that selects slots.
struct SelectedSlots {
  void* slots = nullptr;        ///< with the type of the ids; may be their memory
  uint32_t* version = nullptr;  ///< if not null, receives SlotTable::version() of the table that selected the slots

  /// Bytes for one call with at most `routes` routes, and their division; `at` is aligned to 8 bytes.
  static constexpr int64_t bytes(int64_t routes) { return routes * 8 + 8; }
  static SelectedSlots in(std::byte* at, int64_t routes) { return {at, reinterpret_cast<uint32_t*>(at + routes * 8)}; }
};

/// The constructor of a backend calls construct(), in which it stores the table from make_table().
class SlotSelectorImpl : protected ExchangeBase {
 public:
  using ExchangeBase::collective_call, ExchangeBase::home;
  virtual ~SlotSelectorImpl() = default;
  static std::unique_ptr<SlotSelectorImpl> make_on_cpu(Group& group, const ExpertMap& map, std::span<const int64_t> routes,
                                                       const char* object = kSlotSelectorObject);
  static std::unique_ptr<SlotSelectorImpl> make_on_gpu(Group& group, const ExpertMap& map, std::span<const int64_t> routes,
                                                       const char* object = kSlotSelectorObject);
  SlotSelectorImpl(const SlotSelectorImpl&) = delete;
  SlotSelectorImpl& operator=(const SlotSelectorImpl&) = delete;

  void select(const ExpertIds& topk_ids, void* slots, void* stream);
  /// Implements RouteCounter::count().
  void count(const ExpertIds& topk_ids, void* stream);
  /// For calls of another object that select slots: throws invalid_argument unless the map's slots are the `num_experts`
  /// experts of an object of `group`. `name`: the option that passed the selector.
  void check_joined(const char* name, const Group::Impl& group, int num_experts) const;
  /// Collective: the first step of RouteCounter::load(). Throws on all ranks if they pass different selectors or only some pass
  /// one, or if any fails check_joined().
  void agree_on_load(const char* call, const SlotSelectorImpl* selector);
  /// Executes select() as part of such a call, whose arguments have been checked. Replaces the ids of the first T tokens, where
  /// T is as in tokens_now(). With `to.slots` null, only counts the routes. `num_sms`: CUDA: as in the options of a call.
  /// `to.version` is written even without tokens.
  virtual void run(const ExpertIds& topk_ids, const SelectedSlots& to, void* stream, const int32_t* device_tokens,
                   int num_sms = 0) = 0;
  /// Counts such a call, with or without tokens.
  void count_call() { ++calls_; }
  void set_map(const ExpertMap& map, std::span<const int64_t> routes, void* stream);
  /// `weights`: null, or the object of `arrays`, which moves the weights in the background.
  BalanceReport balance(Group& group, const ExpertIds& topk_ids, void* slots, std::span<const SlotArray> arrays,
                        const BalanceOptions& options, SlotWeightsImpl* weights);
  std::vector<int64_t> gather_routes();
  /// Collective. Returns the routes since construction, [W, E]. `name`: the method's name in errors.
  std::vector<int64_t> gather_all_routes(const char* name);
  virtual const int64_t* routes() const = 0;
  const ExpertMap& map() const { return map_; }
  int64_t version() const { return version_; }

 protected:
  SlotSelectorImpl(Group& group, const ExpertMap& map) : ExchangeBase(group), map_(map), number_(group_.selectors) {}
  /// Counts this selector in the group. Call at the end of each constructor, after all that may throw.
  void count_selector() { group_.selectors = number_ + 1; }
  /// Checks the arguments and returns this rank's table. Throws invalid_argument.
  std::vector<uint32_t> make_table(const ExpertMap& map, std::span<const int64_t> routes, int64_t version) const;
  /// The fields that must be equal on all ranks before a map is used. The selector and its calls are the first ones, so that a
  /// difference in another field implies equal calls.
  AgreedFields fields(const ExpertMap& map, std::span<const int64_t> routes) const;
  /// Throws invalid_argument if the backend does not accept the arguments of a call of select().
  virtual void check_call(const ExpertIds& topk_ids, const void* slots) const = 0;
  /// Throws invalid_argument if the method `name` must not use the stream.
  virtual void check_stream(const char* name, void* stream) const = 0;
  /// read_ids() copies the ids to host memory and waits; write_slots() copies slots from host memory, which may be reused on
  /// return. \pre num_tokens > 0
  virtual void read_ids(const ExpertIds& topk_ids, void* to, void* stream) = 0;
  virtual void write_slots(const ExpertIds& topk_ids, const void* from, void* slots, void* stream) = 0;
  /// Stores `words` until use_table(), which use_map() calls on all ranks only if no rank failed.
  virtual void stage_table(std::vector<uint32_t> words) = 0;
  virtual void use_table(void* stream) = 0;
  /// Copies the counters of completed calls to `routes`, [E]. `reset`: sets them to 0.
  virtual void read_routes(int64_t* routes, bool reset) = 0;

 private:
  /// The two steps of set_map(): checks that can fail, on all ranks, and the change of the map.
  void prepare_map(const ExpertMap& map, std::span<const int64_t> routes, void* stream);
  void use_map(const ExpertMap& map, void* stream);
  void check_ids(const ExpertIds& topk_ids, const void* slots, bool counts_only = false) const;
  /// Group::Impl::agree() on `fields`, which begin with those of fields(). Resets the number of calls on success and if it
  /// differs by rank, so that one extra call makes only one map fail, not all later ones.
  void agree(const char* call, const AgreedFields& fields, const ConstructionReport& mine, const void* data = nullptr,
             size_t bytes = 0, void* all = nullptr);
  /// The values that must be equal on all ranks in balance().
  AgreedFields fields_of_balance(std::span<const SlotArray> arrays, const BalanceOptions& options) const;

  ExpertMap map_;
  const int64_t number_;  ///< position among the selectors and route counters of the group, from 0; identical on all ranks
  int64_t version_ = 1;
  int64_t calls_ = 0;                  ///< of select() and balance() since the ranks last compared them
  std::vector<int64_t> reset_routes_;  ///< [E] counted before the last reset; empty: 0
  // Scratch memory of balance().
  std::vector<int32_t> narrow_ids_;
  std::vector<int64_t> wide_ids_;
};

/// The implementation of a selector that is passed to another object.
struct SelectorAccess {
  /// \throws Error(invalid_argument) if the selector was moved from
  static SlotSelectorImpl& impl(SlotSelector& selector) { return *selector.impl_; }
  static SlotWeightsImpl& impl(SlotWeights& weights) { return *weights.impl_; }
};

}  // namespace switchyard::detail
