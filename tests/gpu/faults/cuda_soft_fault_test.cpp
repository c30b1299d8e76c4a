// SPDX-License-Identifier: Apache-2.0
// Faults that leave a CUDA group usable: calls enqueued after a dispatch that moved nothing, on ranks that have detected this
// and on ranks that have not; errors from other libraries; call halves that a capture would separate; and the multiprocessor
// budget.
#include <algorithm>
#include <cstdlib>
#include <optional>

#include "gpu/harness/gpu_ranks.hpp"
#include "gpu/harness/object_rig.hpp"
#include "switchyard/low_latency.hpp"

namespace harness {
namespace {

using switchyard::CombineOrder;
using switchyard::Overflow;
using switchyard::RowBuffer;
using switchyard::Staging;

struct Variant {
  const char* name;
  int world;
  Layout layout;
  CombineOrder order;
  Staging staging;
  Width width;
};

Scenario scenario_of(const Variant& v) {
  Scenario s = with_width(gpu_scenario(v.name, v.world, v.layout, 20), v.width);
  s.order = v.order;
  s.staging = v.staging;
  s.ring = {3, 2, 4};
  return s;
}

void expect_usable(Station& me) {
  me.f.check(cudaDeviceSynchronize() == cudaSuccess, "the context failed");
  const Outcome o = outcome_of([&] { me.group.check(); });
  me.f.equal(static_cast<int>(ErrorCode::ok), static_cast<int>(o.code), "nothing is left to report, " + o.text);
}

class GpuSoftFaults : public testing::TestWithParam<Variant> {};

/// A rank's object, with valid arguments.
struct Calls {
  Calls(Station& station, const std::shared_ptr<const Case>& given, const NormalConfig& config)
      : me(station),
        c(given),
        exchange(station.group, config),
        data(*given, station.rank(), 0),
        in(station.upload(*given, data)),
        options(station.dispatch_options(*given, station.stream())),
        sum(station.combine_options(*given, station.stream())) {}
  Dispatched dispatch(const DispatchOptions& o) { return exchange.dispatch(in.x, in.ids, in.weights, o); }
  Dispatched cached(const Handle& handle) { return exchange.dispatch(in.x, handle, options); }
  void combine(const Dispatched& d, const Handle& handle) { exchange.combine(d.x, handle, in.out, sum); }
  /// Makes all calls that use a dispatch with these options, without host synchronization in between.
  void layer(const DispatchOptions& o) {
    const Dispatched d = dispatch(o);
    combine(d, d.handle);
    combine(cached(d.handle), d.handle);
  }
  /// Fills the memory used by the next dispatch with leftovers from an earlier call.
  void leave(int junk) {
    const Dispatched d = dispatch(options);
    const RowBuffer all = exchange.allocate_rows(d.handle, DType::bf16, me.stream());
    must(cudaMemsetAsync(all.rows().data, junk, static_cast<size_t>(all.rows().rows) * row_bytes_of(*c), me.stream()),
         "memset");
  }
  /// Runs a layer as a graph that is replayed once.
  void replay_once() {
    DispatchOptions o = options;
    o.size = SizePolicy::worst_case;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    me.meet();
    must(cudaStreamBeginCapture(me.stream(), cudaStreamCaptureModeThreadLocal), "capture");
    {
      const Dispatched d = dispatch(o);
      combine(d, d.handle);
    }
    must(cudaStreamEndCapture(me.stream(), &graph), "capture");
    must(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
    must(cudaGraphUpload(exec, me.stream()), "cudaGraphUpload");
    me.meet();
    must(cudaGraphLaunch(exec, me.stream()), "cudaGraphLaunch");
    me.meet();
    must(cudaGraphExecDestroy(exec), "cudaGraphExecDestroy");
    must(cudaGraphDestroy(graph), "cudaGraphDestroy");
  }
  /// Row buffers that fill this rank's pool.
  std::vector<RowBuffer> fill(const Handle& handle) {
    std::vector<RowBuffer> all;
    (void)outcome_of([&] {
      while (true) all.push_back(exchange.allocate_rows(handle, DType::bf16));
    });
    return all;
  }

  Station& me;
  std::shared_ptr<const Case> c;
  NormalExchange exchange;
  RankData data;
  Inputs in;
  DispatchOptions options;
  CombineOptions sum;
};

/// A dispatch that is too large for a rank's capacity, followed by all calls that use its handle before any host can detect the
/// error.
TEST_P(GpuSoftFaults, CallsBehindAnOverflowDoNothing) {
  Scenario s = scenario_of(GetParam());
  s.capacity_percent = 100;
  s.problem.overflow = Overflow::fail;
  s.problem.size = SizePolicy::exact;
  const auto c = make_case(s);
  const int world = GetParam().world;
  const NormalConfig config = config_with_large_pool(*c, 3);
  on_gpus(world, heap_for(config, world), [&](Station& me) {
    Calls calls(me, c, config);
    DispatchOptions tight = calls.options;
    tight.size = SizePolicy::capacity;
    tight.capacity = std::max<int64_t>(c->problem.capacity[static_cast<size_t>(me.rank())] - 1, 0);
    for (const int junk : {0x3F, 0x7F}) {
      me.f.set_context("junk " + std::to_string(junk));
      calls.leave(junk);
      me.meet();
      must(cudaMemsetAsync(calls.in.out, 0xA5, calls.in.out_bytes, me.stream()), "memset");
      const Outcome enqueued = outcome_of([&] { calls.layer(tight); });
      me.f.equal(static_cast<int>(ErrorCode::ok), static_cast<int>(enqueued.code), "enqueued: " + enqueued.text);
      me.meet();
      const Outcome o = outcome_of([&] { me.group.check(); });
      me.f.equal(static_cast<int>(ErrorCode::capacity_exceeded), static_cast<int>(o.code), o.text);
      expect_usable(me);
      std::vector<uint8_t> out(calls.in.out_bytes);
      me.read(out.data(), calls.in.out, out.size());
      me.f.check(std::all_of(out.begin(), out.end(), [](uint8_t b) { return b == 0xA5; }), "out was written");
      me.gather();
      me.round(calls.exchange, *c, junk);
    }
  });
}

/// `enqueued`: the outcome of a rank's calls, one of which found no room on rank `poor`.
void expect_exhausted(Station& me, int poor, const Outcome& enqueued) {
  const ErrorCode at_once = me.rank() == poor ? ErrorCode::pool_exhausted : ErrorCode::ok;
  me.f.equal(static_cast<int>(at_once), static_cast<int>(enqueued.code), "enqueued: " + enqueued.text);
  me.meet();
  if (me.rank() != poor) {
    const Outcome o = outcome_of([&] { me.group.check(); });
    me.f.equal(static_cast<int>(ErrorCode::pool_exhausted), static_cast<int>(o.code), o.text);
    me.f.check(o.text.find("rank " + std::to_string(poor)) != std::string::npos, "text: " + o.text);
  }
  expect_usable(me);
  me.gather();
}

/// One rank has no room and throws at once. The others go on to enqueue the rest of this layer and the following layers; this
/// rank makes none of these calls. The others receive the error from check(), and no error is sticky.
TEST_P(GpuSoftFaults, OneRankWithoutRoom) {
  const auto c = make_case(scenario_of(GetParam()));
  const int world = GetParam().world, poor = world - 1;
  const NormalConfig config = config_with_large_pool(*c, 2);
  on_gpus(world, heap_for(config, world), [&](Station& me) {
    Calls calls(me, c, config);
    me.meet();
    for (int attempt = 0; attempt < 2; ++attempt) {
      me.f.set_context("attempt " + std::to_string(attempt));
      {
        std::vector<RowBuffer> full;
        {
          const Dispatched d = calls.dispatch(calls.options);
          me.meet();
          if (me.rank() == poor) full = calls.fill(d.handle);
        }
        expect_exhausted(me, poor, outcome_of([&] {
                           for (int layer = 0; layer < 4; ++layer) calls.layer(calls.options);
                         }));
      }
      me.round(calls.exchange, *c, attempt);
      me.f.set_context("cached, attempt " + std::to_string(attempt));
      std::optional<Dispatched> d = calls.dispatch(calls.options);
      const Handle handle = d->handle;
      me.meet();
      std::vector<RowBuffer> full;
      if (me.rank() == poor) full = calls.fill(handle);
      expect_exhausted(me, poor, outcome_of([&] {
                         calls.combine(calls.cached(handle), handle);
                         (void)calls.dispatch(calls.options);
                       }));
      full.clear();
      d.reset();
      calls.combine(calls.cached(handle), handle);  // now there is room
      me.meet();
      me.check_combined(calls.data, calls.in);
      expect_usable(me);
      me.meet();
    }
    me.f.set_context("the first graph, captured after all that");
    must(cudaMemsetAsync(calls.in.out, 0, calls.in.out_bytes, me.stream()), "memset");
    calls.replay_once();
    me.check_combined(calls.data, calls.in);
    expect_usable(me);
    me.meet();
  });
}

constexpr auto kRank = CombineOrder::per_rank, kRoute = CombineOrder::per_route;
constexpr auto kDirect = Staging::direct, kRing = Staging::ring;
constexpr auto kNarrow = Width::narrow, kWide = Width::wide;
INSTANTIATE_TEST_SUITE_P(Gpu, GpuSoftFaults,
                         testing::Values(Variant{"rank_major", 3, Layout::rank_major, kRank, kDirect, kNarrow},
                                         Variant{"expert_major", 3, Layout::expert_major, kRank, kDirect, kNarrow},
                                         Variant{"per_route", 3, Layout::expert_major, kRoute, kDirect, kNarrow},
                                         Variant{"rings", 2, Layout::rank_major, kRank, kRing, kNarrow},
                                         Variant{"expert_rings", 2, Layout::expert_major, kRank, kRing, kNarrow},
                                         Variant{"wide_expert_major", 2, Layout::expert_major, kRank, kDirect, kWide},
                                         Variant{"wide_per_route", 2, Layout::expert_major, kRoute, kDirect, kWide}),
                         [](const auto& variant) { return std::string(variant.param.name); });

/// A pending error from the application's own CUDA calls neither causes a call to fail nor is lost.
TEST(GpuForeignErrors, AreLeftAlone) {
  const auto c = make_case(gpu_scenario("foreign", 2, Layout::rank_major, 20));
  const NormalConfig config = config_with_large_pool(*c, 3);
  on_gpus(2, heap_for(config, 2), [&](Station& me) {
    NormalExchange exchange(me.group, config);
    RankData data(*c, me.rank(), 0);
    const Inputs in = me.upload(*c, data);
    me.meet();
    const auto fail = [] { (void)cudaSetDevice(12345); };
    const Outcome o = outcome_of([&] {
      for (int i = 0; i < 3; ++i) {
        fail();
        const Dispatched d = exchange.dispatch(in.x, in.ids, in.weights, me.dispatch_options(*c, me.stream()));
        fail();
        const RowBuffer y = exchange.allocate_rows(d.handle, DType::bf16, me.stream(1));
        exchange.combine(d.x, d.handle, in.out, me.combine_options(*c, me.stream()));
      }
    });
    me.f.equal(static_cast<int>(cudaErrorInvalidDevice), static_cast<int>(cudaGetLastError()), "the application's error");
    me.f.equal(static_cast<int>(ErrorCode::ok), static_cast<int>(o.code), "calls: " + o.text);
    me.meet();
    me.check_combined(data, in);
    me.meet();
  });
}

/// An invalid stream, or a stream of another GPU, causes an error that says so. The peers also receive the error.
TEST(GpuForeignErrors, StreamsOfOtherGpusReachThePeers) {
  if (switchyard::test::count_gpus() < 2) GTEST_SKIP() << "needs two GPUs";
  const auto c = make_case(gpu_scenario("streams", 2, Layout::rank_major, 20));
  const NormalConfig config = config_with_large_pool(*c, 3);
  on_gpus(2, heap_for(config, 2), [&](Station& me) {
    cudaStream_t elsewhere = nullptr;
    must(cudaSetDevice((me.device() + 1) % 2), "cudaSetDevice");
    must(cudaStreamCreateWithFlags(&elsewhere, cudaStreamNonBlocking), "cudaStreamCreate");
    must(cudaSetDevice(me.device()), "cudaSetDevice");
    NormalExchange exchange(me.group, config);
    RankData data(*c, me.rank(), 0);
    const Inputs in = me.upload(*c, data);
    me.meet();
    Outcome o = outcome_of([&] {
      const Dispatched d =
          exchange.dispatch(in.x, in.ids, in.weights, me.dispatch_options(*c, me.rank() == 1 ? elsewhere : me.stream()));
    });
    me.gather();
    must(cudaStreamSynchronize(me.stream()), "sync");
    if (o.code == ErrorCode::ok) o = outcome_of([&] { me.group.check(); });
    const ErrorCode wanted = me.rank() == 1 ? ErrorCode::invalid_argument : ErrorCode::peer_failed;
    me.f.equal(static_cast<int>(wanted), static_cast<int>(o.code), o.text);
    me.gather();
  });
}

// ---- halves and captures ----

struct LowLatencyBuffers {
  explicit LowLatencyBuffers(Station& me) {
    std::vector<uint16_t> ones(kTokens * kHidden, 0x3F80);
    std::vector<int32_t> experts(kTokens * kTopk);
    for (size_t i = 0; i < experts.size(); ++i) experts[i] = static_cast<int32_t>(i * 3 % kExperts);
    x = {me.upload(ones.data(), ones.size() * 2), kTokens, kHidden, DType::bf16};
    ids = switchyard::ExpertIds::of(static_cast<const int32_t*>(me.upload(experts.data(), experts.size() * 4)), kTokens, kTopk);
    out = me.allocate(ones.size() * 2);
  }
  static switchyard::LowLatencyConfig config() {
    switchyard::LowLatencyConfig c;
    c.hidden = kHidden;
    c.num_experts = kExperts;
    c.topk = kTopk;
    c.max_tokens = kTokens;
    c.scales = ScaleKind::none;
    return c;
  }
  /// Experts return their rows unweighted, so each token's sum is the number of its experts.
  void check(Station& me) const {
    std::vector<uint16_t> got(kTokens * kHidden);
    me.read(got.data(), out, got.size() * 2);
    me.f.check(std::all_of(got.begin(), got.end(), [](uint16_t v) { return v == 0x4000; }), "sums of combine");
  }
  static constexpr size_t kTokens = 6, kHidden = 64;
  static constexpr int kExperts = 8, kTopk = 2;
  switchyard::ConstRows x;
  switchyard::ExpertIds ids;
  std::byte* out;
};

/// If one half of a call were captured and the other were not, replays would send one call repeatedly.
TEST(GpuHalves, AreNotTornApartByACapture) {
  for (const bool sent_in_capture : {true, false}) {
    const auto config = LowLatencyBuffers::config();
    on_gpus(1, switchyard::LowLatencyExchange::heap_bytes(config, 1), [&](Station& me) {
      switchyard::LowLatencyExchange exchange(me.group, config);
      auto output = exchange.make_output();
      const LowLatencyBuffers b(me);
      switchyard::LowLatencyDispatchOptions options;
      options.stream = me.stream();
      me.meet();
      cudaGraph_t graph = nullptr;
      const auto begin = [&] { must(cudaStreamBeginCapture(me.stream(), cudaStreamCaptureModeThreadLocal), "capture"); };
      const auto end = [&] { must(cudaStreamEndCapture(me.stream(), &graph), "capture"); };
      if (sent_in_capture) begin();
      const auto hook = exchange.dispatch_send(b.x, b.ids, output, options);
      if (sent_in_capture)
        end();
      else
        begin();
      const Outcome o = outcome_of([&] { hook(); });
      if (!sent_in_capture) end();
      me.f.equal(static_cast<int>(ErrorCode::invalid_argument), static_cast<int>(o.code), o.text);
      me.f.check(o.text.find("captur") != std::string::npos, "text: " + o.text);
    });
  }
}

/// The outputs and rows of a captured low-latency call belong to its graph.
TEST(GpuHalves, GraphsHoldWhatTheirCallsFill) {
  const auto config = LowLatencyBuffers::config();
  on_gpus(2, switchyard::LowLatencyExchange::heap_bytes(config, 2), [&](Station& me) {
    switchyard::LowLatencyExchange exchange(me.group, config);
    const LowLatencyBuffers b(me);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    {
      auto output = exchange.make_output();
      const auto rows = exchange.make_rows(DType::bf16);
      me.meet();
      switchyard::LowLatencyDispatchOptions send;
      switchyard::LowLatencyCombineOptions sum;
      send.stream = sum.stream = me.stream();
      send.num_sms = sum.num_sms = half_of_a_rank(2);
      must(cudaStreamBeginCapture(me.stream(), cudaStreamCaptureModeThreadLocal), "capture");
      exchange.dispatch(b.x, b.ids, output, send);
      launch_copy(rows.data, output.x.data, static_cast<size_t>(output.x.rows) * LowLatencyBuffers::kHidden * 2, me.stream());
      exchange.combine(rows, output, b.out, sum);
      must(cudaStreamEndCapture(me.stream(), &graph), "capture");
      must(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
      must(cudaGraphUpload(exec, me.stream()), "cudaGraphUpload");
    }
    std::vector<switchyard::LowLatencyOutput> others;  // would take released memory
    std::vector<switchyard::LowLatencyRows> more;
    for (int i = 0; i < 3; ++i) {
      others.push_back(exchange.make_output());
      more.push_back(exchange.make_rows(DType::bf16));
      must(cudaMemsetAsync(more.back().data, 0xFF, static_cast<size_t>(more.back().rows) * LowLatencyBuffers::kHidden * 2,
                           me.stream()),
           "memset");
    }
    me.meet();
    for (int i = 0; i < 3; ++i) {
      must(cudaGraphLaunch(exec, me.stream()), "cudaGraphLaunch");
      for (const auto& rows : more)
        must(cudaMemsetAsync(rows.data, 0xFF, static_cast<size_t>(rows.rows) * LowLatencyBuffers::kHidden * 2, me.stream()),
             "memset");
    }
    me.meet();
    b.check(me);
    me.group.check();
    me.meet();
    must(cudaGraphExecDestroy(exec), "cudaGraphExecDestroy");
    must(cudaGraphDestroy(graph), "cudaGraphDestroy");
    me.meet();
  });
}

/// Returns the grids of the kernels that `call` enqueues on the station's first stream. The kernels do not run.
template <class Call>
std::vector<unsigned> grids_of(Station& me, Call&& call) {
  cudaGraph_t graph = nullptr;
  must(cudaStreamBeginCapture(me.stream(), cudaStreamCaptureModeThreadLocal), "capture");
  call();
  must(cudaStreamEndCapture(me.stream(), &graph), "capture");
  size_t count = 0;
  must(cudaGraphGetNodes(graph, nullptr, &count), "nodes");
  std::vector<cudaGraphNode_t> nodes(count);
  must(cudaGraphGetNodes(graph, nodes.data(), &count), "nodes");
  std::vector<unsigned> grids;
  for (const cudaGraphNode_t node : nodes) {
    cudaKernelNodeParams p{};
    must(cudaGraphKernelNodeGetParams(node, &p), "parameters");
    grids.push_back(p.gridDim.x);
  }
  must(cudaGraphDestroy(graph), "cudaGraphDestroy");
  return grids;
}

/// No call uses more multiprocessors than the group's budget: defaults respect it, and larger requests are errors.
TEST(GpuBudget, HoldsInEveryMode) {
  isolated([] {
    ::setenv("SWITCHYARD_NUM_SMS", "6", 1);
    const auto c = make_case(gpu_scenario("budget", 1, Layout::rank_major, 20));
    const NormalConfig config = config_with_large_pool(*c, 3);
    const auto low = LowLatencyBuffers::config();
    const size_t heap = heap_for(config, 1) + switchyard::LowLatencyExchange::heap_bytes(low, 1);
    on_gpus(1, heap, [&](Station& me) {
      me.f.equal(6, me.group.options().num_sms, "GroupOptions::num_sms");
      Calls calls(me, c, config);
      switchyard::LowLatencyExchange decode(me.group, low);
      auto output = decode.make_output();
      const LowLatencyBuffers b(me);
      calls.options.num_sms = calls.sum.num_sms = 0;
      switchyard::LowLatencyDispatchOptions send;
      switchyard::LowLatencyCombineOptions back;
      switchyard::AllToAllOptions flat;
      send.stream = back.stream = flat.stream = me.stream();
      me.meet();
      const std::vector<unsigned> grids = grids_of(me, [&] {
        calls.layer(calls.options);
        decode.dispatch(b.x, b.ids, output, send);
        decode.combine(output.x, output, b.out, back);
        decode.moe_all_to_all(b.x, b.ids, b.out, flat);
      });
      me.f.check(grids.size() >= 8, "kernels of seven calls");
      for (const unsigned grid : grids) me.f.check(grid <= 6, "a grid of " + std::to_string(grid));
      calls.options.num_sms = 7;
      const Outcome more = outcome_of([&] { (void)calls.dispatch(calls.options); });
      me.f.equal(static_cast<int>(ErrorCode::invalid_argument), static_cast<int>(more.code), more.text);
    });
  });
}

}  // namespace
}  // namespace harness
