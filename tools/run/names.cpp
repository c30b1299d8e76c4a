// SPDX-License-Identifier: Apache-2.0
#include "run/names.hpp"

#include <initializer_list>
#include <stdexcept>
#include <utility>

namespace switchyard::tool {
namespace {

template <class T>
T named(const char* what, const std::string& word, std::initializer_list<std::pair<const char*, T>> table) {
  for (const auto& [name, value] : table)
    if (word == name) return value;
  throw std::invalid_argument(std::string(what) + " '" + word + "' is not known");
}

}  // namespace

SourceRows rows_named(const std::string& word) {
  return named<SourceRows>("row type", word,
                           {{"bf16", {DType::bf16, ScaleKind::none}},
                            {"f16", {DType::f16, ScaleKind::none}},
                            {"f32", {DType::f32, ScaleKind::none}},
                            {"fp8", {DType::fp8_e4m3, ScaleKind::f32}},
                            {"fp8_ue8m0", {DType::fp8_e4m3, ScaleKind::ue8m0}}});
}

ScaleKind scales_named(const std::string& word) {
  return named<ScaleKind>("kind of scales", word,
                          {{"none", ScaleKind::none}, {"f32", ScaleKind::f32}, {"ue8m0", ScaleKind::ue8m0}});
}

Backend backend_named(const std::string& word) {
  return named<Backend>("backend", word, {{"cpu", Backend::cpu}, {"cuda", Backend::cuda}});
}

Layout layout_named(const std::string& word) {
  return named<Layout>("layout", word, {{"rank_major", Layout::rank_major}, {"expert_major", Layout::expert_major}});
}

Staging staging_named(const std::string& word) {
  return named<Staging>("staging", word, {{"direct", Staging::direct}, {"ring", Staging::ring}});
}

CombineOrder order_named(const std::string& word) {
  return named<CombineOrder>("order", word, {{"per_rank", CombineOrder::per_rank}, {"per_route", CombineOrder::per_route}});
}

Sending sending_named(const std::string& word) {
  return named<Sending>("sending", word, {{"per_rank", Sending::per_rank}, {"per_route", Sending::per_route}});
}

ScaleOrder scale_order_named(const std::string& word) {
  return named<ScaleOrder>("order of scales", word,
                           {{"row_major", ScaleOrder::row_major}, {"column_major", ScaleOrder::column_major}});
}

}  // namespace switchyard::tool
