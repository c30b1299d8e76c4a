// SPDX-License-Identifier: Apache-2.0
// Layers over the slots of a map on the CPU: the bits of a layer without replicas before and after moves of packed weights.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "harness/outcome.hpp"
#include "launch/on_threads.hpp"
#include "unit/expert/host_rig.hpp"
#include "unit/layer/moved_layer.hpp"

namespace switchyard {
namespace {

using testing::HostRig;
using testing::MoeCase;

class MovedLayers : public ::testing::TestWithParam<MoeCase> {};

TEST_P(MovedLayers, GiveTheBitsOfALayerWithoutReplicas) {
  const MoeCase& m = GetParam();
  GroupOptions options;
  options.heap_bytes = testing::MovedLayer<HostRig>::heap_bytes(m);
  std::vector<Group> groups = Group::in_process(m.c.world(), options);
  std::vector<std::string> found(groups.size());
  launch::on_threads(groups.size(), [&](size_t r) {
    const harness::Outcome end = harness::outcome_of([&] {
      HostRig rig;
      found[r] = testing::MovedLayer<HostRig>(rig, groups[r], m, nullptr, [] {}).check();
    });
    found[r] += end.text;
  });
  for (const std::string& text : found) EXPECT_EQ(text, "");
}

std::vector<MoeCase> cases() {
  std::vector<MoeCase> all;
  for (const WeightStorage storage : {WeightStorage::packed, WeightStorage::view}) {
    const std::string kind = storage == WeightStorage::packed ? "packed" : "view";
    all.push_back({.c = {.name = "normal_" + kind, .tokens = {40, 9, 21}}, .storage = storage});
    all.push_back({.c = {.name = "masked_" + kind, .masked = true, .tokens = {30, 17}}, .storage = storage});
    all.push_back({.c = {.name = "fused_" + kind, .tokens = {33, 20}}, .storage = storage, .form = MoeForm::fused});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Cpu, MovedLayers, ::testing::ValuesIn(cases()), [](const auto& c) { return c.param.c.name; });

}  // namespace
}  // namespace switchyard
