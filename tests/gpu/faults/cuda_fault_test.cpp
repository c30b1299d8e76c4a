// SPDX-License-Identifier: Apache-2.0
// Faults on GPUs: ranks that never call, are later than the deadline, abort or are killed; the errors and delays of the other
// ranks; and the usability of the GPU afterwards. cuda_soak_test.cpp runs a soak without faults.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <tuple>

#include "gpu/faults/fault_checks.hpp"
#include "gpu/harness/killed_rank.hpp"
#include "gpu/harness/object_rig.hpp"

namespace harness {
namespace {

using Clock = std::chrono::steady_clock;
using switchyard::to_string;

/// A new group works on the same GPUs in the same process.
void round_of_new_group(int world, const std::shared_ptr<const Case>& c) {
  const NormalConfig config = make_config(*c);
  on_gpus(world, heap_for(config, world), [&](Station& me) {
    me.f.set_context("a new group afterwards");
    NormalExchange exchange(me.group, config);
    me.round(exchange, *c);
  });
}

/// Rank r uses GPU r modulo the number of GPUs.
bool shares_its_gpu(const Station& me) {
  int gpus = 0;
  must(cudaGetDeviceCount(&gpus), "cudaGetDeviceCount");
  return me.rank() >= gpus || me.rank() + gpus < me.world();
}

// --- A rank that never enqueues

enum class Missing { dispatch, cached, combine };
struct Silence {
  Missing what;
  MissingRank report;
};
std::ostream& operator<<(std::ostream& out, const Silence& s) { return out << s.report.operation; }
class SilentGpuRank : public testing::TestWithParam<std::tuple<Silence, Width>> {};

TEST_P(SilentGpuRank, OthersReportItInFull) {
  const auto& [s, width] = GetParam();
  constexpr int kWorld = 3, kSilent = 1;
  const Layout layout = width == Width::wide ? Layout::expert_major : Layout::rank_major;
  const auto c = make_case(with_width(gpu_scenario("silent rank", kWorld, layout, 10), width));
  const NormalConfig config = config_with_large_pool(*c, 2);
  isolated([&] {
    on_gpus(kWorld, heap_for(config, kWorld), 1s, [&](Station& me) {
      NormalExchange exchange(me.group, config);
      RankData data(*c, me.rank(), 0);
      const Inputs in = me.upload(*c, data);
      const auto options = me.dispatch_options(*c, me.stream());
      me.meet();
      Dispatched d, last;
      const bool silent = me.rank() == kSilent;
      if (s.what != Missing::dispatch || !silent) d = exchange.dispatch(in.x, in.ids, in.weights, options);
      if (s.what != Missing::dispatch) me.meet();
      if (s.what == Missing::cached && !silent) last = exchange.dispatch(in.x, d.handle, options);
      if (s.what == Missing::combine && !silent) exchange.combine(d.x, d.handle, in.out, me.combine_options(*c, me.stream()));
      me.meet();
      if (!silent) {
        const bool by_counts = s.what == Missing::dispatch && me.rank() == 2;
        const Outcome o = outcome_of([&] { by_counts ? (void)d.handle.counts() : me.group.check(); });
        expect_report(me, o, s.report, kSilent);
        me.f.check((o.text.find("CUDA_DEVICE_MAX_CONNECTIONS") != std::string::npos) == shares_its_gpu(me), o.text);
        me.f.equal(kSilent, slowest(me.group), "slowest rank by wait_statistics");
      }
      me.gather();
      const Outcome later = outcome_of([&] { (void)exchange.dispatch(in.x, in.ids, in.weights, options); });
      expect_sticky(me, later);
      if (silent)
        me.f.equal(static_cast<int>(ErrorCode::peer_timeout), static_cast<int>(later.reason), "reason, " + shown(later));
      expect_context_works(me);
      me.gather();
    });
    round_of_new_group(kWorld, c);
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, SilentGpuRank,
                         testing::Combine(testing::Values(Silence{Missing::dispatch, {"dispatch", "counts", 1}},
                                                          Silence{Missing::cached, {"cached dispatch", "placement", 2}},
                                                          Silence{Missing::combine, {"combine", "placement", 2}}),
                                          testing::Values(Width::narrow, Width::wide)),
                         [](const auto& p) {
                           std::string name = std::get<0>(p.param).report.operation;
                           std::replace(name.begin(), name.end(), ' ', '_');
                           return name + suffix_of(std::get<1>(p.param));
                         });

// --- A rank that is later than the deadline

class LateGpuRank : public testing::TestWithParam<std::tuple<bool, Width>> {};

/// When the deadline passes, 100 calls are queued on every rank; together they take about one deadline. The late rank finds
/// that all these calls have failed, and its host receives the error although no other host has checked yet.
TEST_P(LateGpuRank, HundredQueuedCallsCostOneDeadline) {
  const auto [in_graph, width] = GetParam();
  constexpr int kWorld = 3, kLate = 2, kCalls = 100;
  constexpr auto kDeadline = 1s, kDelay = 3s, kSlack = 2s;
  const Layout layout = width == Width::wide ? Layout::expert_major : Layout::rank_major;
  const auto c = make_case(with_width(gpu_scenario("late rank", kWorld, layout, 10), width));
  const NormalConfig config = config_with_large_pool(*c, 2);
  isolated([&] {
    on_gpus(kWorld, heap_for(config, kWorld), kDeadline, [&](Station& me) {
      NormalExchange exchange(me.group, config);
      RankData data(*c, me.rank(), 0);
      const Inputs in = me.upload(*c, data);
      const auto options = me.dispatch_options(*c, me.stream());
      auto* const sink = reinterpret_cast<float*>(me.allocate(4));
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t exec = nullptr;
      if (in_graph) {
        must(cudaStreamBeginCapture(me.stream(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
        (void)exchange.dispatch(in.x, in.ids, in.weights, options);
        must(cudaStreamEndCapture(me.stream(), &graph), "cudaStreamEndCapture");
        must(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
        must(cudaGraphUpload(exec, me.stream()), "cudaGraphUpload");
      }
      me.meet();
      if (me.rank() == kLate)
        launch_busy(1, 32, static_cast<uint64_t>(std::chrono::nanoseconds(kDelay).count()), sink, me.stream());
      const auto start = Clock::now();
      int queued = 0;
      const Outcome refused = outcome_of([&] {
        for (; queued < kCalls; ++queued) {
          if (in_graph) {
            must(cudaGraphLaunch(exec, me.stream()), "cudaGraphLaunch");
          } else {
            (void)exchange.dispatch(in.x, in.ids, in.weights, options);
          }
        }
      });
      me.f.equal(kCalls, queued, "calls queued, " + shown(refused));
      me.synchronize();
      const Clock::duration took = Clock::now() - start;
      me.f.check(took < kDeadline + kSlack + (me.rank() == kLate ? kDelay : 0s),
                 "the queued calls took " + std::to_string(took / 1ms) + " ms");
      expect_late_arrival(me, kLate);
      if (me.rank() != kLate) me.f.equal(kLate, slowest(me.group), "slowest rank by wait_statistics");
      expect_context_works(me);
      if (exec) must(cudaGraphExecDestroy(exec), "cudaGraphExecDestroy");
      if (graph) must(cudaGraphDestroy(graph), "cudaGraphDestroy");
      me.gather();
    });
    round_of_new_group(kWorld, c);
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, LateGpuRank, testing::Combine(testing::Bool(), testing::Values(Width::narrow, Width::wide)),
                         [](const auto& p) {
                           return std::string(std::get<0>(p.param) ? "in_a_graph" : "calls") + suffix_of(std::get<1>(p.param));
                         });

/// A rank that is late but within the deadline causes no fault, and the statistics name it.
TEST(WaitStatisticsOnGpus, NameTheSlowRank) {
  const auto c = make_case(gpu_scenario("slow rank", 3, Layout::rank_major, 10));
  const NormalConfig config = make_config(*c);
  on_gpus(3, heap_for(config, 3), [&](Station& me) {
    NormalExchange exchange(me.group, config);
    me.round(exchange, *c);
    const auto before = me.group.wait_statistics();
    auto* const sink = reinterpret_cast<float*>(me.allocate(4));
    RankData data(*c, me.rank(), 1);
    const Inputs in = me.upload(*c, data);
    me.meet();
    if (me.rank() == 1) launch_busy(1, 32, 200000000, sink, me.stream());
    {
      const Dispatched d = exchange.dispatch(in.x, in.ids, in.weights, me.dispatch_options(*c, me.stream()));
      exchange.combine(d.x, d.handle, in.out, me.combine_options(*c, me.stream()));
    }
    me.meet();
    me.check_combined(data, in);
    const auto after = me.group.wait_statistics();
    if (me.rank() != 1) {
      me.f.equal(1, slowest(me.group), "slowest rank");
      me.f.check(after[1].waits > before[1].waits && after[1].total_ms > before[1].total_ms, "nothing was counted");
      me.f.check(after[1].total_ms >= after[1].max_ms && after[1].max_ms > 50,
                 "longest wait " + std::to_string(after[1].max_ms));
    }
    me.meet();
  });
}

// --- Abort

TEST(AbortOnGpus, EndsQueuedAndWaitingKernels) {
  constexpr int kWorld = 3;
  const auto c = make_case(gpu_scenario("abort", kWorld, Layout::expert_major, 10));
  const NormalConfig config = config_with_large_pool(*c, 2);
  isolated([&] {
    on_gpus(kWorld, heap_for(config, kWorld), 30s, [&](Station& me) {
      NormalExchange exchange(me.group, config);
      RankData data(*c, me.rank(), 0);
      const Inputs in = me.upload(*c, data);
      me.meet();
      if (me.rank() == 0) {
        std::this_thread::sleep_for(100ms);  // the kernels of the other ranks probably wait by then; in any case they must end
        me.group.abort(static_cast<int32_t>(ErrorCode::io));
        me.group.abort(static_cast<int32_t>(ErrorCode::system));  // only the first abort counts
      } else {
        (void)outcome_of([&] {
          for (int i = 0; i < 10; ++i) (void)exchange.dispatch(in.x, in.ids, in.weights, me.dispatch_options(*c, me.stream()));
        });
      }
      me.meet();  // a wait until the deadline would end with PeerTimeout
      const Outcome o = outcome_of([&] { me.group.check(); });
      me.f.equal(static_cast<int>(ErrorCode::peer_failed), static_cast<int>(o.code), "code, " + shown(o));
      me.f.equal(0, o.failed_rank, "rank");
      me.f.equal(static_cast<int>(ErrorCode::io), static_cast<int>(o.reason), "reason");
      me.gather();
    });
    round_of_new_group(kWorld, c);
  });
}

/// Ranks that made calls with different options: all ranks detect this by comparison, and their errors name the option.
TEST(MismatchOnGpus, IsFoundByAllRanks) {
  constexpr int kWorld = 3;
  const auto c = make_case(gpu_scenario("mismatch", kWorld, Layout::rank_major, 10));
  const NormalConfig config = config_with_large_pool(*c, 2);
  isolated([&] {
    for (const int kind : {0, 1, 2}) {
      on_gpus(kWorld, heap_for(config, kWorld), 20s, [&](Station& me) {
        me.f.set_context("mismatch " + std::to_string(kind));
        NormalExchange exchange(me.group, config);
        RankData data(*c, me.rank(), 0);
        const Inputs in = me.upload(*c, data);
        DispatchOptions o = me.dispatch_options(*c, me.stream());
        CombineOptions combine = me.combine_options(*c, me.stream());
        const bool other = me.rank() == 1;
        if (kind == 0 && other) o.padding = switchyard::Padding::unspecified;
        if (kind == 2 && other) combine.apply_weights = false;
        me.meet();
        const Dispatched d = exchange.dispatch(in.x, in.ids, kind == 1 && other ? nullptr : in.weights, o);
        if (kind == 2) exchange.combine(d.x, d.handle, in.out, combine);
        me.meet();
        const Outcome end = outcome_of([&] { me.group.check(); });
        me.f.check(end.code == ErrorCode::mismatch, shown(end));
        constexpr const char* kNamed[] = {"DispatchOptions::padding = ", "some ranks passed topk_weights",
                                          "CombineOptions::apply_weights = "};
        me.f.check(end.text.find(kNamed[kind]) != std::string::npos, shown(end));
        me.gather();
      });
    }
    round_of_new_group(kWorld, c);
  });
}

// --- Killed processes

/// The waits in progress when rank 1 is killed: the others wait for it (it has not entered the call); it waits for the others
/// (which have not entered); or it and rank 0 wait for rank 2.
enum class Killed { others_wait_for_it, it_waits_for_others, they_wait_for_a_third };
const char* name_of(Killed kind) {
  switch (kind) {
    case Killed::others_wait_for_it: return "others_wait";
    case Killed::it_waits_for_others: return "it_waits";
    default: return "they_wait_for_a_third";
  }
}

struct KilledCase {
  static constexpr int kWorld = 3, kVictim = 1, kHolder = 2;
  static constexpr size_t kCalls = 100;
  static constexpr auto kDeadline = 8s;
  Killed kind;
  std::shared_ptr<const Case> what = make_case(gpu_scenario("killed", kWorld, Layout::rank_major, 10));
  NormalConfig config = config_with_large_pool(*what, kCalls + 4);
  std::string store = "unix:@switchyard-killed-" + std::to_string(::getpid()) + "-" + name_of(kind);

  /// Whether all of the victim's calls are queued when it is killed.
  bool queues_before(int rank) const {
    if (kind == Killed::they_wait_for_a_third) return true;
    return (rank == kVictim) == (kind == Killed::it_waits_for_others);
  }
  bool holds(int rank) const { return kind == Killed::they_wait_for_a_third && rank == kHolder; }
};

void rank_of_killed(switchyard::test::ChildRank& child, const KilledCase& k) {
  Group group = join_killed(child, k, heap_for(k.config, k.kWorld));
  Meeting alone(1);
  Failures failures("rank " + std::to_string(child.rank()));
  Station me(group, failures, alone);
  NormalExchange exchange(group, k.config);
  RankData data(*k.what, me.rank(), 0);
  const Inputs in = me.upload(*k.what, data);
  const auto call = [&] { return exchange.dispatch(in.x, in.ids, in.weights, me.dispatch_options(*k.what, me.stream())); };
  {
    const Dispatched d = call();
    exchange.combine(d.x, d.handle, in.out, me.combine_options(*k.what, me.stream()));
    me.synchronize();
  }
  me.check_combined(data, in);
  for (const auto& text : failures.take()) child.say(text);
  group.barrier();
  std::vector<Dispatched> calls;
  const auto queue = [&] {
    while (calls.size() < k.kCalls) calls.push_back(call());
  };
  if (k.holds(child.rank())) me.gate().close(me.stream(), 30s);
  be_killed_or_survive(
      child, k, me, queue, [&] { return calls.size(); }, [&] { me.gate().open(); });
  for (const Dispatched& d : calls) require_failed(child, outcome_of([&] { (void)d.handle.counts(); }), "a call");
  require_context_works(child);
  child.say("done");
}

class KilledGpuProcess : public testing::TestWithParam<Killed> {};

/// A process is killed in the middle of a call while 100 further calls are queued on every rank that has entered it.
TEST_P(KilledGpuProcess, OthersEndWithinTheDeadline) { kill_one(KilledCase{GetParam()}, rank_of_killed); }

INSTANTIATE_TEST_SUITE_P(Gpu, KilledGpuProcess,
                         testing::Values(Killed::others_wait_for_it, Killed::it_waits_for_others,
                                         Killed::they_wait_for_a_third),
                         [](const auto& k) { return std::string(name_of(k.param)); });

}  // namespace
}  // namespace harness
