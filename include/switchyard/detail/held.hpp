// SPDX-License-Identifier: Apache-2.0
/// \file
/// Smart-pointer wrapper that holds the implementation of every public object.
#pragma once

#include <string>
#include <utility>

#include "switchyard/status.hpp"

namespace switchyard::detail {

/// Smart pointer that throws Error(invalid_argument) when used while null, instead of crashing on a default-constructed or
/// moved-from object. `Object` is the object's name in error messages.
template <class Pointer, const char* Object>
class Held {
 public:
  Held() = default;
  Held(Pointer pointer) noexcept : pointer_(std::move(pointer)) {}  // NOLINT(google-explicit-constructor): it is one
  explicit operator bool() const noexcept { return pointer_ != nullptr; }
  auto& operator*() const {
    if (!pointer_)
      throw Error(ErrorCode::invalid_argument, std::string(Object) + " is empty: it was default-constructed or moved from");
    return *pointer_;
  }
  auto* operator->() const { return &**this; }
  const Pointer& pointer() const noexcept { return pointer_; }
  Pointer& pointer() noexcept { return pointer_; }

 private:
  Pointer pointer_;
};

inline constexpr char kGroupObject[] = "Group";
inline constexpr char kNormalObject[] = "NormalExchange";
inline constexpr char kLowLatencyObject[] = "LowLatencyExchange";
inline constexpr char kLedgerObject[] = "LedgerCombine";
inline constexpr char kPreparedObject[] = "ledger";
inline constexpr char kHandleObject[] = "handle";
inline constexpr char kSlotSelectorObject[] = "SlotSelector";
inline constexpr char kRouteCounterObject[] = "RouteCounter";
inline constexpr char kTraceObject[] = "Trace";
inline constexpr char kExpertObject[] = "ExpertMlp";
inline constexpr char kMoeLayerObject[] = "MoeLayer";
inline constexpr char kGemmObject[] = "GroupedGemm";
inline constexpr char kWeightGradientObject[] = "WeightGradient";
inline constexpr char kSwigluGradientObject[] = "SwigluGradient";
inline constexpr char kRoutingGradientObject[] = "RoutingGradient";

}  // namespace switchyard::detail
