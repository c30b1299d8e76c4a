// SPDX-License-Identifier: Apache-2.0
#include "run/names.hpp"

namespace switchyard::tool {
namespace {

struct NamedRowKind {
  std::string word;
  SourceRows rows;
};

std::vector<NamedRowKind> row_kinds() {
  std::vector<NamedRowKind> kinds;
  for (const Named<DType>& type : NamesOf<DType>::kAll)
    if (!dtype_has_scales(type.value)) kinds.push_back({type.name, {type.value, ScaleKind::none}});
  kinds.push_back({"fp8", {DType::fp8_e4m3, ScaleKind::f32}});
  kinds.push_back({"fp8_ue8m0", {DType::fp8_e4m3, ScaleKind::ue8m0}});
  return kinds;
}

}  // namespace

std::vector<std::string> row_words(bool all_scales) {
  std::vector<std::string> words;
  for (const NamedRowKind& kind : row_kinds())
    if (all_scales || kind.rows.scales != ScaleKind::ue8m0) words.push_back(kind.word);
  return words;
}

std::vector<std::string> combined_words() {
  std::vector<std::string> words;
  for (const Named<DType>& type : NamesOf<DType>::kAll)
    if (dtype_combines(type.value)) words.emplace_back(type.name);
  return words;
}

SourceRows rows_named(const std::string& word) {
  for (const NamedRowKind& kind : row_kinds())
    if (kind.word == word) return kind.rows;
  throw std::invalid_argument("row type '" + word + "' is not known");
}

}  // namespace switchyard::tool
