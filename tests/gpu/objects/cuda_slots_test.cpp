// SPDX-License-Identifier: Apache-2.0
// SlotSelector in graphs and on several streams. The slots themselves: tests/modes/slots.
#include "gpu/harness/object_rig.hpp"
#include "harness/outcome.hpp"
#include "switchyard/expert_map.hpp"

namespace harness {
namespace {

using switchyard::ExpertIds;
using switchyard::ExpertMap;
using switchyard::SlotSelector;

constexpr int kTokens = 300, kTopk = 2;
/// Slot 0 and 2, or 1 and 3, hold experts 0 and 1.
const ExpertMap kFirst{2, 2, 2, {0, -1, 1, -1}}, kSecond{2, 2, 2, {-1, 0, -1, 1}};

/// The ids 0, 1, 0, 1, ... and memory for their slots.
struct Route {
  explicit Route(Station& station) : me(station), ids(kTokens * kTopk) {
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i % 2);
    in = static_cast<int32_t*>(me.upload(ids.data(), bytes()));
    out = reinterpret_cast<int32_t*>(me.allocate(bytes()));
  }
  size_t bytes() const { return ids.size() * sizeof ids[0]; }
  void select(SlotSelector& selector, cudaStream_t stream) const {
    selector.select(ExpertIds::of(in, kTokens, kTopk), out, stream);
  }
  /// Waits for all streams, then compares with the slots of kFirst plus `offset`.
  void check(int offset, const char* when) {
    me.synchronize();
    std::vector<int32_t> slots(ids.size()), expected(ids.size());
    me.read(slots.data(), out, bytes());
    for (size_t i = 0; i < ids.size(); ++i) expected[i] = 2 * ids[i] + offset;
    me.f.equal_range(expected, slots, when);
  }

  Station& me;
  std::vector<int32_t> ids;
  int32_t *in = nullptr, *out = nullptr;
};

TEST(GpuSlots, ReplaysUseTheMapInForce) {
  on_gpus(2, size_t{1} << 20, [](Station& me) {
    SlotSelector selector(me.group, kFirst);
    Route route(me);
    const cudaStream_t stream = me.stream();
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t replay = nullptr;
    must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    route.select(selector, stream);
    must(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    must(cudaGraphInstantiate(&replay, graph, 0), "cudaGraphInstantiate");
    must(cudaGraphLaunch(replay, stream), "cudaGraphLaunch");
    route.check(0, "the first map");
    for (int step = 1; step <= 6; ++step) {
      selector.set_map(step % 2 != 0 ? kSecond : kFirst, {}, stream);
      must(cudaGraphLaunch(replay, stream), "cudaGraphLaunch");
      if (step == 3) route.check(1, "the second map");
    }
    route.check(0, "the last map");
    const std::vector<int64_t> routes = selector.gather_routes();
    me.f.equal_range(std::vector<int64_t>(4, 7 * kTokens), routes, "routes");
    me.meet();
    cudaGraphExecDestroy(replay);
    cudaGraphDestroy(graph);
  });
}

TEST(GpuSlots, MapsDoNotOvertakeCallsOnOtherStreams) {
  on_gpus(2, size_t{1} << 20, [](Station& me) {
    SlotSelector selector(me.group, kFirst);
    Route before(me), after(me);
    me.gate().close(me.stream(0));
    before.select(selector, me.stream(0));
    selector.set_map(kSecond, {}, me.stream(1));  // returns although the gate is closed
    after.select(selector, me.stream(2));
    me.gate().open();
    before.check(0, "before the new map");
    after.check(1, "after the new map");
    me.meet();
  });
}

TEST(GpuSlots, NoNewMapDuringCapture) {
  on_gpus(2, size_t{1} << 20, [](Station& me) {
    SlotSelector selector(me.group, kFirst);
    Route route(me);
    cudaGraph_t graph = nullptr;
    must(cudaStreamBeginCapture(me.stream(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    const Outcome o = outcome_of([&] { selector.set_map(kSecond, {}, me.stream()); });
    must(cudaStreamEndCapture(me.stream(), &graph), "cudaStreamEndCapture");
    cudaGraphDestroy(graph);
    me.f.equal(code_name(switchyard::ErrorCode::invalid_argument), code_name(o.code), "code");
    me.f.check(o.text.find("is being captured") != std::string::npos, o.text);
    route.select(selector, me.stream());
    route.check(0, "the former map");
    me.meet();
  });
}

}  // namespace
}  // namespace harness
