// SPDX-License-Identifier: Apache-2.0
// Parameters of low-latency calls with some members as constants, so that the kernels of common calls are small and have
// straight-line code on the executed paths (docs/design/0015). A derived constant hides the member of the same name.
#pragma once

#include <type_traits>

#include "exchange/low_latency/frame.cuh"
#include "exchange/low_latency/launch.hpp"

namespace switchyard::detail {

/// Layout whose messages are tokens rather than routes, with at most 32 ranks and 32 choices.
struct KnownLayout : LowLatencyLayout {
  static constexpr SWITCHYARD_FN int units_per_token() { return 1; }
  static constexpr SWITCHYARD_FN int token_of(int unit) { return unit; }
  static constexpr SWITCHYARD_FN int first_k_of(int) { return 0; }
  SWITCHYARD_FN int owner(int32_t expert) const { return LowLatencyLayout::owner<true>(expert); }

  static bool holds(const LowLatencyLayout& l) {
    return l.entries == l.topk && l.topk <= 32 && l.world() <= 32 && l.by_wide.fast() && l.by_each.fast();
  }
};

template <bool kColumns>
struct KnownScalePlace : ScalePlace {
  static constexpr bool column_major = kColumns;
};
using ScaleRows = KnownScalePlace<false>;
using ScaleColumns = KnownScalePlace<true>;

/// True if CudaInline can move rows of this many bytes at p.
inline bool whole_rows(const void* p, int64_t bytes) { return (reinterpret_cast<uintptr_t>(p) | bytes) % 16 == 0; }

/// Rows without scales from the caller.
struct WithoutScales : LowLatencyDispatchParams {
  static constexpr const std::byte* scales = nullptr;
};

/// Rows of kType that are either sent as fp8 with one scale per 128 columns, placed at the receiver as defined by Place, or
/// sent unchanged (fp8 with the caller's float32 scales, other types without scales).
template <ScaleKind kScales, class Place = ScaleRows, DType kType = DType::bf16, bool kPlaces = true>
struct KnownDispatch : std::conditional_t<kType == DType::fp8_e4m3, LowLatencyDispatchParams, WithoutScales> {
  static constexpr DType src_type = kType;
  static constexpr ScaleKind quantize = kScales;
  static constexpr int scale_group = kScaleGroup;
  static constexpr int scale_element_bytes = kScales == ScaleKind::ue8m0 ? 1 : 4;
  static constexpr bool with_places = kPlaces;
  KnownLayout layout;
  Place scale_place;
  SharedIds ids;
  SharedSets sets;  ///< unused if no places are sent

  static bool holds(const LowLatencyDispatchParams& p) {
    if constexpr (!std::is_same_v<Place, ScalePlace>)
      if (p.scale_place.column_major != Place::column_major) return false;
    return KnownLayout::holds(p.layout) && p.src_type == kType && p.quantize == kScales && p.scale_group == kScaleGroup &&
           p.scale_element_bytes == scale_element_bytes && (p.scales != nullptr) == (kType == DType::fp8_e4m3) &&
           p.with_places == kPlaces && whole_rows(p.x, p.src_row_bytes) && whole_rows(p.rows, p.layout.payload_bytes);
  }
};

/// Rows of kType.
template <CombineOrder kOrder, DType kType = DType::bf16>
struct KnownOrder : LowLatencyCombineParams {
  static constexpr CombineOrder order = kOrder;
  static constexpr DType type = kType;
  KnownLayout layout;

  static bool holds(const LowLatencyCombineParams& p) {
    return KnownLayout::holds(p.layout) && p.order == kOrder && p.type == kType && whole_rows(p.y, p.row_bytes) &&
           whole_rows(p.out, p.row_bytes);
  }
};
template <CombineOrder kOrder>
struct KnownCombine : KnownOrder<kOrder> {
  static constexpr const float* expert_scale = nullptr;

  static bool holds(const LowLatencyCombineParams& p) { return KnownOrder<kOrder>::holds(p) && p.expert_scale == nullptr; }
};

template <DType kType>
struct KnownFlat {
  KnownDispatch<ScaleKind::none, ScaleRows, kType, false> d;
  KnownOrder<CombineOrder::per_route, kType> c;

  static bool holds(const FlatParams& p) { return decltype(d)::holds(p.d) && decltype(c)::holds(p.c); }
};
static_assert(sizeof(KnownFlat<DType::bf16>) + kTraceShared <= kStaticShared);

/// Kernels for known parameters move rows through registers; the general kernels must handle any rows.
template <class P>
using ArchOf = std::conditional_t<std::is_same_v<P, LowLatencyDispatchParams> || std::is_same_v<P, LowLatencyCombineParams> ||
                                      std::is_same_v<P, FlatParams>,
                                  CudaLanes, CudaInline>;

}  // namespace switchyard::detail
