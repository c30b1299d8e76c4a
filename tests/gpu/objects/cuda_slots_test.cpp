// SPDX-License-Identifier: Apache-2.0
// SlotSelector in graphs and on several streams. The slots themselves: tests/modes/slots.
#include "gpu/harness/object_rig.hpp"
#include "harness/outcome.hpp"
#include "switchyard/expert_map.hpp"
#include "switchyard/low_latency.hpp"

namespace harness {
namespace {

using switchyard::ExpertIds;
using switchyard::ExpertMap;
using switchyard::LowLatencyConfig;
using switchyard::LowLatencyDispatchOptions;
using switchyard::LowLatencyExchange;
using switchyard::LowLatencyOutput;
using switchyard::RouteCounter;
using switchyard::SlotArray;
using switchyard::SlotSelector;
using switchyard::SlotWeights;

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
    RouteCounter counter(me.group, kFirst.num_slots());
    Route route(me);
    const cudaStream_t stream = me.stream();
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t replay = nullptr;
    must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    route.select(selector, stream);
    counter.count(ExpertIds::of(route.out, kTokens, kTopk), stream);
    must(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    must(cudaGraphInstantiate(&replay, graph, 0), "cudaGraphInstantiate");
    must(cudaGraphUpload(replay, stream), "cudaGraphUpload");
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
    const switchyard::RouteLoad load = counter.load(&selector);
    me.f.equal_range(routes, load.of_expert, "routes of all replays, after gather_routes");
    me.f.equal_range(std::vector<int64_t>(2, 14 * kTokens), load.of_rank, "routes to each rank");
    me.meet();
    cudaGraphExecDestroy(replay);
    cudaGraphDestroy(graph);
  });
}

/// Low-latency dispatches that select slots. Each rank sends `kFew` tokens with the ids 0, 1.
struct SelectingDispatch {
  static constexpr int kFew = 24, kHidden = 256;

  static LowLatencyConfig config() {
    LowLatencyConfig c;
    c.hidden = kHidden;
    c.num_experts = kFirst.num_slots();
    c.topk = kTopk;
    c.max_tokens = kFew;
    c.scales = switchyard::ScaleKind::none;
    return c;
  }
  static size_t heap_bytes() { return LowLatencyExchange::heap_bytes(config(), 2) + (size_t{1} << 20); }

  explicit SelectingDispatch(Station& station) : me(station), exchange(me.group, config()), output(exchange.make_output()) {
    std::vector<int32_t> ids(kFew * kTopk);
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i % 2);
    const std::vector<uint16_t> rows(kFew * kHidden, 0x3f80);
    in = static_cast<int32_t*>(me.upload(ids.data(), ids.size() * sizeof ids[0]));
    x = me.upload(rows.data(), rows.size() * sizeof rows[0]);
  }
  void dispatch(SlotSelector& selector, cudaStream_t stream) { dispatch(&selector, stream, false); }
  void dispatch(SlotSelector* selector, cudaStream_t stream, bool in_halves) {
    LowLatencyDispatchOptions o;
    o.selector = selector;
    o.stream = stream;
    o.num_sms = 8;
    const switchyard::ConstRows rows{x, kFew, kHidden, switchyard::DType::bf16};
    const ExpertIds ids = ExpertIds::of(in, kFew, kTopk);
    if (in_halves)
      exchange.dispatch_send(rows, ids, output, o)();
    else
      exchange.dispatch(rows, ids, output, o);
  }
  /// Waits for all streams. Slot `used` of the rank's two slots has the rows of both ranks; the other one has none.
  void check(int used, const char* when) {
    me.synchronize();
    std::vector<int32_t> rows(2), expected(2, 0);
    me.read(rows.data(), output.rows_of_expert, 8);
    expected[static_cast<size_t>(used)] = 2 * kFew;
    me.f.equal_range(expected, rows, when);
  }

  Station& me;
  LowLatencyExchange exchange;
  LowLatencyOutput output;
  int32_t* in = nullptr;
  void* x = nullptr;
};

