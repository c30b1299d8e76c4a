// SPDX-License-Identifier: Apache-2.0
// After its objects are created, a group allocates no driver memory: this covers calls of all kinds with random shapes,
// including captured calls.
#include <algorithm>

#include "gpu/harness/ledger_station.hpp"
#include "gpu/harness/station_rig.hpp"
#include "heap/gpu/device_memory.hpp"

namespace harness {
namespace {

constexpr int kCases = 16, kCalls = 240, kReplays = 50;

/// Driver memory allocated so far.
struct Given {
  size_t free_bytes;     ///< of this rank's GPU
  uint64_t allocations;  ///< requested by the library in this process
};

/// Collective. Must be called while all ranks are idle.
Given given_now(Station& me) {
  me.meet();
  Given now{0, switchyard::detail::num_device_allocations()};
  size_t total = 0;
  must(cudaMemGetInfo(&now.free_bytes, &total), "cudaMemGetInfo");
  me.gather();
  return now;
}

void check_nothing_given(Station& me, const Given& before, const std::string& what) {
  const Given now = given_now(me);
  me.f.equal(before.allocations, now.allocations, "allocations, " + what);
  me.f.equal(before.free_bytes, now.free_bytes, "free bytes of the GPU, " + what);
}

/// Shapes and formats accepted by one object: bf16, both kinds of quantization in transport, and fp8 with scales; worst-case
/// and exact sizes; sums per rank and per route.
std::vector<std::shared_ptr<const Case>> all_kinds(int world, Layout layout, Staging staging) {
  std::vector<std::shared_ptr<const Case>> cases;
  for (uint64_t i = 0; i < kCases; ++i) {
    Scenario s = gpu_scenario("kind " + std::to_string(i), world, layout, 20, 500 + i);
    for (size_t r = 0; r < s.tokens.size(); ++r) s.tokens[r] = static_cast<int64_t>(oracle::mix(14, i, r) % 21);
    s.staging = staging;
    s.ring = {3, 2, 4};
    s.drop_percent = i % 5 == 0 ? 20 : 0;
    s.identity = i % 4 == 0;
    if (i % 4 == 1) s.quantize = ScaleKind::f32;
    if (i % 4 == 2) s.quantize = ScaleKind::ue8m0;
    if (i % 4 == 3) s.x_type = DType::fp8_e4m3, s.x_scales = ScaleKind::f32;
    if (i % 8 >= 4) s.problem.size = SizePolicy::exact;
    if (layout == Layout::expert_major && i % 3 == 1) s.order = CombineOrder::per_route;
    cases.push_back(make_case(s));
  }
  return cases;
}

/// An object, its cases, and their inputs and expert outputs.
struct Subject {
  void add_inputs(Station& me) {
    for (const auto& c : cases) {
      data.push_back(std::make_unique<RankData>(*c, me.rank(), 0));
      in.push_back(me.upload(*c, *data.back()));
      const int64_t rows = worst_rows(*c), hidden = c->scenario.hidden;
      std::vector<uint16_t> host(static_cast<size_t>(rows * hidden) + 1);
      if (!c->scenario.identity) data.back()->fill_outputs({host.data(), rows, hidden, DType::bf16});
      outputs.push_back(me.upload(host.data(), static_cast<size_t>(rows * hidden) * 2));
      spoilt.push_back(me.allocate(in.back().out_bytes));
    }
  }
  /// Overwrites the result of a case.
  void spoil(size_t which, cudaStream_t stream) const {
    launch_copy(in[which].out, spoilt[which], in[which].out_bytes, stream);
  }

