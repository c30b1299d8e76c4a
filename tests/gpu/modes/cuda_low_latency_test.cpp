// SPDX-License-Identifier: Apache-2.0
// Thousands of queued low-latency calls on GPUs, including in graphs. Kernels between the calls create their inputs and judge
// their results in closed form (modes/low_latency/streamed_calls.hpp), so only streams and the calls' own flags keep the ranks
// in step.
//
// SWITCHYARD_QUEUED_CALLS: the number of calls for each number of ranks (default: 4000). SWITCHYARD_SEED: the seed of the first
// object.
#include <algorithm>
#include <thread>

#include "gpu/harness/captured_calls.hpp"

namespace harness {
namespace {

using switchyard::LowLatencyExchange;

/// Runs each case with `calls` calls on a separate object.
void expect_all_exact(int world, const std::vector<StreamedCase>& cases, uint64_t calls, std::chrono::milliseconds limit) {
  size_t heap = 0;
  for (const StreamedCase& c : cases) heap = std::max(heap, LowLatencyExchange::heap_bytes(c.config(), world));
  isolated(
      [&] {
        for (size_t i = 0; i < cases.size(); ++i) {
          on_gpus(world, heap, [&, i](Station& me) {
            const StreamedCase& c = cases[i];
            me.f.set_context("object " + std::to_string(i));
            LowLatencyExchange exchange = c.make(me.group);
            StationRig rig(me);
            Calls streamed(rig, exchange, c);
            me.meet();
            streamed.run(1, calls);
            expect_verdict(me, streamed, streamed.judged(), c.form.experts >= world);
          });
        }
      },
      limit);
}

class QueuedCalls : public testing::TestWithParam<int> {};

TEST_P(QueuedCalls, OfRandomShapes) {
  constexpr uint64_t kCallsOfObject = 500;
  const uint64_t wanted = from_environment("SWITCHYARD_QUEUED_CALLS", 4000), seed = from_environment("SWITCHYARD_SEED", 1);
  std::vector<StreamedCase> cases;
  for (uint64_t i = 0; i * kCallsOfObject < wanted; ++i) cases.push_back(draw_case(seed + i, GetParam()));
  expect_all_exact(GetParam(), cases, kCallsOfObject, std::chrono::milliseconds(60000 + 10 * wanted));
  std::printf("%llu calls of %d ranks from seed %llu\n", static_cast<unsigned long long>(cases.size() * kCallsOfObject),
              GetParam(), static_cast<unsigned long long>(seed));
}

/// A typical decoding shape: 7168 columns, 8 of many experts.
StreamedCase decode_case(int world, ScaleKind scales) {
  StreamedCase c;
  Form& f = c.form;
  f.seed = 77 + static_cast<uint64_t>(scales);
  f.world = world;
  f.experts = 4 * world;
  f.topk = 8;
  f.max_tokens = 16;
  f.hidden = 7168;
  f.scales = scales;
  return c;
}

TEST_P(QueuedCalls, OfTheUsualShape) {
  expect_all_exact(GetParam(), {decode_case(GetParam(), ScaleKind::f32), decode_case(GetParam(), ScaleKind::none)}, 300, 60s);
}

TEST_P(QueuedCalls, DispatchesOnly) {
  StreamedCase c = draw_case(5, GetParam()), d = decode_case(GetParam(), ScaleKind::f32);
  c.plan = d.plan = {.lanes = 2, .dispatch_only = true, .max_pause_ns = 100'000};
  expect_all_exact(GetParam(), {c, d}, 400, 60s);
}

TEST_P(QueuedCalls, OneRankTenMillisecondsLate) {
  StreamedCase c = draw_case(3, GetParam());
  c.plan = {.lanes = 2, .slow_rank = GetParam() - 1, .slow_ns = 10'000'000};
  expect_all_exact(GetParam(), {c}, 400, 60s);
}

/// C1: 100 dispatches and 100 combines with the shape of this case, on the multiprocessors chosen by the library, and on ranks
/// that are occasionally late and not kept in step by any host.
TEST_P(QueuedCalls, C01_AtItsOwnShape) {
  std::vector<StreamedCase> cases;
  for (const int max : {8, 64, 128}) {
    StreamedCase c = decode_case(GetParam(), ScaleKind::f32);
    c.form.experts = 256;
    c.form.max_tokens = max;
    c.plan = {.slow_rank = GetParam() / 2, .slow_ns = 1'000'000, .max_pause_ns = 300'000};
    cases.push_back(c);
  }
  expect_all_exact(GetParam(), cases, 200, 120s);
}

INSTANTIATE_TEST_SUITE_P(Gpu, QueuedCalls, testing::Values(1, 2, 4, 8),
                         [](const auto& w) { return "W" + std::to_string(w.param); });

/// Two objects that fit on the GPU together, each with consecutive calls on a separate stream. Every other rank enqueues them
/// in the opposite order: neither object may prevent the other from beginning.
TEST_P(QueuedCalls, OfTwoObjectsInOppositeOrder) {
  const int world = GetParam();
  StreamedCase c = decode_case(world, ScaleKind::none);
  const size_t heap = 2 * LowLatencyExchange::heap_bytes(c.config(), world);
  on_gpus(world, heap, [&](Station& me) {
    StreamedCase first = c, second = c;
    first.plan.num_sms = second.plan.num_sms = half_of_a_rank(world);
    second.plan.first_stream = 1;
    LowLatencyExchange one = first.make(me.group), two = second.make(me.group);
    StationRig rig(me);
    Calls x(rig, one, first), y(rig, two, second);
    me.meet();
    for (uint64_t n = 1; n <= 60; ++n) {
      for (int turn = 0; turn < 2; ++turn) {
        Calls& calls = (turn + me.rank()) % 2 == 0 ? x : y;
        calls.pair({n}, calls.lane(0), 0, {});
        rig.pace(calls.lane(0).stream);
      }
    }
    expect_verdict(me, x, x.judged(), true);
    expect_verdict(me, y, y.judged(), true);
  });
}

/// Identical stream handles that denote different streams. Two default streams for each of 8 ranks, in addition to the
/// station's streams, would exceed the GPU's queues.
class CallsOfThreads : public testing::TestWithParam<int> {};

TEST_P(CallsOfThreads, OnTheirOwnDefaultStreams) {
  StreamedCase c = decode_case(GetParam(), ScaleKind::f32);
  c.plan.lanes = 2;
  on_gpus(GetParam(), LowLatencyExchange::heap_bytes(c.config(), GetParam()), [&](Station& me) {
    LowLatencyExchange exchange = c.make(me.group);
    StationRig rig(me);
    Calls streamed(rig, exchange, c);
    for (size_t i = 0; i < 2; ++i) streamed.lane(i).stream = cudaStreamPerThread;
    me.meet();
    for (uint64_t n = 1; n < 20; n += 2) {
      if (me.rank() == 0) rig.pause(2'000'000, cudaStreamPerThread);
      streamed.dispatch({n}, streamed.lane(0), 0, {});
      std::thread other([&] {
        must(cudaSetDevice(me.device()), "cudaSetDevice");
        streamed.dispatch({n + 1}, streamed.lane(1), 0, {});
        must(cudaStreamSynchronize(cudaStreamPerThread), "cudaStreamSynchronize");
      });
      other.join();
      must(cudaStreamSynchronize(cudaStreamPerThread), "cudaStreamSynchronize");
    }
    expect_verdict(me, streamed, streamed.judged(), true);
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, CallsOfThreads, testing::Values(1, 2, 4),
                         [](const auto& w) { return "W" + std::to_string(w.param); });

// --- Graphs

class LowLatencyGraphs : public testing::TestWithParam<int> {};

/// Enqueues the `size` calls of a graph, numbered from `number`.
void enqueue_calls(Calls& streamed, int size, const StreamedCase& c, CallNumber number, bool split) {
  auto& lane = streamed.lane(0);
  const auto next = [&] { return CallNumber{number.first++, number.replays, number.per_replay}; };
  const Calls::Choices first{split, true, false, false}, second{split, true, true, false, true};
  if (size == 2 && !split && c.form.scales == ScaleKind::none) return streamed.pair(next(), lane, 0, second);
  streamed.dispatch(next(), lane, 0, first);
  if (size == 3 && has_all_to_all(c.form)) streamed.all_to_all(next(), lane, first);
  if (size == 3 && !has_all_to_all(c.form)) streamed.dispatch(next(), lane, 1, second);
  if (size > 1) streamed.combine(next(), lane, 0, size == 2 ? second : first);
}

/// Graphs with 1, 2 and 3 calls, replayed 1000 times with a different T, routing and rows each time, and with ordinary calls in
/// between.
TEST_P(LowLatencyGraphs, ReplayWithOtherInputsAndTokens) {
  constexpr uint64_t kReplays = 1000;
  const int world = GetParam();
  std::vector<StreamedCase> cases = {decode_case(world, ScaleKind::f32), decode_case(world, ScaleKind::none),
                                     draw_case(11, world)};
  cases[0].form.hidden = cases[1].form.hidden = 1024;
  for (StreamedCase& c : cases) c.plan = {};
  size_t heap = 0;
  for (const StreamedCase& c : cases) heap = std::max(heap, LowLatencyExchange::heap_bytes(c.config(), world));
  isolated(
      [&] {
        for (size_t i = 0; i < cases.size() * 6; ++i) {
          const StreamedCase& c = cases[i / 6];
          const int size = 1 + static_cast<int>(i % 3);
          const bool split = i / 3 % 2 == 1;
          on_gpus(world, heap, [&](Station& me) {
            me.f.set_context("case " + std::to_string(i / 6) + ", graph of " + std::to_string(size) + (split ? " split" : "") +
                             " calls");
            LowLatencyExchange exchange = c.make(me.group);
            StationRig rig(me);
            Calls streamed(rig, exchange, c);
            const CapturedCalls graph(me, rig, [&](uint64_t* replays) {
              enqueue_calls(streamed, size, c, {1'000'000, replays, static_cast<uint64_t>(size)}, split);
            });
            const uint64_t captured = streamed.judged();
            for (uint64_t replay = 0; replay < kReplays; ++replay) {
              const uint64_t mine = c.form.draw(102, replay, me.rank());
              if (mine % 16 == 0) rig.pause(mine / 16 % 200'000, me.stream());
              graph.launch();
              if (replay != kReplays / 2) continue;
              streamed.forget();
              streamed.run(1, 20);
            }
            expect_verdict(me, streamed, streamed.judged() - captured + captured * kReplays, c.form.experts >= world);
          });
        }
      },
      240s);
}

/// A dispatch directly followed by a combine, replayed. The library may use dependent launches if a rank has a GPU to itself
/// and leaves the multiprocessor count to the library or requests all multiprocessors; otherwise the launches are ordinary.
TEST_P(LowLatencyGraphs, OfDependentLaunches) {
  constexpr uint64_t kReplays = 500;
  const int world = GetParam();
  isolated(
      [&] {
        int devices = 0, all = 0;
        must(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
        must(cudaDeviceGetAttribute(&all, cudaDevAttrMultiProcessorCount, 0), "device attribute");
        const bool alone = world <= devices;
        for (const int sms : {0, alone ? all : 0, half_of_a_rank(world)}) {
          StreamedCase c = decode_case(world, ScaleKind::none);
          c.plan = {.num_sms = sms};
          const size_t expected = alone && (sms == 0 || sms == all) ? 2 : 0;  // after the inputs, after the dispatch
          on_gpus(world, LowLatencyExchange::heap_bytes(c.config(), world), [&](Station& me) {
            me.f.set_context(std::to_string(sms) + " multiprocessors");
            LowLatencyExchange exchange = c.make(me.group);
            StationRig rig(me);
            Calls streamed(rig, exchange, c);
            const CapturedCalls graph(me, rig, [&](uint64_t* replays) {
              streamed.pair({1'000'000, replays, 1}, streamed.lane(0), 0, {});
            });
            me.f.equal(expected, dependent_launches(graph.graph()), "dependent launches");
            for (uint64_t replay = 0; replay < kReplays; ++replay) {
              graph.launch();
            }
            expect_verdict(me, streamed, streamed.judged() * kReplays, true);
          });
        }
      },
      120s);
}

/// Three consecutive whole exchanges, replayed and then enqueued one by one: where the library may allow that, each begins
/// before the previous one ends.
TEST_P(LowLatencyGraphs, OfWholeExchangesInARow) {
  constexpr uint64_t kReplays = 500, kRounds = 200;
  constexpr int kCalls = 3;
  const int world = GetParam();
  isolated(
      [&] {
        int devices = 0;
        must(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
        for (const bool small : {true, false}) {
          for (const int sms : {0, half_of_a_rank(world)}) {
            StreamedCase c = decode_case(world, ScaleKind::none);
            if (small) c.form.max_tokens = 2, c.form.hidden = 256;
            c.plan = {.lanes = kCalls, .num_sms = sms};
            const size_t expected = world <= devices && sms == 0 ? kCalls : 0;  // after inputs and all but the last exchange
            on_gpus(world, LowLatencyExchange::heap_bytes(c.config(), world), [&](Station& me) {
              me.f.set_context(std::to_string(sms) + " multiprocessors" + (small ? ", small" : ""));
              LowLatencyExchange exchange = c.make(me.group);
              StationRig rig(me);
              Calls streamed(rig, exchange, c);
              const CapturedCalls graph(me, rig, [&](uint64_t* replays) {
                streamed.all_to_all_of_lanes({1'000'000, replays, kCalls}, {});
              });
              me.f.equal(expected, dependent_launches(graph.graph()), "dependent launches");
              for (uint64_t replay = 0; replay < kReplays; ++replay) {
                graph.launch();
              }
              for (uint64_t round = 0; round < kRounds; ++round) {
                const uint64_t mine = c.form.draw(103, round, me.rank());
                if (mine % 16 == 0) rig.pause(mine / 16 % 100'000, me.stream());
                streamed.all_to_all_of_lanes({1 + kCalls * round}, {});
                rig.pace(me.stream(), 3 * kCalls);
              }
              expect_verdict(me, streamed, kCalls * (kReplays + kRounds), true);
            });
          }
        }
      },
      240s);
}

/// After sleep, the data sent by one half, like everything else, is available to the other half.
TEST_P(LowLatencyGraphs, NapsBetweenCallsAndHalves) {
  StreamedCase c = decode_case(GetParam(), ScaleKind::f32);
  c.plan = {};
  c.first_epoch = (uint64_t{1} << 40) - 4;
  on_gpus(GetParam(), LowLatencyExchange::heap_bytes(c.config(), GetParam()), [&](Station& me) {
    LowLatencyExchange exchange = c.make(me.group);
    StationRig rig(me);
    Calls streamed(rig, exchange, c);
    const auto nap = [&] {
      me.meet();
      me.group.sleep();
      me.gather();
      me.group.wake();
      me.meet();
    };
    me.meet();
    for (uint64_t n = 1; n < 9; n += 2) {
      const bool split = n % 4 == 1;
      streamed.between = nap;
      streamed.dispatch({n}, streamed.lane(0), 0, {split, true, false, false});
      if (!split) nap();
      streamed.combine({n + 1}, streamed.lane(0), 0, {split, true, n > 4, false});
    }
    expect_verdict(me, streamed, streamed.judged(), true);
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, LowLatencyGraphs, testing::Values(1, 2, 4, 8),
                         [](const auto& w) { return "W" + std::to_string(w.param); });

}  // namespace
}  // namespace harness
