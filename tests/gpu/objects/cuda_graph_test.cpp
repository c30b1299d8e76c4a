// SPDX-License-Identifier: Apache-2.0
// Calls captured in CUDA graphs and replayed with different inputs, routings and token counts.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "gpu/harness/object_rig.hpp"

namespace harness {
namespace {

constexpr int64_t kMaxTokens = 14;
constexpr int kVariants = 6;

struct Shape {
  int world;
  Layout layout;
  Width width = Width::narrow;
  int replays = 1000;
};
class Graphs : public testing::TestWithParam<Shape> {};

int64_t max_rows(const Case& c) { return switchyard::max_rows(make_config(c), c.problem.world); }

/// Creates cases with different routings, each with a different T on every rank, from 0 to the maximum.
std::vector<std::shared_ptr<const Case>> make_variants(const Shape& shape) {
  const int world = shape.world;
  std::vector<std::shared_ptr<const Case>> all;
  for (int v = 0; v < kVariants; ++v) {
    Scenario s = gpu_scenario("variant " + std::to_string(v), world, shape.layout, kMaxTokens, 40 + static_cast<uint64_t>(v));
    s.int64_ids = false;
    for (int r = 0; r < world; ++r) {
      auto& tokens = s.tokens[static_cast<size_t>(r)];
      if (v == 1) tokens = r == 0 ? 0 : kMaxTokens;
      if (v > 1) tokens = static_cast<int64_t>(oracle::mix(5, s.seed, static_cast<uint64_t>(r)) % (kMaxTokens + 1));
    }
    s.drop_percent = v == 3 ? 30 : 0;
    all.push_back(make_case(with_width(s, shape.width)));
  }
  return all;
}

/// Inputs of all variants, and the buffers read and written by the captured calls.
struct Buffers {
  Buffers(Station& me, const std::vector<std::shared_ptr<const Case>>& variants) : cases(variants) {
    const auto rows = static_cast<size_t>(kMaxTokens) * row_bytes_of(*variants[0]),
               routes = static_cast<size_t>(kMaxTokens) * 3 * 4;
    delivered = me.allocate(static_cast<size_t>(max_rows(*variants[0])) * row_bytes_of(*variants[0]));
    x = me.allocate(rows), x2 = me.allocate(rows), ids = me.allocate(routes), weights = me.allocate(routes),
    out = me.allocate(rows);
    tokens = reinterpret_cast<int32_t*>(me.allocate(4));
    for (const auto& c : cases) {
      first.push_back(std::make_unique<RankData>(*c, me.rank(), 0));
      second.push_back(std::make_unique<RankData>(*c, me.rank(), 1));
      same_routing.push_back(std::make_unique<RankData>(*cases[0], me.rank(), 100 + static_cast<int>(in.size())));
      in.push_back(me.upload(*c, *first.back()));
      in2.push_back(me.upload(*c, *second.back()));
      in3.push_back(me.upload(*cases[0], *same_routing.back()));
    }
  }
  /// Enqueues the change to variant v. `same`: only the rows of the second dispatch change; the routing stays that of variant
  /// 0.
  void set(size_t v, bool same, cudaStream_t stream) const {
    const Inputs& rows2 = same ? in3[v] : in2[v];
    CopyList list;
    list.add(x, in[v].x.data, in[v].x_bytes);
    list.add(x2, rows2.x.data, rows2.x_bytes);
    list.add(ids, in[v].ids.data, in[v].ids_bytes);
    list.add(weights, in[v].weights, in[v].weights_bytes);
    launch_copies(list, stream);
    launch_set(tokens, static_cast<int32_t>(in[v].ids.num_tokens), stream);
  }
  switchyard::ConstRows rows(const void* data) const { return {data, kMaxTokens, cases[0]->scenario.hidden, DType::bf16}; }
  switchyard::ExpertIds expert_ids() const {
    return switchyard::ExpertIds::of(reinterpret_cast<const int32_t*>(ids), kMaxTokens, 3);
  }