  std::vector<std::shared_ptr<const Case>> cases;
  NormalConfig config;
  std::vector<std::unique_ptr<RankData>> data;
  std::vector<Inputs> in;
  std::vector<void*> outputs, spoilt;
  std::unique_ptr<NormalExchange> exchange;
};

/// Makes a dispatch, an optional cached dispatch, and a combine.
void call(Station& me, Subject& s, size_t which, bool cached, cudaStream_t stream) {
  const Case& c = *s.cases[which];
  const Inputs& in = s.in[which];
  DispatchOptions options = me.dispatch_options(c, stream);
  Dispatched d = s.exchange->dispatch(in.x, in.ids, in.weights, options);
  if (cached) {
    const Handle handle = d.handle;
    d = s.exchange->dispatch(in.x, handle, options);
  }
  if (c.scenario.identity) {
    s.exchange->combine(d.x, d.handle, in.out, me.combine_options(c, stream));
  } else {
    const switchyard::RowBuffer y = s.exchange->allocate_rows(d.handle, DType::bf16);
    launch_copy(y.rows().data, s.outputs[which], static_cast<size_t>(y.rows().rows * y.rows().cols) * 2, stream);
    s.exchange->combine(y.rows(), d.handle, in.out, me.combine_options(c, stream));
  }
}

/// Captures calls of worst-case size, replays them, and destroys the graph. Only the graph instantiation, which is called by
/// the user, may allocate driver memory.
void check_graph(Station& me, Subject& s) {
  constexpr size_t kCaptured = 4;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  const Given before = given_now(me);
  must(cudaStreamBeginCapture(me.stream(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  for (size_t which = 0; which < kCaptured; ++which) call(me, s, which, which % 2 == 0, me.stream());
  must(cudaStreamEndCapture(me.stream(), &graph), "cudaStreamEndCapture");
  check_nothing_given(me, before, "capture");
  must(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
  must(cudaGraphUpload(exec, me.stream()), "cudaGraphUpload");
  must(cudaGraphLaunch(exec, me.stream()), "cudaGraphLaunch");
  const Given launched = given_now(me);
  for (size_t which = 0; which < kCaptured; ++which) s.spoil(which, me.stream());
  for (int i = 0; i < kReplays; ++i) must(cudaGraphLaunch(exec, me.stream()), "cudaGraphLaunch");
  check_nothing_given(me, launched, "replays");
  for (size_t which = 0; which < kCaptured; ++which) {
    me.f.set_context(s.cases[which]->scenario.name + ", replayed");
    me.check_combined(*s.data[which], s.in[which]);
  }
  me.meet();
  must(cudaGraphExecDestroy(exec), "cudaGraphExecDestroy");
  must(cudaGraphDestroy(graph), "cudaGraphDestroy");
  me.meet();
}

class GpuAllocations : public testing::TestWithParam<int> {};

TEST_P(GpuAllocations, NoneAfterConstruction) {
  const int world = GetParam();
  std::vector<std::pair<std::vector<std::shared_ptr<const Case>>, NormalConfig>> objects;
  size_t heap = 0;
  for (const Layout layout : {Layout::rank_major, Layout::expert_major}) {
    for (const Staging staging : {Staging::direct, Staging::ring}) {
      auto cases = all_kinds(world, layout, staging);
      const NormalConfig config = config_with_large_pool(*cases[0], 10);
      heap += heap_for(config, world);
      objects.emplace_back(std::move(cases), config);
    }
  }
  on_gpus(world, heap, [&](Station& me) {
    std::vector<Subject> subjects(objects.size());
    for (size_t o = 0; o < objects.size(); ++o) {
      Subject& s = subjects[o];
      s.cases = objects[o].first;
      s.config = objects[o].second;
      s.add_inputs(me);
    }
    uint32_t word = 0;
    me.read(&word, me.allocate(4), 4);  // ensures that the driver has allocated its memory for copies to the host
    const Given outside = given_now(me);
    for (Subject& s : subjects) s.exchange = std::make_unique<NormalExchange>(me.group, s.config);
    const Given before = given_now(me);
    me.f.check(before.allocations > outside.allocations, "the library asked for no memory at all: proves nothing");
    for (int i = 0; i < kCalls; ++i) {
      const uint64_t bits = oracle::mix(15, static_cast<uint64_t>(i));  // equal on all ranks
      Subject& s = subjects[bits % subjects.size()];
      me.f.set_context("call " + std::to_string(i));
      call(me, s, bits / 16 % kCases, bits / 1024 % 2 == 0, me.stream(static_cast<int>(bits / 4096 % Station::kStreams)));
      if (i % 16 == 15) me.synchronize();
    }
    check_nothing_given(me, before, "calls");
    me.group.check();
    for (Subject& s : subjects) {
      for (size_t which = 0; which < kCases; ++which) {
        s.spoil(which, me.stream());
        call(me, s, which, false, me.stream());
        me.meet();
        me.f.set_context(s.cases[which]->scenario.name);
        me.check_combined(*s.data[which], s.in[which]);
      }
    }
    check_nothing_given(me, before, "calls that are compared");
    for (Subject& s : subjects) check_graph(me, s);
    me.group.check();
    me.meet();
  });
}

// --- Low latency, flat and ledger

/// Shapes of objects with and without scales. Objects without scales also make whole exchanges in one call.
std::vector<StreamedCase> low_latency_kinds(int world) {
  std::vector<StreamedCase> cases;
  for (uint64_t seed = 60; cases.size() < 4; ++seed) {
    StreamedCase c = draw_case(seed, world);
    const bool scaled = c.form.scales != ScaleKind::none;
    if (scaled == (cases.size() % 2 == 0)) continue;
    c.plan = {};
    cases.push_back(c);
  }
  return cases;
}

/// A rank's objects for these modes, with everything that their calls need.
struct OtherModes {
  OtherModes(Station& me, const std::vector<StreamedCase>& cases, const std::shared_ptr<const LedgerCase>& c)
      : rig(me), rows(me, *c), ledger(me.group, make_config(*c)) {
    for (const StreamedCase& each : cases) {
      exchanges.push_back(std::make_unique<switchyard::LowLatencyExchange>(each.make(me.group)));
      calls.push_back(std::make_unique<Calls>(rig, *exchanges.back(), each));
    }
    prepared = ledger.prepare(rows.data.tables());
  }
  /// Makes calls first to first + count - 1 on each object in turn. All calls use one stream, so each may take the rank's
  /// entire share of its GPU.
  void run(uint64_t first, uint64_t count) {
    for (uint64_t n = first; n < first + count; n += 4) {
      for (auto& each : calls) each->run(n, 4);
      rows.combine(ledger, prepared);
    }
  }

  StationRig rig;
  LedgerStation rows;
  switchyard::LedgerCombine ledger;
  switchyard::PreparedLedger prepared;
  std::vector<std::unique_ptr<switchyard::LowLatencyExchange>> exchanges;
  std::vector<std::unique_ptr<Calls>> calls;
};

/// Creates two sets of objects; after the first, the driver has allocated memory for all kernels, including those of the test.
TEST_P(GpuAllocations, NoneAfterConstructionInOtherModes) {
  constexpr uint64_t kOfEach = 200;
  const int world = GetParam();
  const auto cases = low_latency_kinds(world);
  const auto c = gpu_case(world);
  size_t heap = 2 * heap_of(*c);
  for (const StreamedCase& each : cases) heap += 2 * switchyard::LowLatencyExchange::heap_bytes(each.config(), world);
  on_gpus(world, heap, [&](Station& me) {
    OtherModes first(me, cases, c);
    me.meet();
    first.run(1, kOfEach);
    const Given outside = given_now(me);
    OtherModes second(me, cases, c);
    const Given before = given_now(me);
    me.f.check(before.allocations > outside.allocations, "the library asked for no memory at all: proves nothing");
    for (uint64_t n = 1; n < 3 * kOfEach; n += kOfEach) {
      second.run(n, kOfEach);
      me.synchronize();
    }
    check_nothing_given(me, before, "calls");
    second.prepared = switchyard::PreparedLedger();
    second.prepared = second.ledger.prepare(second.rows.data.tables());
    me.gather();
    second.run(1000, 4);
    check_nothing_given(me, before, "calls by another ledger");
    me.group.check();
    for (const auto& each : second.calls) {
      Verdict verdict{};
      me.read(&verdict, each->verdict(), sizeof verdict);
      me.f.equal(std::string(), describe(verdict, each->judged()), "verdict");
    }
    second.rows.check();
    me.meet();
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, GpuAllocations, testing::Values(1, 2, 4),
                         [](const auto& world) { return "W" + std::to_string(world.param); });

}  // namespace
}  // namespace harness
