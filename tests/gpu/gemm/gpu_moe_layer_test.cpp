// SPDX-License-Identifier: Apache-2.0
// MoeLayer on GPUs (unit/layer/moe_rank.hpp): bitwise comparison with separate calls, comparison with float64, graphs, T on the
// device, and rows beyond capacity. Two ranks, which may share a GPU.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "gpu/gemm/moe_calls.hpp"
#include "switchyard/trace.hpp"

namespace harness {
namespace {

using switchyard::Backend;
using switchyard::DType;
using switchyard::MoeForm;
using switchyard::MoeLayer;
using switchyard::MoeLayerCall;
using switchyard::MoeLayerConfig;
using switchyard::Overflow;
using switchyard::testing::MoeCase;

/// The cases shared by both backends, and both modes again in f16 and fp8.
std::vector<MoeCase> gpu_cases() {
  std::vector<MoeCase> all = switchyard::testing::moe_cases();
  for (const bool masked : {false, true}) {
    const std::string mode = masked ? "masked_" : "normal_";
    all.push_back({.c = {.name = mode + "f16", .masked = masked, .type = DType::f16, .tokens = {70, 33}}});
    all.push_back({.c = {.name = mode + "fp8", .masked = masked, .intermediate = 144, .tokens = {44, 61}}, .fp8 = true});
  }
  using switchyard::OutputScaling;
  using switchyard::ScaleGranularity;
  using switchyard::ScaleKind;
  for (const ScaleKind scales : {ScaleKind::f32, ScaleKind::ue8m0})
    all.push_back({.c = {.name = std::string("masked_columns_") + to_string(scales),
                         .masked = true,
                         .hidden = 384,
                         .intermediate = 144,
                         .tokens = {44, 61}},
                   .fp8 = true,
                   .row_scales = scales,
                   .by_hand = switchyard::ScaleOrder::column_major});
  for (const auto& [name, between] : {std::pair{"per_group", OutputScaling::per_group},
                                      {"fixed", OutputScaling::fixed},
                                      {"per_row", OutputScaling::per_row}}) {
    MoeCase m{.c = {.name = std::string("channel_") + name, .intermediate = 144, .tokens = {44, 61}}, .fp8 = true};
    m.scaling = ScaleGranularity::per_channel;
    m.between = between;
    all.push_back(m);
  }
  all.push_back({.c = {.name = "channel_many_rows", .hidden = 384, .intermediate = 256, .tokens = {300, 0}},
                 .order = switchyard::CombineOrder::per_rank,
                 .fp8 = true,
                 .scaling = ScaleGranularity::per_channel,
                 .between = OutputScaling::per_row});
  for (const bool masked : {false, true})
    all.push_back({.c = {.name = masked ? "masked_group_channel" : "normal_group_channel",
                         .masked = masked,
                         .intermediate = 144,
                         .tokens = {44, 61}},
                   .fp8 = true,
                   .scaling = ScaleGranularity::group_channel});
  all = switchyard::testing::in_both_forms(all);
  for (const MoeCase& m : fused_fp8_cases()) all.push_back(m);
  for (const MoeCase& m : split_cases()) all.push_back(m);
  return all;
}

class GpuMoeLayers : public testing::TestWithParam<MoeCase> {};

TEST_P(GpuMoeLayers, GiveTheBitsOfTheirCalls) {
  const MoeCase& m = GetParam();
  on_gpus(m.c.world(), m.heap_bytes(Backend::cuda), [&](Station& me) {
    GpuRig rig(me);
    MoeGpuRank rank(rig, me.group, m);
    for (uint32_t call = 0; call < 3; ++call) run_call(me, rank, call, false, [&] { rank.forward(); });
    run_call(me, rank, 3, false, [&] { rank.forward({.num_sms = 8}); });
    me.group.check();
    me.meet();
  });
}

// Same as the CPU test in unit/layer/moe_layer_test.cpp. The second layer also runs in a graph that outlives the first layer.
TEST_P(GpuMoeLayers, ShareAllButTheirWeights) {
  const MoeCase& m = GetParam();
  on_gpus(m.c.world(), m.heap_bytes(Backend::cuda, 2), [&](Station& me) {
    GpuRig rig(me);
    MoeGpuRank rank(rig, me.group, m);
    const switchyard::MoeWeights others = rank.other_weights();
    MoeLayer second = rank.layer().with_weights(others), alone = rank.made(me.group, others);
    std::vector<std::byte> expected;
    const auto results_of = [&](const auto& enqueue) {
      rank.write(3);
      me.meet();
      enqueue();
      me.meet();
      return rank.result();
    };
    const auto equal = [&](const char* when, const auto& enqueue) {
      me.f.equal(true, results_of(enqueue) == expected, std::string("bits of a layer of its own, ") + when);
    };
    expected = results_of([&] { rank.forward_by(alone); });
    equal("at first", [&] { rank.forward_by(second); });
    run_call(me, rank, 3, false, [&] { rank.forward(); });
    equal("again", [&] { rank.forward_by(second); });
    Graph graph(me, [&] { rank.forward_by(second); });
    equal("in a graph", [&] { graph.launch(); });
    rank.layer() = std::move(second);
    equal("in a graph after the first one's end", [&] { graph.launch(); });
    equal("after the first one's end", [&] { rank.forward_by(rank.layer()); });
    me.group.check();
    me.meet();
  });
}

TEST_P(GpuMoeLayers, AddToWhatIsThere) {
  const MoeCase& m = GetParam();
  on_gpus(m.c.world(), m.heap_bytes(Backend::cuda), [&](Station& me) {
    GpuRig rig(me);
    MoeGpuRank rank(rig, me.group, m);
    for (uint32_t call = 0; call < 2; ++call) run_call(me, rank, call, true, [&] { rank.forward({.add = true}); });
    me.group.check();
    me.meet();
  });
}

TEST_P(GpuMoeLayers, ReadTheNumberOfTokens) {
  const MoeCase& m = GetParam();
  on_gpus(m.c.world(), m.heap_bytes(Backend::cuda), [&](Station& me) {
    GpuRig rig(me);
    MoeGpuRank rank(rig, me.group, m);
    for (const bool add : {false, true}) {
      for (const int64_t rows : {int64_t{5}, int64_t{0}, int64_t{1000}}) {
        const MoeLayerCall call{.device_tokens = rank.device_tokens(), .add = add};
        run_call(
            me, rank, 1, add, [&] { rank.forward(call, rows > 0); }, rows);
      }
    }
    me.group.check();
    me.meet();
  });
}

// Two graphs of one layer alternate with direct calls, each time with different rows, routing, weights and T.
TEST_P(GpuMoeLayers, InGraphs) {
  const MoeCase& m = GetParam();
  on_gpus(m.c.world(), m.heap_bytes(Backend::cuda), [&](Station& me) {
    GpuRig rig(me);
    MoeGpuRank rank(rig, me.group, m);
    run_call(me, rank, 0, false, [&] { rank.forward(); });
    Graph plain(me, [&] { rank.forward(); });
    Graph adding(me, [&] { rank.forward({.device_tokens = rank.device_tokens(), .add = true}); });
    for (uint32_t call = 1; call < 7; ++call) {
      if (call % 3 == 0)
        run_call(me, rank, call, false, [&] { rank.forward(); });
      else if (call % 2 == 0)
        run_call(me, rank, call, false, [&] { plain.launch(); });
      else
        run_call(
            me, rank, call, true, [&] { adding.launch(); }, call == 1 ? 1000 : 3 * call);
    }
    me.group.check();
    plain.destroy();
    adding.destroy();
    me.meet();
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, GpuMoeLayers, testing::ValuesIn(gpu_cases()), [](const auto& c) { return c.param.c.name; });

// The call track of a direct call and of two replays of a captured one.
TEST(GpuMoeLayer, RecordsItsSteps) {
  for (const bool masked : {false, true}) {
    const MoeCase m{.c = {.name = "traced", .masked = masked, .tokens = {30, 21}}};
    on_gpus(m.c.world(), m.heap_bytes(Backend::cuda), [&](Station& me) {
      GpuRig rig(me);
      MoeGpuRank rank(rig, me.group, m);
      run_call(me, rank, 1, false, [&] { rank.forward(); });
      switchyard::Trace trace(me.group.size(), {.num_blocks = 8, .num_warps = 1});
      me.meet();
      me.group.set_trace(&trace);
      me.gather();
      rank.forward();
      me.meet();
      Graph graph(me, [&] { rank.forward(); });
      for (int replay = 0; replay < 2; ++replay) {
        me.meet();
        graph.launch();
      }
      me.meet();
      me.group.set_trace(nullptr);
      me.gather();  // all ranks have added their records
      std::string steps;
      for (const switchyard::TraceSlice& s : trace.slices())
        if (s.rank == me.rank() && s.track < 0 && (s.category == "call" || s.category == "compute")) steps += s.name + " ";
      const std::string call = "dispatch expert_up expert_down combine ";
      me.f.equal(call + call + call, steps, "recorded");
      me.group.check();
      graph.destroy();
      me.meet();
    });
  }
}

// The bits depend neither on the exchange nor on the capacity.
TEST(GpuMoeLayer, IsOneKernelByItselfOnOneHostOnly) {
  MoeCase m{.c = {.name = "automatic", .tokens = {61, 40}}};
  const size_t separate = m.heap_bytes(Backend::cuda);
  m.form = MoeForm::automatic;
  on_gpus(2, std::max(separate, m.heap_bytes(Backend::cuda)), [&](Station& me) {
    GpuRig rig(me);
    MoeGpuRank rank(rig, me.group, m);
    const MoeForm chosen = me.group.hosts() > 1 ? MoeForm::separate : MoeForm::fused;
    me.f.check(rank.layer().config().form == chosen, "another form than " + std::string(to_string(chosen)));
    run_call(me, rank, 1, false, [&] { rank.forward(); });
    me.group.check();
    me.meet();
  });
}

TEST(GpuMoeLayer, HasTheBitsOfEveryExchange) {
  const MoeCase normal{.c = {.name = "normal", .tokens = {61, 40}}};
  std::vector<MoeCase> cases(3, normal);
  cases[1].c.masked = true;
  cases[2].capacity = 330;  // no rank receives more than 303
  size_t heap = 0;
  for (const MoeCase& m : cases) heap += m.heap_bytes(Backend::cuda);
  on_gpus(2, heap, [&](Station& me) {
    std::vector<std::vector<std::byte>> results;
    for (const MoeCase& m : cases) {
      GpuRig rig(me);
      MoeGpuRank rank(rig, me.group, m);
      rank.write(5);
      me.meet();
      rank.forward();
      me.meet();
      results.push_back(rank.result());
      me.group.check();
      me.meet();
    }
    me.f.check(results[0] == results[1], "low latency gives other bits than normal mode");
    me.f.check(results[0] == results[2], "capacity changes bits");
    me.meet();
  });
}

struct FormCase {
  const char* name;
  MoeForm form;
  bool fp8;
  switchyard::CombineOrder order = switchyard::CombineOrder::per_route;
};
MoeCase with_capacity(Overflow overflow, const FormCase& f) {
  return {.c = {.name = "capacity", .intermediate = f.fp8 ? 128 : 136, .tokens = {40, 30}, .only = 4},
          .order = f.order,
          .fp8 = f.fp8,
          .capacity = 140,
          .overflow = overflow,
          .form = f.form};
}

// The kernels detect the error, all ranks receive it from their group, nothing is written, and the layer stays usable.
class GpuMoeForms : public testing::TestWithParam<FormCase> {};

TEST_P(GpuMoeForms, FailBeyondCapacity) {
  const MoeCase m = with_capacity(Overflow::fail, GetParam());
  on_gpus(2, m.heap_bytes(Backend::cuda), [&](Station& me) {
    GpuRig rig(me);
    MoeGpuRank rank(rig, me.group, m);
    for (int again = 0; again < 2; ++again) {
      rank.write(0);
      me.meet();
      const Outcome enqueued = outcome_of([&] { rank.forward(); });
      me.f.equal(static_cast<int>(ErrorCode::ok), static_cast<int>(enqueued.code), "enqueued: " + enqueued.text);
      me.meet();
      const Outcome found = outcome_of([&] { me.group.check(); });
      me.f.equal(static_cast<int>(ErrorCode::capacity_exceeded), static_cast<int>(found.code), found.text);
      me.f.check(rank.result() == rank.base_of(0), "out was written");
      me.meet();
      const auto few = int32_t{20};  // at most 60 routes from each rank
      must(cudaMemcpyAsync(rank.device_tokens(), &few, 4, cudaMemcpyHostToDevice, me.stream()), "T");
      me.meet();
      rank.forward({.device_tokens = rank.device_tokens()});
      me.meet();
      const std::vector<std::byte> got = rank.result(), base = rank.base_of(0);
      const auto behind = static_cast<std::ptrdiff_t>(20 * m.c.row_bytes());
      me.f.check(std::equal(got.begin() + behind, got.end(), base.begin() + behind), "rows behind T were written");
      me.f.check(!std::equal(got.begin(), got.begin() + behind, base.begin()), "rows of tokens were not written");
      me.group.check();
      me.meet();
    }
  });
}

TEST_P(GpuMoeForms, DropBeyondCapacity) {
  const MoeCase m = with_capacity(Overflow::drop_and_report, GetParam());
  on_gpus(2, m.heap_bytes(Backend::cuda), [&](Station& me) {
    GpuRig rig(me);
    MoeGpuRank rank(rig, me.group, m);
    const auto judge_drops = [&] {
      const std::vector<uint8_t> dropped = rank.dropped();
      me.f.equal(static_cast<size_t>(rank.tokens() * m.c.topk), dropped.size(), "size of dropped()");
      const bool some = std::count(dropped.begin(), dropped.end(), 1) > 0;
      me.f.check(some == (me.rank() == 1), some ? "routes of rank 0 were dropped" : "nothing was dropped");
    };
    for (uint32_t call = 0; call < 2; ++call) {
      run_call(me, rank, call, false, [&] { rank.forward(); });
      judge_drops();
      me.meet();
    }
    Graph graph(me, [&] { rank.forward(); });  // from here on, dropped() refers to the last launch
    for (uint32_t call = 2; call < 4; ++call) {
      run_call(me, rank, call, false, [&] { graph.launch(); });
      judge_drops();
      me.meet();
    }
    me.group.check();
    graph.destroy();
    me.meet();
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, GpuMoeForms,
                         testing::Values(FormCase{"separate", MoeForm::separate, false},
                                         FormCase{"fused", MoeForm::fused, false}, FormCase{"fused_fp8", MoeForm::fused, true},
                                         FormCase{"fused_sums", MoeForm::fused, false, switchyard::CombineOrder::per_rank},
                                         FormCase{"fused_fp8_sums", MoeForm::fused, true, switchyard::CombineOrder::per_rank}),
                         [](const auto& form) { return std::string(form.param.name); });

/// Enqueues calls while another GPU, if any, is current. The layer must not depend on the current GPU.
template <class Enqueue>
void elsewhere(Station& me, const Enqueue& enqueue) {
  int devices = 0, after = -1;
  must(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
  const int other = (me.device() + 1) % devices;
  must(cudaSetDevice(other), "cudaSetDevice");
  enqueue();
  must(cudaGetDevice(&after), "cudaGetDevice");
  me.f.equal(other, after, "current GPU");
  must(cudaSetDevice(me.device()), "cudaSetDevice");
}

// A layer uses exactly the reported amount of heap memory, even if it is never captured.
TEST(GpuMoeLayer, FitsIntoItsMemory) {
  for (const bool masked : {false, true}) {
    MoeCase m{.c = {.name = masked ? "masked" : "normal", .masked = masked, .tokens = {60, 60}}};
    MoeLayerConfig config = m.moe();
    config.captured = masked;
    on_gpus(2, MoeLayer::heap_bytes(config, 2, Backend::cuda), [&](Station& me) {
      GpuRig rig(me);
      const int first = switchyard::first_expert(m.c.experts, 2, me.rank());
      const auto w = make_weights(rig, m, first, switchyard::first_expert(m.c.experts, 2, me.rank() + 1));
      MoeLayer layer(me.group, config, w.w13, w.w2);
      const switchyard::testing::LayerInput input(m.c, 1, me.rank());
      void* const x = me.upload(input.x.data(), input.x.size());
      const auto* ids = static_cast<const int32_t*>(me.upload(input.ids.data(), input.ids.size() * 4));
      std::byte* const out = me.allocate(input.x.size());
      me.meet();
      for (int call = 0; call < 3; ++call)
        elsewhere(
            me, [&] { layer.forward(x, switchyard::ExpertIds::of(ids, 60, m.c.topk), nullptr, out, {.stream = me.stream()}); });
      me.meet();
      me.group.check();
      me.f.equal(std::string(masked ? "separate, low_latency, bf16 wgmma:sm_90a" : "separate, normal, bf16 wgmma:sm_90a"),
                 layer.implementation(), "implementation");
      me.meet();
    });
  }
}

}  // namespace
}  // namespace harness