TEST(GpuSlots, ReplaysOfSelectingDispatchesUseTheMapInForce) {
  on_gpus(2, SelectingDispatch::heap_bytes(), [](Station& me) {
    SlotSelector selector(me.group, kFirst);
    SelectingDispatch calls(me);
    const cudaStream_t stream = me.stream();
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t replay = nullptr;
    must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    calls.dispatch(selector, stream);
    must(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    must(cudaGraphInstantiate(&replay, graph, 0), "cudaGraphInstantiate");
    must(cudaGraphUpload(replay, stream), "cudaGraphUpload");
    me.meet();  // all graphs are uploaded before a kernel waits
    must(cudaGraphLaunch(replay, stream), "cudaGraphLaunch");
    calls.check(0, "the first map");
    for (int step = 1; step <= 6; ++step) {
      selector.set_map(step % 2 != 0 ? kSecond : kFirst, {}, stream);
      must(cudaGraphLaunch(replay, stream), "cudaGraphLaunch");
      if (step == 3) calls.check(1, "the second map");
    }
    calls.check(0, "the last map");
    me.f.equal_range(std::vector<int64_t>(4, 7 * SelectingDispatch::kFew), selector.gather_routes(), "routes");
    me.meet();
    cudaGraphExecDestroy(replay);
    cudaGraphDestroy(graph);
  });
}

enum class Made { whole, in_halves, replayed };

/// A dispatch, or a replay of one that was captured outside of step().
class Attempt {
 public:
  Attempt(Station& station, Made how, SelectingDispatch& of, SlotSelector* selector)
      : me(station), made(how), calls(of), given(selector) {
    if (made != Made::replayed) return;
    must(cudaStreamBeginCapture(me.stream(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    calls.dispatch(given, me.stream(), false);
    must(cudaStreamEndCapture(me.stream(), &graph), "cudaStreamEndCapture");
    must(cudaGraphInstantiate(&replay, graph, 0), "cudaGraphInstantiate");
    must(cudaGraphUpload(replay, me.stream()), "cudaGraphUpload");
  }
  Attempt(const Attempt&) = delete;
  Attempt& operator=(const Attempt&) = delete;
  ~Attempt() {
    if (graph == nullptr) return;
    cudaGraphExecDestroy(replay);
    cudaGraphDestroy(graph);
  }
  /// Enqueues the call. The hook of a split call may raise the error.
  void step() {
    end = outcome_of([&] {
      if (made == Made::replayed)
        must(cudaGraphLaunch(replay, me.stream()), "cudaGraphLaunch");
      else
        calls.dispatch(given, me.stream(), made == Made::in_halves);
    });
  }
  /// Waits for the call, which must have failed on both ranks with a text that contains the parts. \returns the text
  std::string expect_mismatch(const std::vector<std::string>& parts) {
    me.meet();
    if (end.code == ErrorCode::ok) end = outcome_of([&] { me.group.check(); });
    me.f.equal(code_name(ErrorCode::mismatch), code_name(end.code), "code, " + end.text);
    for (const std::string& part : parts)
      me.f.check(end.text.find(part) != std::string::npos, "'" + end.text + "' does not contain '" + part + "'");
    me.gather();
    return end.text;
  }

 private:
  Station& me;
  Made made;
  SelectingDispatch& calls;
  SlotSelector* given;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  Outcome end;
};

/// Only rank `selecting` passes a selector: both ranks find that in the call itself.
void select_on_one_rank(Station& me, Made made, int selecting) {
  me.f.set_context("case " + std::to_string(static_cast<int>(made)) + ", rank " + std::to_string(selecting) + " selects");
  SlotSelector selector(me.group, kFirst);
  SelectingDispatch calls(me);
  calls.dispatch(&selector, me.stream(), made == Made::in_halves);
  calls.check(0, "both ranks select");
  me.meet();
  Attempt attempt(me, made, calls, me.rank() == selecting ? &selector : nullptr);
  me.meet();
  attempt.step();
  attempt.expect_mismatch({"LowLatencyDispatchOptions::selector = ", "given on rank " + std::to_string(selecting),
                           "null on rank " + std::to_string(1 - selecting)});
}

/// The versions that the calls use differ: in replays, rank `late` sets the next map after its call, the other rank before it;
/// otherwise, the other rank passes a selector with a later version.
void use_two_versions(Station& me, Made made, int late) {
  me.f.set_context("case " + std::to_string(static_cast<int>(made)) + ", rank " + std::to_string(late) + " is late");
  SlotSelector selector(me.group, kFirst);
  SelectingDispatch calls(me);
  Attempt attempt(me, made, calls, &selector);
  me.meet();
  attempt.step();
  calls.check(0, "the first map");
  me.meet();
  selector.set_map(kSecond, {}, me.stream());
  attempt.step();
  calls.check(1, "the second map");
  SlotSelector later(me.group, kFirst);
  for (const ExpertMap& map : {kSecond, kFirst}) later.set_map(map, {}, me.stream());
  me.meet();
  const bool replays = made == Made::replayed;
  Attempt apart(me, replays ? Made::whole : made, calls, me.rank() == late ? &selector : &later);
  if (replays && me.rank() != late) selector.set_map(kFirst, {}, me.stream());
  Attempt& last = replays ? attempt : apart;
  last.step();
  if (replays && me.rank() == late) (void)outcome_of([&] { selector.set_map(kFirst, {}, me.stream()); });
  const std::string text = last.expect_mismatch({});
  const int later_by = replays ? 1 : 1 + 3;  // the next version, or the next selector with this version
  me.f.equal(late == 0 ? later_by : 8 - later_by, map_difference(text, "LowLatencyDispatchOptions::selector"), text);
}

TEST(GpuSlots, SelectorsOfSomeRanksAreFound) {
  isolated([] {
    for (const Made made : {Made::whole, Made::in_halves, Made::replayed})
      for (const int selecting : {0, 1})
        on_gpus(2, SelectingDispatch::heap_bytes(), 20s, [&](Station& me) { select_on_one_rank(me, made, selecting); });
  });
}

TEST(GpuSlots, VersionsThatDifferAreFound) {
  isolated([] {
    for (const Made made : {Made::whole, Made::in_halves, Made::replayed})
      for (const int late : {0, 1})
        on_gpus(2, SelectingDispatch::heap_bytes(), 20s, [&](Station& me) { use_two_versions(me, made, late); });
  });
}

TEST(GpuSlots, MapsDoNotOvertakeSelectingDispatchesOnOtherStreams) {
  on_gpus(2, SelectingDispatch::heap_bytes(), [](Station& me) {
    SlotSelector selector(me.group, kFirst);
    SelectingDispatch calls(me);
    me.gate().close(me.stream(0));
    calls.dispatch(selector, me.stream(0));
    selector.set_map(kSecond, {}, me.stream(1));  // returns although the gate is closed
    me.gate().open();
    calls.check(0, "before the new map");
    me.meet();
    calls.dispatch(selector, me.stream(2));
    calls.check(1, "after the new map");
    me.meet();
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

/// The copies complete although a stream with enqueued calls is blocked; later work is ordered after them.
TEST(GpuSlots, WeightsMoveBesideCalls) {
  on_gpus(2, SelectingDispatch::heap_bytes(), [](Station& me) {
    const ExpertMap from{2, 2, 2, {0, -1, 1, -1}}, to{2, 2, 2, {0, 1, 1, 0}};
    constexpr size_t kBytes = 4096;
    std::vector<uint8_t> mine(2 * kBytes, static_cast<uint8_t>(10 + me.group.rank())), found(mine.size());
    auto* const slots = static_cast<std::byte*>(me.upload(mine.data(), mine.size()));
    SlotSelector selector(me.group, from);
    SlotWeights moving(me.group, 2, std::vector<SlotArray>{{slots, kBytes}}, {size_t{1} << 20, me.stream(2)});
    SelectingDispatch calls(me);
    me.gate().close(me.stream(0));
    calls.dispatch(selector, me.stream(0));
    me.f.equal(int64_t{kBytes}, moving.move(me.group, from, to, me.stream(1)), "bytes received");
    must(cudaStreamSynchronize(me.stream(2)), "cudaStreamSynchronize");  // although the gate is closed
    me.f.check(moving.ready(), "the copies have not completed");
    me.f.check(cudaStreamQuery(me.stream(0)) == cudaErrorNotReady, "the gate was open");
    (void)cudaGetLastError();
    me.gate().open();
    calls.check(0, "the map in force during the copies");
    moving.wait(me.stream(1));
    selector.set_map(to, {}, me.stream(1));
    std::fill(mine.begin() + kBytes, mine.end(), static_cast<uint8_t>(11 - me.group.rank()));
    me.read(found.data(), slots, found.size());
    me.f.equal_range(mine, found, "slots");
    me.f.check(moving.ready_event() != nullptr, "no event");
    cudaGraph_t graph = nullptr;
    must(cudaStreamBeginCapture(me.stream(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    const Outcome moved = outcome_of([&] { moving.move(me.group, to, to, me.stream()); });
    const Outcome waited = outcome_of([&] { moving.wait(me.stream()); });
    must(cudaStreamEndCapture(me.stream(), &graph), "cudaStreamEndCapture");
    cudaGraphDestroy(graph);
    for (const Outcome& o : {moved, waited}) {
      me.f.equal(code_name(ErrorCode::invalid_argument), code_name(o.code), "code");
      me.f.check(o.text.find("is being captured") != std::string::npos, o.text);
    }
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
