// SPDX-License-Identifier: Apache-2.0
// Tensor maps for a grouped product: its weights, rows and outputs, in the boxes that its kernels copy. Host code for launchers
// of these kernels or of their roles.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "arch/gpu_tensor_map.hpp"
#include "gemm/gpu/grouped_params.hpp"
#include "switchyard/status.hpp"
#include "switchyard/types.hpp"

namespace switchyard::detail::gemm {

/// Arguments for a tensor map; see gpu::make_tensor_map().
struct MappedTensor {
  const void* data = nullptr;
  gpu::ElementType type = gpu::ElementType::bytes;
  std::initializer_list<gpu::Dimension> dimensions;
  gpu::Swizzle swizzle = gpu::Swizzle::none;
};
/// Throws Error(system) on behalf of `object`; `what` is the name of the tensor.
inline void make_map(CUtensorMap* map, const MappedTensor& of, const char* object, const char* what) {
  if (gpu::make_tensor_map(map, of.data, of.type, of.dimensions, of.swizzle)) return;
  throw Error(ErrorCode::system, std::string(object) + ": the driver makes no tensor map of " + what);
}

inline gpu::ElementType map_element(DType type) {
  return type == DType::bf16 ? gpu::ElementType::bf16 : type == DType::f16 ? gpu::ElementType::f16 : gpu::ElementType::bytes;
}

/// A product with `n` weights of `k` elements per expert. Sets its maps in a kernel's parameters. Every function throws like
/// make_map().
struct ProductMaps {
  const char* object;  ///< owner of the product, for errors
  DType type;          ///< of rows and weights: bf16, f16 or fp8_e4m3
  DType out_type;      ///< of outputs that have a map: bf16 or f16
  int64_t experts, n, k;
  bool gated;          ///< the first half of the weights are gates: n / 2 outputs
  bool inner_outside;  ///< weights are [experts, k, n] instead of [experts, n, k]

  /// Elements of the inner dimension per stage.
  uint32_t inner() const { return type == DType::fp8_e4m3 ? kFp8Inner : kInner; }
  uint64_t row_bytes() const { return dtype_bytes(type, k); }

  /// Gated weights of [n, k] are loaded interleaved, alternating eight of the gate half with eight of the up half.
  void set_weights(GroupedParams& to, const void* data) const {
    const auto of_n = static_cast<uint64_t>(n), of_k = static_cast<uint64_t>(k), e = static_cast<uint64_t>(experts);
    const uint64_t row = row_bytes(), expert = of_n * row;
    const auto make = [&](std::initializer_list<gpu::Dimension> dimensions) {
      make_map(&to.weights, {data, map_element(type), dimensions, gpu::Swizzle::bytes_128}, object, "the weights");
    };
    if (inner_outside)
      make({{of_n, 0, 64}, {of_k, dtype_bytes(type, n), inner()}, {e, expert, 1}});
    else if (gated)
      make({{of_k, 0, inner()}, {8, row, 8}, {2, of_n / 2 * row, 2}, {of_n / 16, 8 * row, 16}, {e, expert, 1}});
    else
      make({{of_k, 0, inner()}, {of_n, row, kTileColumns}, {e, expert, 1}});
  }
  /// Sets the weights for the fp8 kernel for many rows, in boxes of `box` weights.
  void set_many_weights(GroupedParams& to, const void* data, uint32_t box) const {
    const auto of_n = static_cast<uint64_t>(n), halves = gated ? uint64_t{2} : uint64_t{1};
    const uint64_t row = row_bytes();
    make_map(&to.many_weights,
             {data,
              map_element(type),
              {{static_cast<uint64_t>(k), 0, inner()},
               {of_n / halves, row, box},
               {halves, of_n / halves * row, 1},
               {static_cast<uint64_t>(experts), of_n * row, 1}},
              gpu::Swizzle::bytes_128},
             object, "the weights");
  }
  /// Uses boxes of up to `max` rows per tile; `max` is a multiple of kRowStep. pitch: bytes between rows, a multiple of 16.
  void set_rows(GroupedParams& to, const void* data, int64_t rows, int max, uint64_t pitch) const {
    for (uint32_t step = 1; step <= static_cast<uint32_t>(max / kRowStep); ++step) {
      make_map(&to.rows[step - 1],
               {data,
                map_element(type),
                {{static_cast<uint64_t>(k), 0, inner()}, {static_cast<uint64_t>(rows), pitch, step * kRowStep}},
                gpu::Swizzle::bytes_128},
               object, "the rows");
    }
  }
  /// Uses narrow boxes for gated outputs with interleaved weights.
  void set_outputs(GroupedParams& to, void* data, int64_t rows) const {
    const bool narrow = gated && !inner_outside;
    const uint32_t box = narrow ? 32 : 64;
    const int64_t columns = gated ? n / 2 : n;
    const auto of_rows = static_cast<uint64_t>(rows);
    const auto make = [&](CUtensorMap* map, uint32_t box_columns, uint32_t box_rows) {
      make_map(map,
               {data,
                map_element(out_type),
                {{static_cast<uint64_t>(columns), 0, box_columns}, {of_rows, dtype_bytes(out_type, columns), box_rows}},
                box_columns == 32 ? gpu::Swizzle::bytes_64 : gpu::Swizzle::bytes_128},
               object, "the outputs");
    };
    make(&to.out_64, box, 64);
    make(&to.out_16, box, 16);
    if (type == DType::fp8_e4m3) make(&to.out_wide, 64, 16);
    to.out = static_cast<uint16_t*>(data);
  }
};

}  // namespace switchyard::detail::gemm