  std::vector<std::shared_ptr<const Case>> cases;
  std::byte *x, *x2, *ids, *weights, *out, *delivered;
  int32_t* tokens;
  std::vector<std::unique_ptr<RankData>> first, second, same_routing;
  std::vector<Inputs> in, in2, in3;
};

enum class Captured { dispatch, cached, dispatch_combine, dispatch_cached_combine, dispatch_to_caller };
constexpr Captured kAllCaptured[] = {Captured::dispatch, Captured::cached, Captured::dispatch_combine,
                                     Captured::dispatch_cached_combine, Captured::dispatch_to_caller};

/// A graph, and the locations of its calls' results. The objects returned by the calls no longer exist.
struct Graph {
  Captured kind;
  Dispatched first, second;  ///< addresses only
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;

  bool has_first() const { return kind != Captured::cached; }
  bool has_second() const { return kind == Captured::cached || kind == Captured::dispatch_cached_combine; }
  bool combines() const { return kind == Captured::dispatch_combine || kind == Captured::dispatch_cached_combine; }
};

Dispatched addresses_of(const Dispatched& d) {
  Dispatched a = d;
  a.block.reset();
  a.handle = Handle();
  return a;
}

/// `eager`: the handle of variant 0, for Captured::cached.
Graph capture(Station& me, NormalExchange& exchange, const Buffers& b, const Case& c, Captured kind, const Handle& eager) {
  Graph g;
  g.kind = kind;
  DispatchOptions o = me.dispatch_options(c, me.stream());
  must(cudaStreamBeginCapture(me.stream(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  {
    Dispatched d, e;
    Handle handle = eager;
    if (g.has_first()) {
      o.device_tokens = b.tokens;
      const switchyard::Rows rows{b.delivered, max_rows(c), c.scenario.hidden, DType::bf16};
      if (kind == Captured::dispatch_to_caller) o.out = &rows;
      d = exchange.dispatch(b.rows(b.x), b.expert_ids(), reinterpret_cast<const float*>(b.weights), o);
      g.first = addresses_of(d);
      handle = d.handle;
      const Outcome counts = outcome_of([&] { (void)d.handle.counts(); });
      me.f.equal(static_cast<int>(ErrorCode::unsupported), static_cast<int>(counts.code),
                 "counts() in capture, " + counts.text);
    }
    o.device_tokens = nullptr;
    o.out = nullptr;
    if (g.has_second()) {
      e = exchange.dispatch(b.rows(b.x2), handle, o);
      g.second = addresses_of(e);
    }
    if (g.combines()) exchange.combine(g.has_second() ? e.x : d.x, handle, b.out, me.combine_options(c, me.stream()));
  }
  must(cudaStreamEndCapture(me.stream(), &g.graph), "cudaStreamEndCapture");
  must(cudaGraphInstantiate(&g.exec, g.graph, 0), "cudaGraphInstantiate");
  must(cudaGraphUpload(g.exec, me.stream()), "cudaGraphUpload");
  return g;
}

/// Results of one replay.
struct Replay {
  const Graph* graph;
  size_t variant;
  Shot first, second;
  std::byte* out = nullptr;
};

Replay replay(Station& me, const Graph& g, const Buffers& b, size_t variant) {
  Replay r{&g, variant, {}, {}, nullptr};
  b.set(variant, !g.has_first(), me.stream());
  must(cudaGraphLaunch(g.exec, me.stream()), "cudaGraphLaunch");
  if (g.has_first()) r.first = me.shoot(g.first, me.stream());
  if (g.has_second()) r.second = me.shoot(g.second, me.stream());
  if (g.combines()) r.out = me.keep(b.out, b.in[variant].out_bytes, me.stream());
  return r;
}

void check_replay(Station& me, const Replay& r, Buffers& b, const std::vector<Handle>& handles) {
  if (r.first.base) me.check(*b.cases[r.variant], *b.first[r.variant], r.first, handles[r.variant]);
  if (r.second.base && r.first.base) me.check(*b.cases[r.variant], *b.second[r.variant], r.second, handles[r.variant]);
  if (r.second.base && !r.first.base) me.check(*b.cases[0], *b.same_routing[r.variant], r.second, handles[0]);
  if (!r.out) return;
  auto& data = r.second.base ? *b.second[r.variant] : *b.first[r.variant];
  me.check_combined(data, b.in[r.variant], r.out);
}

/// Number of row buffers that currently fit into the pool.
int free_buffers_in_pool(NormalExchange& exchange, const Handle& handle) {
  std::vector<switchyard::RowBuffer> all;
  const Outcome full = outcome_of([&] {
    while (all.size() < 10000) all.push_back(exchange.allocate_rows(handle, DType::bf16));
  });
  if (full.code != ErrorCode::pool_exhausted) throw std::runtime_error("the pool was not exhausted: " + full.text);
  return static_cast<int>(all.size());
}

void destroy(Graph& g) {
  must(cudaGraphExecDestroy(g.exec), "cudaGraphExecDestroy");
  must(cudaGraphDestroy(g.graph), "cudaGraphDestroy");
}

/// 1, 2 and 3 calls per graph, up to 1000 replays each, all compared, with an ordinary call in between.
TEST_P(Graphs, ReplayWithOtherInputsAndTokens) {
  const Shape& shape = GetParam();
  const int world = shape.world, replayed = shape.replays;
  const auto cases = make_variants(shape);
  const NormalConfig config = config_with_large_pool(*cases[0], 6);
  isolated([&] {
    for (const Captured kind : kAllCaptured) {
      on_gpus(world, heap_for(config, world), [&](Station& me) {
        NormalExchange exchange(me.group, config);
        Buffers b(me, cases);
        std::vector<Handle> handles;
        for (size_t v = 0; v < cases.size(); ++v) {
          me.meet();
          handles.push_back(
              exchange.dispatch(b.in[v].x, b.in[v].ids, b.in[v].weights, me.dispatch_options(*cases[v], me.stream())).handle);
          me.meet();
          (void)handles.back().rows();
        }
        me.meet();
        const int allocate = free_buffers_in_pool(exchange, handles[0]);
        Graph g = capture(me, exchange, b, *cases[0], kind, handles[0]);
        me.meet();
        me.f.check(free_buffers_in_pool(exchange, handles[0]) < allocate, "the graph holds no memory");
        std::vector<Replay> replays;
        for (int i = 0; i < replayed; ++i) {
          replays.push_back(replay(me, g, b, oracle::mix(3, static_cast<uint64_t>(i)) % cases.size()));
          if (i % 16 == 15) must(cudaStreamSynchronize(me.stream()), "replays");
          if (i == replayed / 2) {
            me.f.set_context("between replays");
            me.round(exchange, *cases[2], 5);
          }
        }
        me.meet();
        for (size_t i = 0; i < replays.size(); ++i) {
          me.f.set_context("kind " + std::to_string(static_cast<int>(kind)) + " replay " + std::to_string(i) + " variant " +
                           std::to_string(replays[i].variant));
          check_replay(me, replays[i], b, handles);
        }
        me.group.check();
        me.meet();
        destroy(g);
        int now = 0;  // a thread of the driver releases user objects
        for (int i = 0; i < 500 && now != allocate; ++i) {
          std::this_thread::sleep_for(10ms);
          now = free_buffers_in_pool(exchange, handles[0]);
        }
        me.f.equal(allocate, now, "room in the pool after the graph is gone");
        me.meet();
      });
    }
  });
}

/// Replays all four graphs of one object in random order.
TEST_P(Graphs, Interleaved) {
  const int world = GetParam().world, replayed = std::min(GetParam().replays, 200);
  const auto cases = make_variants(GetParam());
  const NormalConfig config = config_with_large_pool(*cases[0], 10);
  on_gpus(world, heap_for(config, world), [&](Station& me) {
    NormalExchange exchange(me.group, config);
    Buffers b(me, cases);
    std::vector<Handle> handles;
    for (size_t v = 0; v < cases.size(); ++v) {
      me.meet();
      handles.push_back(
          exchange.dispatch(b.in[v].x, b.in[v].ids, b.in[v].weights, me.dispatch_options(*cases[v], me.stream())).handle);
      me.meet();
      (void)handles.back().rows();
    }
    me.meet();
    std::vector<Graph> graphs;
    for (const Captured kind : kAllCaptured) graphs.push_back(capture(me, exchange, b, *cases[0], kind, handles[0]));
    me.meet();
    std::vector<Replay> replays;
    for (int i = 0; i < replayed; ++i) {
      const uint64_t bits = oracle::mix(4, static_cast<uint64_t>(i));
      const Graph& g = graphs[bits % graphs.size()];
      replays.push_back(replay(me, g, b, bits / 16 % cases.size()));
      if (i % 16 == 15) must(cudaStreamSynchronize(me.stream()), "replays");
    }
    me.meet();
    for (size_t i = 0; i < replays.size(); ++i) {
      me.f.set_context("interleaved replay " + std::to_string(i) + " of kind " +
                       std::to_string(static_cast<int>(replays[i].graph->kind)));
      check_replay(me, replays[i], b, handles);
    }
    me.meet();
    for (Graph& g : graphs) destroy(g);
    me.meet();
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, Graphs,
                         testing::Values(Shape{1, Layout::expert_major}, Shape{2, Layout::rank_major},
                                         Shape{4, Layout::expert_major}, Shape{2, Layout::rank_major, Width::wide, 150},
                                         Shape{4, Layout::expert_major, Width::wide, 150}),
                         [](const auto& shape) {
                           return "W" + std::to_string(shape.param.world) +
                                  (shape.param.layout == Layout::rank_major ? "_rank_major" : "_expert_major") +
                                  suffix_of(shape.param.width);
                         });

// --- Rows that are fp8, or are quantized to it, in a graph

struct RowForm {
  const char* name;
  DType type;
  ScaleKind given, made;
};
std::ostream& operator<<(std::ostream& out, const RowForm& f) { return out << f.name; }
class GraphsOfFp8 : public testing::TestWithParam<RowForm> {};

/// A dispatch and a cached dispatch in a graph, replayed with different rows; every row and scale is compared.
void replay_rows(Station& me, const std::shared_ptr<const Case>& c, const NormalConfig& config) {
  constexpr int kTurns = 25;
  NormalExchange exchange(me.group, config);
  std::vector<std::unique_ptr<RankData>> data;
  std::vector<Inputs> in;
  for (int i = 0; i < 2 * kTurns + 1; ++i) {
    data.push_back(std::make_unique<RankData>(*c, me.rank(), i));
    in.push_back(me.upload(*c, *data.back()));
  }
  const Inputs& any = in.back();
  const size_t scale_bytes = kMaxTokens * switchyard::scale_row_bytes(c->scenario.hidden, c->scenario.x_scales);
  std::byte* const rows[2] = {me.allocate(any.x_bytes), me.allocate(any.x_bytes)};
  std::byte* const scales[2] = {me.allocate(scale_bytes + 1), me.allocate(scale_bytes + 1)};
  switchyard::ConstRows x[2] = {any.x, any.x};
  for (size_t n = 0; n < 2; ++n) {
    x[n].data = rows[n];
    if (x[n].scales) x[n].scales = scales[n];
  }
  const DispatchOptions options = me.dispatch_options(*c, me.stream());
  me.meet();
  const Handle eager = exchange.dispatch(any.x, any.ids, any.weights, options).handle;
  me.meet();
  (void)eager.rows();
  me.meet();
  Graph g;
  must(cudaStreamBeginCapture(me.stream(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  {
    const Dispatched d = exchange.dispatch(x[0], any.ids, any.weights, options);
    g.first = addresses_of(d);
    g.second = addresses_of(exchange.dispatch(x[1], d.handle, options));
  }
  must(cudaStreamEndCapture(me.stream(), &g.graph), "cudaStreamEndCapture");
  must(cudaGraphInstantiate(&g.exec, g.graph, 0), "cudaGraphInstantiate");
  must(cudaGraphUpload(g.exec, me.stream()), "cudaGraphUpload");
  std::vector<Shot> shots;
  me.meet();
  for (size_t i = 0; i < 2 * kTurns; i += 2) {
    CopyList list;
    for (size_t n = 0; n < 2; ++n) {
      list.add(rows[n], in[i + n].x.data, in[i + n].x_bytes);
      if (x[n].scales) list.add(scales[n], in[i + n].x.scales, scale_bytes);
    }
    launch_copies(list, me.stream());
    must(cudaGraphLaunch(g.exec, me.stream()), "cudaGraphLaunch");
    shots.push_back(me.shoot(g.first, me.stream()));
    shots.push_back(me.shoot(g.second, me.stream()));
  }
  me.meet();
  for (size_t i = 0; i < shots.size(); ++i) {
    me.f.set_context(c->scenario.name + ", dispatch " + std::to_string(i));
    me.check(*c, *data[i], shots[i], eager);
  }
  me.group.check();
  me.meet();
  destroy(g);
  me.meet();
}

TEST_P(GraphsOfFp8, ReplayWithOtherRows) {
  constexpr int kWorld = 2;
  isolated([&] {
    for (const Layout layout : {Layout::rank_major, Layout::expert_major}) {
      for (const Staging staging : {Staging::direct, Staging::ring}) {
        const std::string name = std::string(layout == Layout::rank_major ? "rank_major" : "expert_major") +
                                 (staging == Staging::direct ? ", direct" : ", ring");
        Scenario s = gpu_scenario(name, kWorld, layout, kMaxTokens, 61);
        s.x_type = GetParam().type, s.x_scales = GetParam().given, s.quantize = GetParam().made;
        s.identity = false;
        s.hidden = 272;  // two groups and part of a third
        s.staging = staging;
        s.ring = {3, 2, 4};
        const auto c = make_case(s);
        const NormalConfig config = config_with_large_pool(*c, 4);
        on_gpus(kWorld, heap_for(config, kWorld), [&](Station& me) { replay_rows(me, c, config); });
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, GraphsOfFp8,
                         testing::Values(RowForm{"given_f32", DType::fp8_e4m3, ScaleKind::f32, ScaleKind::none},
                                         RowForm{"given_ue8m0", DType::fp8_e4m3, ScaleKind::ue8m0, ScaleKind::none},
                                         RowForm{"made_f32", DType::bf16, ScaleKind::none, ScaleKind::f32},
                                         RowForm{"made_ue8m0", DType::bf16, ScaleKind::none, ScaleKind::ue8m0}),
                         [](const auto& form) { return std::string(form.param.name); });

/// Exact sizes cause a typed error; the capture and the stream stay valid.
TEST(GraphCapture, ExactSizesAreRefused) {
  const auto c = make_case(gpu_scenario("exact in capture", 2, Layout::rank_major, 9));
  const NormalConfig config = make_config(*c);
  isolated([&] {
    on_gpus(2, heap_for(config, 2), [&](Station& me) {
      NormalExchange exchange(me.group, config);
      RankData data(*c, me.rank(), 0);
      const Inputs in = me.upload(*c, data);
      auto* const word = reinterpret_cast<int32_t*>(me.allocate(4));
      me.meet();
      DispatchOptions o = me.dispatch_options(*c, me.stream());
      o.size = SizePolicy::exact;
      must(cudaStreamBeginCapture(me.stream(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
      launch_set(word, 41, me.stream());
      const Outcome refused = outcome_of([&] { (void)exchange.dispatch(in.x, in.ids, in.weights, o); });
      launch_set(word, 42, me.stream());
      cudaGraph_t graph = nullptr;
      must(cudaStreamEndCapture(me.stream(), &graph), "cudaStreamEndCapture after the error");
      const bool announced = refused.code == ErrorCode::peer_failed && refused.reason == ErrorCode::unsupported;
      me.f.check(refused.code == ErrorCode::unsupported || announced, "code, " + refused.text);
      cudaGraphExec_t exec = nullptr;
      must(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
      must(cudaGraphLaunch(exec, me.stream()), "cudaGraphLaunch");
      me.meet();
      int32_t got = 0;
      me.read(&got, word, 4);
      me.f.equal(42, got, "what the graph wrote");
      must(cudaGraphExecDestroy(exec), "cudaGraphExecDestroy");
      must(cudaGraphDestroy(graph), "cudaGraphDestroy");
      me.gather();
    });
    on_gpus(2, heap_for(config, 2), [&](Station& me) {
      NormalExchange exchange(me.group, config);
      me.round(exchange, *c);
    });
  });
}

/// Memory read by a captured combine is not reused while the graph exists, even if the caller has released it.
TEST(GraphCapture, RowsThatCombineReadsBelongToTheGraph) {
  const auto c = make_case(gpu_scenario("rows of a graph", 2, Layout::expert_major, kMaxTokens, 77));
  const NormalConfig config = config_with_large_pool(*c, 4);
  isolated([&] {
    on_gpus(2, heap_for(config, 2), [&](Station& me) {
      NormalExchange exchange(me.group, config);
      RankData data(*c, me.rank(), 0);
      const Inputs in = me.upload(*c, data);
      std::byte* const out = me.allocate(in.out_bytes);
      me.meet();
      Dispatched d = exchange.dispatch(in.x, in.ids, in.weights, me.dispatch_options(*c, me.stream()));
      const Handle handle = d.handle;
      me.meet();
      std::vector<std::byte*> read = {static_cast<std::byte*>(d.x.data)};
      cudaGraph_t graph = nullptr;
      must(cudaStreamBeginCapture(me.stream(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
      {
        const switchyard::RowBuffer buffer = exchange.allocate_rows(handle, DType::bf16);
        read.push_back(static_cast<std::byte*>(buffer.rows().data));
        exchange.combine(buffer.rows(), handle, out, me.combine_options(*c, me.stream()));
        exchange.combine(d.x, handle, out, me.combine_options(*c, me.stream()));
      }
      must(cudaStreamEndCapture(me.stream(), &graph), "cudaStreamEndCapture");
      d = Dispatched();
      const auto in_use = [&] {
        std::vector<switchyard::RowBuffer> all;
        (void)outcome_of([&] {
          while (all.size() < 10000) all.push_back(exchange.allocate_rows(handle, DType::bf16));
        });
        return std::count_if(read.begin(), read.end(), [&](const std::byte* rows) {
          return std::none_of(all.begin(), all.end(), [&](const switchyard::RowBuffer& other) {
            const auto* first = static_cast<const std::byte*>(other.rows().data);
            return rows >= first && rows < first + static_cast<size_t>(other.rows().rows) * row_bytes_of(*c);
          });
        });
      };
      me.f.equal(2, static_cast<int>(in_use()), "blocks of the graph");
      must(cudaGraphDestroy(graph), "cudaGraphDestroy");
      auto left = in_use();
      for (int i = 0; i < 500 && left != 0; ++i) {  // a thread of the driver releases user objects
        std::this_thread::sleep_for(10ms);
        left = in_use();
      }
      me.f.equal(0, static_cast<int>(left), "blocks of a graph that is gone");
      me.meet();
    });
  });
}

}  // namespace
}  // namespace harness
