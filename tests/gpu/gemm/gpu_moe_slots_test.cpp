// SPDX-License-Identifier: Apache-2.0
// Captured MoeLayers that select slots on GPUs: replays use the map in force and compare its version. The slots and sums
// themselves: tests/modes/slots/replicated_layer_test.cpp.
#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "gpu/gemm/moe_calls.hpp"
#include "harness/outcome.hpp"
#include "switchyard/expert_map.hpp"

namespace harness {
namespace {

using switchyard::Backend;
using switchyard::ErrorCode;
using switchyard::ExpertMap;
using switchyard::MoeForm;
using switchyard::SlotSelector;
using switchyard::testing::MoeCase;

/// As many slots as experts: the slot of expert e is e.
const ExpertMap kHome{6, 2, 3, {0, 1, 2, 3, 4, 5}};

std::vector<MoeCase> selecting_cases() {
  std::vector<MoeCase> all{
      {.c = {.name = "normal", .experts = 6, .tokens = {40, 23}}},
      {.c = {.name = "low_latency", .masked = true, .experts = 6, .tokens = {40, 23}}},
      {.c = {.name = "fused", .experts = 6, .tokens = {40, 23}}, .form = MoeForm::fused},
      {.c = {.name = "fused_no_tokens", .experts = 6, .tokens = {40, 0}}, .form = MoeForm::fused},
      {.c = {.name = "fused_fp8", .experts = 6, .intermediate = 256, .tokens = {40, 23}}, .fp8 = true, .form = MoeForm::fused}};
  all.push_back({.c = {.name = "split", .experts = 6, .tokens = {70, 33}, .only = 4},
                 .capacity = 84,
                 .overflow = switchyard::Overflow::split,
                 .form = MoeForm::fused});
  return all;
}

class GpuMoeSlots : public testing::TestWithParam<MoeCase> {};
INSTANTIATE_TEST_SUITE_P(Gpu, GpuMoeSlots, testing::ValuesIn(selecting_cases()), [](const auto& c) { return c.param.c.name; });

TEST_P(GpuMoeSlots, ReplaysUseTheMapInForce) {
  const MoeCase& m = GetParam();
  on_gpus(2, m.heap_bytes(Backend::cuda), [&](Station& me) {
    GpuRig rig(me);
    MoeGpuRank rank(rig, me.group, m);
    SlotSelector selector(me.group, kHome);
    Graph graph(me, [&] { rank.forward({.selector = &selector}); });
    for (uint32_t call = 0; call < 10; ++call) {  // more versions than the comparison distinguishes
      run_call(me, rank, call, false, [&] {
        if (call % 3 == 2)
          rank.forward({.selector = &selector});
        else
          graph.launch();
      });
      selector.set_map(kHome, {}, me.stream());
    }
    me.group.check();
    me.meet();
    graph.destroy();
  });
}

/// Replayed: rank 1 sets the next map before its call, rank 0 after it. Eager: rank 1 passes a selector with a later version.
TEST_P(GpuMoeSlots, VersionsThatDifferAreFound) {
  const MoeCase& m = GetParam();
  isolated([&] {
    for (const bool replayed : {false, true})
      on_gpus(2, m.heap_bytes(Backend::cuda), 20s, [&](Station& me) {
        me.f.set_context(replayed ? "replayed" : "eager");
        GpuRig rig(me);
        MoeGpuRank rank(rig, me.group, m);
        SlotSelector selector(me.group, kHome), later(me.group, kHome);
        later.set_map(kHome, {}, me.stream());
        Graph graph(me, [&] { rank.forward({.selector = &selector}); });
        run_call(me, rank, 0, false, [&] { graph.launch(); });
        me.meet();
        if (replayed && me.rank() == 1) selector.set_map(kHome, {}, me.stream());
        Outcome end =
            outcome_of([&] { replayed ? graph.launch() : rank.forward({.selector = me.rank() == 1 ? &later : &selector}); });
        if (replayed && me.rank() == 0) (void)outcome_of([&] { selector.set_map(kHome, {}, me.stream()); });
        me.meet();
        if (end.code == ErrorCode::ok) end = outcome_of([&] { me.group.check(); });
        me.f.equal(code_name(ErrorCode::mismatch), code_name(end.code), "code, " + end.text);
        const std::string options = m.c.masked ? "LowLatencyDispatchOptions" : "MoeLayerCall";
        me.f.equal(replayed ? 1 : 1 + 3, map_difference(end.text, options + "::selector"), end.text);
        me.gather();
        graph.destroy();
      });
  });
}

}  // namespace
}  // namespace harness
