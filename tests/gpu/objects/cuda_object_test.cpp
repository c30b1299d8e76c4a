// SPDX-License-Identifier: Apache-2.0
// Exchange objects on GPUs: stream order, host asynchrony, acceptance cases that concern host memory on the CPU, and misuse.
// cuda_graph_test.cpp covers graphs; cuda_fault_test.cpp covers faults.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <optional>

#include "gpu/harness/object_rig.hpp"
#include "testing/test_access.hpp"

namespace harness {
namespace {

constexpr Layout kLayouts[] = {Layout::rank_major, Layout::expert_major};

/// Each test and entry uses one process for all its worlds and both layouts.
struct Worlds {
  const char* name;
  std::vector<int> all;
  Width width = Width::narrow;
};
std::ostream& operator<<(std::ostream& out, const Worlds& w) { return out << w.name; }
class Objects : public testing::TestWithParam<Worlds> {
 protected:
  /// Runs body(world, layout) for all combinations.
  static void each(const std::function<void(int, Layout)>& body) {
    isolated([&] {
      for (const int world : GetParam().all)
        for (const Layout layout : kLayouts) body(world, layout);
    });
  }
  /// Runs body(world) for all.
  static void each_world(const std::function<void(int)>& body) {
    isolated([&] {
      for (const int world : GetParam().all) body(world);
    });
  }
  static Scenario scenario(const std::string& name, int world, Layout layout, int64_t tokens, uint64_t seed = 1) {
    return with_width(gpu_scenario(name, world, layout, tokens, seed), GetParam().width);
  }
  /// Cases for one object, with different routings and 0 to 20 tokens on each rank.
  static std::vector<std::shared_ptr<const Case>> random_cases(const std::string& name, int world, Layout layout, int count) {
    std::vector<std::shared_ptr<const Case>> cases;
    for (int i = 0; i < count; ++i) {
      Scenario s = scenario(name + " " + std::to_string(i), world, layout, 20, 100 + static_cast<uint64_t>(i));
      for (size_t r = 0; r < s.tokens.size(); ++r) s.tokens[r] = static_cast<int64_t>(oracle::mix(9, s.seed, r) % 21);
      s.drop_percent = i % 4 == 0 ? 20 : 0;
      cases.push_back(make_case(s));
    }
    return cases;
  }
};

const void* row_of(const Case& c, const RankData& data, int64_t token) {
  return static_cast<const std::byte*>(data.x().data) + static_cast<size_t>(token) * row_bytes_of(c);
}

/// A dispatch whose results are compared when all ranks are idle.
struct Open {
  Open(Station& me, const std::shared_ptr<const Case>& c, int repetition = 0)
      : what(c), data(*c, me.rank(), repetition), in(me.upload(*c, data)) {}
  std::shared_ptr<const Case> what;
  RankData data;
  Inputs in;
  Shot shot;
  Handle handle;
};

void check_all(Station& me, std::vector<std::unique_ptr<Open>>& all, bool combined = true) {
  me.meet();
  for (auto& o : all) {
    me.f.set_context(o->what->scenario.name);
    if (o->shot.base) me.check(*o->what, o->data, o->shot, o->handle);
    if (combined) me.check_combined(o->data, o->in);
  }
  me.meet();
}

// --- Streams

/// Consecutive calls on different streams; only the library orders them.
TEST_P(Objects, CallsAlternateBetweenStreams) {
  each([&](int world, Layout layout) {
    const auto cases = random_cases("alternating streams", world, layout, 12);
    const NormalConfig config = config_with_large_pool(*cases[0], 6);
    on_gpus(world, heap_for(config, world), [&](Station& me) {
      NormalExchange exchange(me.group, config);
      std::vector<std::unique_ptr<Open>> all, again;
      for (const auto& c : cases) all.push_back(std::make_unique<Open>(me, c));
      for (const auto& c : cases) again.push_back(std::make_unique<Open>(me, c, 1));
      me.meet();
      for (size_t i = 0; i < cases.size(); ++i) {
        const int n = static_cast<int>(i);
        Open &o = *all[i], &e = *again[i];
        Dispatched d = exchange.dispatch(o.in.x, o.in.ids, o.in.weights, me.dispatch_options(*cases[i], me.stream(n)));
        o.shot = me.shoot(d, me.stream(n));
        o.handle = e.handle = d.handle;
        d.used_by(me.stream(n));
        exchange.combine(d.x, d.handle, o.in.out, me.combine_options(*cases[i], me.stream(n + 1)));
        Dispatched cached = exchange.dispatch(e.in.x, d.handle, me.dispatch_options(*cases[i], me.stream(n + 2)));
        e.shot = me.shoot(cached, me.stream(n + 2));
        cached.used_by(me.stream(n + 2));
        exchange.combine(cached.x, d.handle, e.in.out, me.combine_options(*cases[i], me.stream(n + 2)));
      }
      check_all(me, all);
      check_all(me, again);
    });
  });
}

/// Inputs are written and experts run on the model's stream, calls run on a communication stream, and events order the two
/// streams.
TEST_P(Objects, CommunicationStreamWithUserEvents) {
  each([&](int world, Layout layout) {
    const auto cases = random_cases("communication stream", world, layout, 10);
    const NormalConfig config = config_with_large_pool(*cases[0], 5);
    on_gpus(world, heap_for(config, world), [&](Station& me) {
      NormalExchange exchange(me.group, config);
      const cudaStream_t model = me.stream(0), comm = me.stream(1);
      cudaEvent_t inputs, rows, outputs;
      for (cudaEvent_t* e : {&inputs, &rows, &outputs}) must(cudaEventCreateWithFlags(e, cudaEventDisableTiming), "event");
      std::byte* const x = me.allocate(20 * row_bytes_of(*cases[0]));
      auto* const sink = reinterpret_cast<float*>(me.allocate(4));
      std::vector<std::unique_ptr<Open>> all;
      for (const auto& c : cases) all.push_back(std::make_unique<Open>(me, c));
      me.meet();
      const auto hand_over = [](cudaEvent_t event, cudaStream_t from, cudaStream_t to) {
        must(cudaEventRecord(event, from), "cudaEventRecord");
        must(cudaStreamWaitEvent(to, event, 0), "cudaStreamWaitEvent");
      };
      for (auto& o : all) {
        launch_busy(1, 32, 50000, sink, model);
        launch_copy(x, o->in.x.data, o->in.x_bytes, model);  // the same input buffer for every call
        hand_over(inputs, model, comm);
        switchyard::ConstRows given = o->in.x;
        given.data = x;
        const Dispatched d = exchange.dispatch(given, o->in.ids, o->in.weights, me.dispatch_options(*o->what, comm));
        o->shot = me.shoot(d, comm);
        o->handle = d.handle;
        hand_over(rows, comm, model);
        const switchyard::RowBuffer y = exchange.allocate_rows(d.handle, DType::bf16);
        launch_busy(1, 32, 50000, sink, model);
        launch_copy(y.rows().data, d.x.data, static_cast<size_t>(d.x.rows * d.x.cols) * 2, model);  // the experts
        hand_over(outputs, model, comm);
        exchange.combine(y.rows(), d.handle, o->in.out, me.combine_options(*o->what, comm));
      }
      check_all(me, all);
      for (cudaEvent_t e : {inputs, rows, outputs}) must(cudaEventDestroy(e), "cudaEventDestroy");
    });
  });
}

/// If another stream still reads outputs when they are destroyed, used_by protects their memory from later calls.
TEST_P(Objects, OutputsFreedWhileAnotherStreamReadsThem) {
  each_world([&](int world) {
    const auto cases = random_cases("freed while read", world, Layout::rank_major, 8);
    const NormalConfig config = make_config(*cases[0]);
    on_gpus(world, heap_for(config, world), [&](Station& me) {
      NormalExchange exchange(me.group, config);
      auto* const sink = reinterpret_cast<float*>(me.allocate(4));
      std::vector<std::unique_ptr<Open>> all;
      std::vector<std::byte*> kept;
      std::vector<const void*> places;
      for (const auto& c : cases) all.push_back(std::make_unique<Open>(me, c));
      cudaEvent_t rows;
      must(cudaEventCreateWithFlags(&rows, cudaEventDisableTiming), "event");
      me.meet();
      for (auto& o : all) {
        Dispatched d = exchange.dispatch(o->in.x, o->in.ids, o->in.weights, me.dispatch_options(*o->what, me.stream(0)));
        places.push_back(d.x.data);
        must(cudaEventRecord(rows, me.stream(0)), "cudaEventRecord");
        must(cudaStreamWaitEvent(me.stream(1), rows, 0), "cudaStreamWaitEvent");
        launch_busy(1, 32, 3000000, sink, me.stream(1));  // 3 ms: without used_by the next calls would end long before
        kept.push_back(me.keep(d.x.data, static_cast<size_t>(d.x.rows * d.x.cols) * 2, me.stream(1)));
        d.used_by(me.stream(1));
      }
      me.meet();
      std::sort(places.begin(), places.end());
      me.f.check(std::adjacent_find(places.begin(), places.end()) != places.end(), "no memory was used twice: proves nothing");
      for (size_t i = 0; i < all.size(); ++i) {
        const auto& view = cases[i]->expected.ranks[static_cast<size_t>(me.rank())];
        const size_t bytes = row_bytes_of(*cases[i]);
        std::vector<std::byte> got(static_cast<size_t>(view.rows) * bytes + 1);
        me.read(got.data(), kept[i], static_cast<size_t>(view.rows) * bytes);
        for (int64_t row = 0; row < view.rows; ++row) {
          const oracle::Origin& origin = view.origin[static_cast<size_t>(row)];
          RankData source(*cases[i], origin.source, 0);
          const void* const want = row_of(*cases[i], source, origin.token);
          if (me.f.check(std::memcmp(want, got.data() + static_cast<size_t>(row) * bytes, bytes) == 0,
                         "call " + std::to_string(i) + " row " + std::to_string(row) + " was overwritten"))
            continue;
          break;
        }
      }
      must(cudaEventDestroy(rows), "cudaEventDestroy");
      me.meet();
    });
  });
}

/// All calls with default sizes return while a kernel holds the stream; the host ends that kernel only after the calls have
/// returned.
TEST_P(Objects, CallsReturnWithoutWaitingForTheGpu) {
  each([&](int world, Layout layout) {
    Scenario s = scenario("host never waits", world, layout, 15);
    const auto c = make_case(s);
    const NormalConfig config = config_with_large_pool(*c, 4);
    on_gpus(world, heap_for(config, world), [&](Station& me) {
      NormalExchange exchange(me.group, config);
      Open first(me, c), second(me, c, 1);
      void* const again = me.upload(nullptr, first.in.out_bytes);
      std::byte* const ordinary = me.allocate(static_cast<size_t>(worst_rows(*c)) * row_bytes_of(*c));
      const auto dispatch_options = me.dispatch_options(*c, me.stream());
      const auto combine_options = me.combine_options(*c, me.stream());
      me.meet();
      me.gate().close(me.stream(), 8s);
      {
        const Dispatched d = exchange.dispatch(first.in.x, first.in.ids, first.in.weights, dispatch_options);
        first.shot = me.shoot(d, me.stream());
        first.handle = d.handle;
        const switchyard::RowBuffer y = exchange.allocate_rows(d.handle, DType::bf16);
        launch_copy(y.rows().data, d.x.data, static_cast<size_t>(d.x.rows * d.x.cols) * 2, me.stream());
        exchange.combine(y.rows(), d.handle, first.in.out, combine_options);
        launch_copy(ordinary, d.x.data, static_cast<size_t>(d.x.rows * d.x.cols) * 2, me.stream());
        switchyard::ConstRows plain = d.x;
        plain.data = ordinary;
        exchange.combine(plain, d.handle, again, combine_options);
        const Dispatched e = exchange.dispatch(second.in.x, d.handle, dispatch_options);
        second.shot = me.shoot(e, me.stream());
        second.handle = d.handle;
        exchange.combine(e.x, d.handle, second.in.out, combine_options);
        me.group.check();
      }
      me.f.check(cudaStreamQuery(me.stream()) == cudaErrorNotReady, "a call waited until the stream was released");
      (void)cudaGetLastError();
      me.gate().open();
      me.meet();
      me.f.check(*me.gate().timed_out == 0, "the calls did not return before the kernel gave up");
      me.check(*c, first.data, first.shot, first.handle);
      me.check_combined(first.data, first.in);
      me.check_combined(first.data, first.in, again);
      me.check(*c, second.data, second.shot, second.handle);
      me.check_combined(second.data, second.in);
      me.meet();
    });
  });
}

/// `exact` waits, so its outputs have exactly the size of the rows.
TEST_P(Objects, ExactSizes) {
  each([&](int world, Layout layout) {
    auto cases = random_cases("exact", world, layout, 5);
    for (auto& c : cases) {
      Scenario s = c->scenario;
      s.problem.size = SizePolicy::exact;
      c = make_case(s);
    }
    const NormalConfig config = make_config(*cases[0]);
    on_gpus(world, heap_for(config, world), [&](Station& me) {
      NormalExchange exchange(me.group, config);
      for (const auto& c : cases) {
        me.f.set_context(c->scenario.name);
        me.round(exchange, *c);
      }
    });
  });
}

// --- Acceptance cases that concern host memory on the CPU

TEST_P(Objects, A06_TokensTravelOncePerRank) {
  each_world([&](int world) {
    Scenario s = scenario("A06", world, Layout::expert_major, 50);
    s.problem.experts = 8 * world;
    s.problem.topk = 8;
    s.routing = Routing::one_rank;
    const auto c = make_case(s);
    const uint64_t bytes = 50 * row_bytes_of(*c);
    const NormalConfig config = make_config(*c);
    on_gpus(world, heap_for(config, world), [&](Station& me) {
      NormalExchange exchange(me.group, config);
      me.round(exchange, *c);
      Open o(me, c);
      me.meet();
      const Dispatched d = exchange.dispatch(o.in.x, o.in.ids, o.in.weights, me.dispatch_options(*c, me.stream()));
      me.meet();
      const auto sent = exchange.last_call();
      me.f.equal(uint64_t{50}, sent.payload_rows, "payload rows to one rank");
      me.f.equal(bytes, sent.remote_bytes + sent.local_bytes, "payload bytes to one rank");
      me.f.equal(me.rank() + 1 == world ? bytes : 0, sent.local_bytes, "local payload bytes");
      const int64_t rows = c->expected.ranks[static_cast<size_t>(me.rank())].rows;
      me.f.equal(rows, d.handle.rows(), "rows");
      me.f.check(me.rank() + 1 != world || rows >= 8 * 50 * world, "rows of the one rank");
      me.meet();
      exchange.combine(d.x, d.handle, o.in.out,
                       me.combine_options(*c, me.stream()));  // per_rank: one partial sum returned per token
      me.meet();
      const auto pulled = exchange.last_call();
      me.f.equal(uint64_t{50}, pulled.payload_rows, "partial sums pulled");
      me.f.equal(bytes, pulled.remote_bytes + pulled.local_bytes, "bytes pulled");
      me.meet();
    });
  });
}

/// Kernels detect the overflow, which is reported once to the host of every rank and is not sticky.
TEST_P(Objects, A08_OverflowFailsEverywhereAndIsNotSticky) {
  each([&](int world, Layout layout) {
    for (const bool by_counts : {false, true}) {
      Scenario s = scenario("A08 overflow", world, layout, 16);
      s.problem.alignment = 1;
      s.problem.size = SizePolicy::exact;
      s.capacity_percent = 100;
      const auto c = make_case(s);
      const int overflowing = world / 2;
      const int64_t needed = c->problem.capacity[static_cast<size_t>(overflowing)];
      if (needed == 0) throw std::runtime_error("nothing overflows");
      const NormalConfig config = config_with_large_pool(*c, 2);
      on_gpus(world, heap_for(config, world), [&](Station& me) {
        NormalExchange exchange(me.group, config);
        Open o(me, c);
        for (int attempt = 0; attempt < 3; ++attempt) {
          me.f.set_context("attempt " + std::to_string(attempt));
          DispatchOptions options = me.dispatch_options(*c, me.stream());
          if (me.rank() == overflowing) --options.capacity;
          me.meet();
          const Dispatched d = exchange.dispatch(o.in.x, o.in.ids, o.in.weights, options);
          me.meet();
          const Outcome failed = outcome_of([&] { by_counts ? (void)d.handle.counts() : me.group.check(); });
          me.f.equal(static_cast<int>(ErrorCode::capacity_exceeded), static_cast<int>(failed.code), "code, " + failed.text);
          me.f.check(failed.text.find("rank " + std::to_string(overflowing)) != std::string::npos &&
                         failed.text.find(std::to_string(needed)) != std::string::npos &&
                         failed.text.find(std::to_string(needed - 1)) != std::string::npos,
                     "text: " + failed.text);
          const Outcome again = outcome_of([&] { me.group.check(); });
          me.f.equal(static_cast<int>(ErrorCode::ok), static_cast<int>(again.code), "reported twice: " + again.text);
          me.gather();
          me.round(exchange, *c, attempt);
        }
      });
    }
  });
}

/// Random T, and two live handles: dispatch, dispatch, combine, combine, with the oldest handle first. The epoch wraps around.
TEST_P(Objects, A12_ManyCallsOnOneObject) {
  each([&](int world, Layout layout) {
    const auto cases = random_cases("A12", world, layout, 24);
    NormalConfig config = config_with_large_pool(*cases[0], 2);
    on_gpus(world, heap_for(config, world), [&](Station& me) {
      switchyard::detail::number_calls_from(me.group, (uint64_t{1} << 40) - 5);
      NormalExchange exchange(me.group, config);
      std::vector<std::unique_ptr<Open>> all;
      for (const auto& c : cases) all.push_back(std::make_unique<Open>(me, c));
      me.meet();
      for (size_t i = 0; i < all.size(); i += 2) {
        std::vector<Dispatched> open;
        for (size_t n = i; n < i + 2; ++n) {
          Open& o = *all[n];
          open.push_back(exchange.dispatch(o.in.x, o.in.ids, o.in.weights, me.dispatch_options(*o.what, me.stream())));
          o.shot = me.shoot(open.back(), me.stream());
        }
        for (size_t n = i; n < i + 2; ++n)
          exchange.combine(open[n - i].x, open[n - i].handle, all[n]->in.out, me.combine_options(*all[n]->what, me.stream()));
        me.meet();
        for (size_t n = i; n < i + 2; ++n) {
          me.f.set_context(cases[n]->scenario.name);
          me.check(*cases[n], all[n]->data, all[n]->shot, open[n - i].handle);
          me.check_combined(all[n]->data, all[n]->in);
        }
        me.meet();
      }
    });
  });
}

/// A stale handle describes the routing that created it, regardless of later dispatches. Handles are used in any order,
/// including after a round trip through bytes.
TEST_P(Objects, A13_B11_HandlesAreReusable) {
  each([&](int world, Layout layout) {
    Scenario s = scenario("handles", world, layout, 15);
    const auto first = make_case(s);
    s.seed = 2;
    s.drop_percent = 20;
    for (auto& tokens : s.tokens) tokens = tokens * 2 / 3;
    s.problem.max_tokens = 15;
    const auto second = make_case(s);
    const NormalConfig config = config_with_large_pool(*first, 6);
    on_gpus(world, heap_for(config, world), [&](Station& me) {
      NormalExchange exchange(me.group, config);
      Open a(me, first), b(me, second), a2(me, first, 7), a3(me, first, 8);
      const auto wanted = [&](const Open& o) { return me.dispatch_options(*o.what, me.stream()); };
      const auto combine = [&](Open& o, const Dispatched& d, const Handle& handle, const std::string& step) {
        me.f.set_context("handles: " + step);
        std::vector<std::byte> poison(o.in.out_bytes + 1, std::byte{0xA5});
        void* const out = me.upload(poison.data(), o.in.out_bytes);
        me.meet();
        exchange.combine(d.x, handle, out, me.combine_options(*o.what, me.stream()));
        me.meet();
        me.check_combined(o.data, o.in, out);
        me.meet();
      };
      me.meet();
      const Dispatched da = exchange.dispatch(a.in.x, a.in.ids, a.in.weights, wanted(a));
      const Dispatched db = exchange.dispatch(b.in.x, b.in.ids, b.in.weights, wanted(b));
      a.shot = me.shoot(da, me.stream()), b.shot = me.shoot(db, me.stream());
      me.meet();
      me.check(*first, a.data, a.shot, da.handle);
      me.check(*second, b.data, b.shot, db.handle);
      const auto bytes = da.handle.serialize();
      const Handle from_bytes = Handle::deserialize(bytes);
      me.meet();
      combine(b, db, db.handle, "second first");
      combine(a, da, da.handle, "first later");
      combine(a, da, da.handle, "first again");
      combine(a, da, from_bytes, "first from bytes");
      me.f.set_context("handles: cached");
      const Dispatched d2 = exchange.dispatch(a2.in.x, da.handle, wanted(a));
      a2.shot = me.shoot(d2, me.stream());
      me.meet();
      me.check(*first, a2.data, a2.shot, da.handle);
      me.meet();
      me.f.set_context("handles: cached from bytes");
      const Dispatched d3 = exchange.dispatch(a3.in.x, from_bytes, wanted(a));
      const auto& view = first->expected.ranks[static_cast<size_t>(me.rank())];
      const size_t row = row_bytes_of(*first), rows_bytes = static_cast<size_t>(view.rows) * row;
      const std::byte* const rows = me.keep(d3.x.data, rows_bytes, me.stream());
      me.meet();
      std::vector<std::byte> got(rows_bytes + 1), want(rows_bytes + 1);
      me.read(got.data(), rows, rows_bytes);
      if (layout == Layout::rank_major) {
        for (size_t i = 0; i < view.origin.size(); ++i) {
          RankData source(*first, view.origin[i].source, 8);
          std::memcpy(want.data() + i * row, row_of(*first, source, view.origin[i].token), row);
        }
        me.f.check(got == want, "rows of a cached dispatch from bytes");
      }
      combine(a3, d3, from_bytes, "cached from bytes");
      combine(b, db, db.handle, "second again");
    });
  });
}

/// With small integers, identity experts give exactly (ranks reached) * x, so no oracle is needed.
TEST_P(Objects, B02_ClosedForm) {
  each_world([&](int world) {
    Scenario s = scenario("B02", world, Layout::rank_major, 23);
    s.x_pattern = Pattern::small_integers;
    s.drop_percent = 15;
    s.weights = false;
    const auto c = make_case(s);
    const NormalConfig config = make_config(*c);
    on_gpus(world, heap_for(config, world), [&](Station& me) {
      NormalExchange exchange(me.group, config);
      Open o(me, c);
      me.meet();
      const Dispatched d = exchange.dispatch(o.in.x, o.in.ids, nullptr, me.dispatch_options(*c, me.stream()));
      exchange.combine(d.x, d.handle, o.in.out, me.combine_options(*c, me.stream()));
      me.meet();
      me.read(o.data.out(), o.in.out, o.in.out_bytes);
      const auto& view = c->expected.ranks[static_cast<size_t>(me.rank())];
      for (int64_t t = 0; t < 23; ++t) {
        const auto ranks = static_cast<float>(view.sends[static_cast<size_t>(t)].size());
        for (int64_t column = 0; column < s.hidden; ++column) {
          const float x = oracle::load(DType::bf16, o.data.x().data, t * s.hidden + column);
          if (!me.f.equal(ranks * x, oracle::load(DType::bf16, o.data.out(), t * s.hidden + column), "out")) break;
        }
      }
      me.meet();
    });
  });
}

/// Eight ranks, each with a plan of eight blocks and all multiprocessors of its share, fully occupy one GPU. A kernel that
/// occupied its multiprocessors early would prevent another rank's plan from starting.
TEST(RanksOnAllMultiprocessors, LeaveRoomForEachOthersPlans) {
  isolated([] {
    constexpr int kRanks = 8, kRounds = 6;
    for (const Layout layout : kLayouts) {
      Scenario s = gpu_scenario("all multiprocessors", kRanks, layout, 512);
      s.num_sms = 0;  // the library's choice
      const auto c = make_case(s);
      const NormalConfig config = make_config(*c);
      on_gpus(kRanks, heap_for(config, kRanks), [&](Station& me) {
        NormalExchange exchange(me.group, config);
        for (int i = 0; i < kRounds; ++i) me.round(exchange, *c, i);
      });
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, Objects,
                         testing::Values(Worlds{"W1_W2", {1, 2}}, Worlds{"W4", {4}}, Worlds{"W1_W2_wide", {1, 2}, Width::wide},
                                         Worlds{"W4_wide", {4}, Width::wide}),
                         [](const auto& worlds) { return std::string(worlds.param.name); });

}  // namespace
}  // namespace harness
