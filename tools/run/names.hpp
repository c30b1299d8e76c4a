// SPDX-License-Identifier: Apache-2.0
// Words of the command line for the library's types, and the types that they name: the one place in the tool that knows them.
#pragma once

#include <string>
#include <vector>

#include "switchyard/low_latency.hpp"
#include "switchyard/normal.hpp"
#include "switchyard/types.hpp"

namespace switchyard::tool {

inline const std::vector<std::string> kBackends = {"cpu", "cuda"};
inline const std::vector<std::string> kLayouts = {"rank_major", "expert_major"};
inline const std::vector<std::string> kStaging = {"direct", "ring"};
inline const std::vector<std::string> kRowTypes = {"bf16", "f16", "f32", "fp8"};
inline const std::vector<std::string> kRowKinds = {"bf16", "f16", "f32", "fp8", "fp8_ue8m0"};
inline const std::vector<std::string> kQuantize = {"none", "f32", "ue8m0"};
inline const std::vector<std::string> kOrders = {"per_rank", "per_route"};
inline const std::vector<std::string> kScaleOrders = {"row_major", "column_major"};
inline constexpr int64_t kMostSeed = int64_t{1} << 24;

/// Source rows: their type, and of fp8 rows the scales that come with them.
struct SourceRows {
  DType type = DType::bf16;
  ScaleKind scales = ScaleKind::none;

  bool quantised() const { return scales != ScaleKind::none; }
  /// Of what comes back, and of the rows that experts return.
  DType result_type() const { return quantised() ? DType::bf16 : type; }
};

// Of words in the lists above. \throws std::invalid_argument for other words
SourceRows rows_named(const std::string& word);
/// One of kQuantize.
ScaleKind scales_named(const std::string& word);
Backend backend_named(const std::string& word);
Layout layout_named(const std::string& word);
Staging staging_named(const std::string& word);
CombineOrder order_named(const std::string& word);
/// One of kOrders.
Sending sending_named(const std::string& word);
ScaleOrder scale_order_named(const std::string& word);

}  // namespace switchyard::tool
