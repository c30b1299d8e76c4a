// SPDX-License-Identifier: Apache-2.0
/// \file
/// How every object of this library holds what it stands for.
#pragma once

#include <string>
#include <utility>

#include "switchyard/status.hpp"

namespace switchyard::detail {

/// A smart pointer whose use while it is null is Error(invalid_argument): so an object that was default-constructed or moved
/// from ends no program. `Object` is how errors call it.
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
inline constexpr char kFusedObject[] = "FusedMoe";
inline constexpr char kPreparedObject[] = "ledger";
inline constexpr char kHandleObject[] = "handle";
inline constexpr char kTraceObject[] = "Trace";
inline constexpr char kExpertObject[] = "ExpertMlp";
inline constexpr char kMoeLayerObject[] = "MoeLayer";
inline constexpr char kGemmObject[] = "GroupedGemm";
inline constexpr char kWeightGradientObject[] = "WeightGradient";
inline constexpr char kSwigluGradientObject[] = "SwigluGradient";
inline constexpr char kRoutingGradientObject[] = "RoutingGradient";

}  // namespace switchyard::detail
