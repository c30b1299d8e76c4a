// SPDX-License-Identifier: Apache-2.0
// Command-line words for the library's types. Enumeration names are the library's own (switchyard/names.hpp); only the
// additional words for rows are defined in this file.
#pragma once

#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "switchyard/layer.hpp"
#include "switchyard/low_latency.hpp"
#include "switchyard/normal.hpp"
#include "switchyard/types.hpp"

namespace switchyard::tool {

/// All names in an enumeration.
template <NamedEnum E>
std::vector<std::string> words_of() {
  std::vector<std::string> words;
  for (const Named<E>& known : NamesOf<E>::kAll) words.emplace_back(known.name);
  return words;
}
/// The value named `word`. `what`: name of the enumeration in errors. \throws std::invalid_argument
template <NamedEnum E>
E named(const char* what, const std::string& word) {
  if (const auto value = from_string<E>(word)) return *value;
  throw std::invalid_argument(std::string(what) + " '" + word + "' is not known");
}

/// Source rows: their type, and the scales if they are fp8.
struct SourceRows {
  DType type = DType::bf16;
  ScaleKind scales = ScaleKind::none;

  bool quantised() const { return scales != ScaleKind::none; }
  /// Type of the result and of the rows returned by experts.
  DType result_type() const { return quantised() ? DType::bf16 : type; }
};
/// Words for rows: the names of the types without scales, then `fp8` (float32 scales) and, with `all_scales`, the other kinds
/// of scales.
std::vector<std::string> row_words(bool all_scales);
/// Words for the types whose rows can be summed.
std::vector<std::string> combined_words();

inline const std::vector<std::string> kBackends = words_of<Backend>(), kLayouts = words_of<Layout>(),
                                      kStaging = words_of<Staging>(), kQuantize = words_of<ScaleKind>(),
                                      kOrders = words_of<CombineOrder>(), kSendings = words_of<Sending>(),
                                      kScaleOrders = words_of<ScaleOrder>(), kForms = words_of<MoeForm>(),
                                      kAccumulate = words_of<Accumulate>(), kScalings = words_of<ScaleGranularity>(),
                                      kOutputScalings = words_of<OutputScaling>(), kRowTypes = row_words(false),
                                      kRowKinds = row_words(true), kCombinedTypes = combined_words();
inline constexpr int64_t kMaxSeed = int64_t{1} << 24;

// Values of the words in the lists above. \throws std::invalid_argument for other words
SourceRows rows_named(const std::string& word);
inline ScaleKind scales_named(const std::string& word) { return named<ScaleKind>("kind of scales", word); }
inline Accumulate accumulate_named(const std::string& word) { return named<Accumulate>("kind of sums", word); }
inline ScaleGranularity scaling_named(const std::string& word) { return named<ScaleGranularity>("scaling", word); }
inline OutputScaling output_scaling_named(const std::string& word) { return named<OutputScaling>("scaling of outputs", word); }
inline Backend backend_named(const std::string& word) { return named<Backend>("backend", word); }
inline Layout layout_named(const std::string& word) { return named<Layout>("layout", word); }
inline Staging staging_named(const std::string& word) { return named<Staging>("staging", word); }
inline CombineOrder order_named(const std::string& word) { return named<CombineOrder>("order", word); }
inline Sending sending_named(const std::string& word) { return named<Sending>("sending", word); }
inline MoeForm form_named(const std::string& word) { return named<MoeForm>("form", word); }
inline ScaleOrder scale_order_named(const std::string& word) { return named<ScaleOrder>("order of scales", word); }

}  // namespace switchyard::tool
