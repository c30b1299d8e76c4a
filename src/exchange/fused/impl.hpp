// SPDX-License-Identifier: Apache-2.0
// Implementation interface of FusedMoe for the GPU (gpu.cpp) and the CPU (cpu.cpp).
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>

#include "base/call_signature.hpp"
#include "exchange/fused/fused_moe.hpp"
#include "exchange/fused/sizes.hpp"
#include "exchange/group/call_difference.hpp"
#include "exchange/group/exchange_base.hpp"
#include "exchange/slots/impl.hpp"
#include "switchyard/expert.hpp"

namespace switchyard::detail {

/// Throws invalid_argument, naming the field.
void check_config(const FusedMoeConfig& config, int world);
/// Throws unsupported. The configuration must have been checked.
void check_type_on_cpu(const FusedMoeConfig& config);
/// Maximum number of rows for a rank's experts.
int64_t max_rows(const FusedMoeConfig& config, int world);

/// The passes of a split call.
SplitPasses split_passes(const FusedMoeConfig& config, int world);

/// The signature of a call of an object with this hash. `map_version`: with_map_version(); CUDA: 0.
inline uint64_t fused_signature(uint64_t hash, const FusedParts& parts, const FusedMoeCall& call, uint32_t map_version = 0) {
  const uint64_t options = pack_options(Operation::layer, {call.selector != nullptr ? 1 : 0, int64_t{map_version},
                                                           call.add ? 1 : 0, parts.down ? 1 : 0, call.weight_set});
  return make_signature(mix_hash(mix_hash(hash, options), static_cast<uint64_t>(call.weight_set)), options);
}

/// Fields that must be identical on all ranks.
AgreedFields agreed_fields(const FusedMoeConfig& config);

/// Layout of the symmetric memory, without a base address.
FusedLayout layout_of(const FusedMoeConfig& config, int world);

/// Constructor arguments of a FusedMoe on the CPU.
struct FusedOnCpu {
  FusedMoeConfig config;
  std::shared_ptr<FusedProducts> products;
};

class FusedImpl : protected ExchangeBase {
 public:
  using ExchangeBase::collective_call, ExchangeBase::home;
  virtual ~FusedImpl() = default;
  FusedImpl(const FusedImpl&) = delete;
  FusedImpl& operator=(const FusedImpl&) = delete;
  static std::unique_ptr<FusedImpl> make_on_gpu(Group& group, const FusedMoeConfig& config,
                                                const MoeWeights& weights);  // gpu.cpp
  template <class A>
  static std::unique_ptr<FusedImpl> make_on_cpu(Group& group, const FusedOnCpu& from);  // cpu.cpp

  virtual void forward(const void* x, const ExpertIds& ids, const float* weights, void* out, const FusedMoeCall& call) = 0;
  virtual void dispatch_up(const void* x, const ExpertIds& ids, const float* weights, const FusedMoeCall& call) = 0;
  virtual void down_combine(const float* weights, void* out, const FusedMoeCall& call) = 0;
  virtual FusedMoeRows rows() const = 0;
  virtual int add_weights(const MoeWeights& weights) = 0;
  virtual int add_products(std::shared_ptr<FusedProducts> products) = 0;
  virtual void remove_weights(int set) = 0;
  virtual void* tokens() const = 0;
  virtual std::span<const uint8_t> dropped() const = 0;
  virtual CallStatistics last_call() = 0;
  virtual int64_t invalid_ids() { return total_invalid_ids(); }

  const FusedMoeConfig config;

 protected:
  FusedImpl(Group& group, const FusedMoeConfig& c) : ExchangeBase(group), config(c) {}

  /// Call before each call that runs these parts; throws unless the halves alternate and use the same weights.
  void check_turn(const FusedParts& parts, const FusedMoeCall& call) const {
    if (config.overflow == Overflow::split && !(parts.up && parts.down))
      throw Error(ErrorCode::unsupported,
                  "FusedMoe: overflow = split: the halves of a layer need all rows at once: use fail or drop_and_report");
    if (parts.up && between_) invalid("call", ": down_combine has to follow dispatch_up");
    if (!parts.up && !between_) invalid("call", ": down_combine has to follow dispatch_up, which has not been called");
    if (!parts.up && call.weight_set != up_set_)
      invalid_value("weight_set", std::to_string(call.weight_set), std::to_string(up_set_) + ", that of dispatch_up");
  }
  /// Call after each call that runs these parts.
  void end_turn(const FusedParts& parts, const FusedMoeCall& call) {
    between_ = !parts.down;
    up_set_ = call.weight_set;
  }
  void check_selector(const FusedMoeCall& call) const {
    if (call.selector != nullptr)
      SelectorAccess::impl(*call.selector).check_joined("MoeLayerCall::selector", group_, config.num_experts);
  }
  int64_t max_routes() const { return config.max_tokens * config.topk; }
  /// Replaces the ids of a call with slots in `to`.
  static void select_slots(const FusedMoeCall& call, ExpertIds& ids, const SelectedSlots& to) {
    SlotSelectorImpl& selector = SelectorAccess::impl(*call.selector);
    selector.count_call();
    selector.run(ids, to, call.stream, call.device_tokens, call.num_sms);
    ids.data = to.slots;
  }
  /// The weight set of a call. Throws invalid_argument if there is none.
  template <class Set>
  static const Set& find_set(const std::map<int, Set>& sets, const FusedMoeCall& call) {
    const auto found = sets.find(call.weight_set);
    if (found == sets.end())
      invalid("weight_set",
              " = " + std::to_string(call.weight_set) + ": no such weights have been added, or they have been removed");
    return found->second;
  }
  int next_set_ = 0;  ///< number of the next weight set

  int local_experts() const { return ExpertRanges{config.num_experts, world()}.count(rank()); }
  /// Hash of everything that must be identical on all ranks.
  uint64_t hash() const { return config_hash_; }
  /// Throws invalid_argument.
  void check_arguments(const FusedParts& parts, const void* x, const ExpertIds& ids, const float* weights,
                       const void* out) const;

 private:
  const uint64_t config_hash_ = hash_of(mix_hash(1, static_cast<uint64_t>(Operation::layer)), agreed_fields(config));
  bool between_ = false;
  int up_set_ = 0;  ///< of the last call
};

}  // namespace switchyard::detail
