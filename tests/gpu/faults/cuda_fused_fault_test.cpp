// SPDX-License-Identifier: Apache-2.0
// Faults of the fused layer on GPUs: a rank never calls, is later than the deadline, is stuck between its plan and its rows, or
// is killed. Checks the errors of the other ranks, and that the GPU remains usable, including by a new group.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>

#include "gpu/faults/fault_checks.hpp"
#include "gpu/gemm/moe_calls.hpp"
#include "gpu/harness/killed_rank.hpp"
#include "gpu/kernels/full_gpu.hpp"

namespace harness {
namespace {

using Clock = std::chrono::steady_clock;
using switchyard::Backend;
using switchyard::MoeForm;
using switchyard::testing::MoeCase;

constexpr int kWorld = 2;

MoeCase two_ranks() { return {.c = {.name = "fused", .tokens = {40, 31}}, .form = MoeForm::fused}; }
MoeCase two_ranks_in_fp8() {
  return {.c = {.name = "fused_fp8", .intermediate = 128, .tokens = {40, 31}}, .fp8 = true, .form = MoeForm::fused};
}

size_t heap_of(const MoeCase& m) { return m.heap_bytes(Backend::cuda); }

/// A new group on the same GPUs in the same process computes the layer.
void call_of_new_group() {
  const MoeCase m = two_ranks();
  on_gpus(kWorld, heap_of(m), [&](Station& me) {
    me.f.set_context("a new group afterwards");
    GpuRig rig(me);
    MoeGpuRank rank(rig, me.group, m);
    for (uint32_t call = 0; call < 2; ++call) run_call(me, rank, call, false, [&] { rank.forward(); });
    me.group.check();
    me.meet();
  });
}

/// Makes a call on this rank after a fault. It must fail like every later call.
void expect_refused(Station& me, MoeGpuRank& rank) {
  const Outcome later = outcome_of([&] {
    rank.forward();
    me.synchronize();
    me.group.check();
  });
  expect_sticky(me, later);
}

// ---- a rank that never calls

class SilentFusedRank : public testing::TestWithParam<bool> {};

/// The fault occurs in the first call or after a successful one.
TEST_P(SilentFusedRank, TheOtherReportsIt) {
  const bool after_a_call = GetParam();
  constexpr int kSilent = 1;
  const MoeCase m = two_ranks();
  isolated([&] {
    on_gpus(kWorld, heap_of(m), 1s, [&](Station& me) {
      GpuRig rig(me);
      MoeGpuRank rank(rig, me.group, m);
      if (after_a_call) run_call(me, rank, 0, false, [&] { rank.forward(); });
      rank.write(1);
      me.meet();
      const bool silent = me.rank() == kSilent;
      const auto start = Clock::now();
      if (!silent) rank.forward();
      me.meet();
      if (!silent) {
        me.f.check(Clock::now() - start < 5s, "the call took longer than its deadline");
        const Outcome o = outcome_of([&] { me.group.check(); });
        expect_report(me, o, {"MoE layer", "counts", after_a_call ? uint64_t{2} : uint64_t{1}}, kSilent);
      }
      me.gather();
      expect_refused(me, rank);
      expect_context_works(me);
      me.gather();
    });
    call_of_new_group();
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, SilentFusedRank, testing::Bool(),
                         [](const auto& p) { return std::string(p.param ? "after_a_call" : "at_once"); });

// ---- a rank that is later than the deadline

class LateFusedRank : public testing::TestWithParam<bool> {};

/// Calls queued on every rank when the deadline passes take about one deadline in total, and the late rank finds that they have
/// failed.
TEST_P(LateFusedRank, QueuedCallsCostOneDeadline) {
  const bool in_graph = GetParam();
  constexpr int kLate = 1, kCalls = 30;
  constexpr auto kDeadline = 1s, kDelay = 3s, kSlack = 2s;
  const MoeCase m = two_ranks();
  isolated([&] {
    on_gpus(kWorld, heap_of(m), kDeadline, [&](Station& me) {
      GpuRig rig(me);
      MoeGpuRank rank(rig, me.group, m);
      auto* const sink = reinterpret_cast<float*>(me.allocate(4));
      rank.write(0);
      std::optional<Graph> graph;
      if (in_graph) graph.emplace(me, [&] { rank.forward(); });
      me.meet();
      if (me.rank() == kLate)
        launch_busy(1, 32, static_cast<uint64_t>(std::chrono::nanoseconds(kDelay).count()), sink, me.stream());
      const auto start = Clock::now();
      const Outcome refused = outcome_of([&] {
        for (int call = 0; call < kCalls; ++call) in_graph ? graph->launch() : rank.forward();
      });
      me.f.equal(code_name(ErrorCode::ok), code_name(refused.code), "queueing, " + shown(refused));
      me.synchronize();
      const Clock::duration took = Clock::now() - start;
      me.f.check(took < kDeadline + kSlack + (me.rank() == kLate ? kDelay : 0s),
                 "the queued calls took " + std::to_string(took / 1ms) + " ms");
      expect_late_arrival(me, kLate);
      expect_context_works(me);
      if (graph) graph->destroy();
      me.gather();
    });
    call_of_new_group();
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, LateFusedRank, testing::Bool(),
                         [](const auto& p) { return std::string(p.param ? "in_a_graph" : "calls"); });

// ---- a rank whose plan has ended and whose rows do not arrive

/// A layer call whose plan runs while the rest waits at the station's gate: the call's captured work with the gate's kernel
/// between its two kernels. Can be launched only once.
class StuckCall {
 public:
  StuckCall(Station& me, MoeGpuRank& rank) : me_(me) {
    capture([&] { rank.forward(); }, call_);
    capture([&] { me.gate().close(me.stream(), 30s); }, gate_);
    cudaGraphNode_t nodes[2] = {}, plan = nullptr, held = nullptr;
    size_t count = 0, roots = 1, one = 1;
    must(cudaGraphGetNodes(call_, nullptr, &count), "cudaGraphGetNodes");
    if (count != 2) throw std::runtime_error("a call is " + std::to_string(count) + " nodes, not a plan and the rest");
    must(cudaGraphGetNodes(call_, nodes, &count), "cudaGraphGetNodes");
    must(cudaGraphGetRootNodes(call_, &plan, &roots), "cudaGraphGetRootNodes");
    must(cudaGraphGetNodes(gate_, &held, &one), "cudaGraphGetNodes");
    must(cudaGraphCreate(&all_, 0), "cudaGraphCreate");
    add(nodes[0] == plan ? nodes[1] : nodes[0], add(held, add(plan, nullptr)));
    must(cudaGraphInstantiate(&exec_, all_, 0), "cudaGraphInstantiate");
    must(cudaGraphUpload(exec_, me.stream()), "cudaGraphUpload");
    must(cudaStreamSynchronize(me.stream()), "cudaGraphUpload");
  }
  StuckCall(const StuckCall&) = delete;
  void launch() { must(cudaGraphLaunch(exec_, me_.stream()), "cudaGraphLaunch"); }
  /// Releases the rest of the call.
  void resume() { me_.gate().open(); }
  bool stuck() const { return *static_cast<volatile uint32_t*>(me_.gate().timed_out) == 0; }
  void destroy() {
    must(cudaGraphExecDestroy(exec_), "cudaGraphExecDestroy");
    for (cudaGraph_t graph : {all_, gate_, call_}) must(cudaGraphDestroy(graph), "cudaGraphDestroy");
  }

 private:
  template <class Enqueue>
  void capture(const Enqueue& enqueue, cudaGraph_t& graph) {
    must(cudaStreamBeginCapture(me_.stream(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    enqueue();
    must(cudaStreamEndCapture(me_.stream(), &graph), "cudaStreamEndCapture");
  }
  cudaGraphNode_t add(cudaGraphNode_t kernel, cudaGraphNode_t after) {
    cudaKernelNodeParams params{};
    must(cudaGraphKernelNodeGetParams(kernel, &params), "cudaGraphKernelNodeGetParams");
    cudaGraphNode_t node = nullptr;
    must(cudaGraphAddKernelNode(&node, all_, &after, after != nullptr ? 1 : 0, &params), "cudaGraphAddKernelNode");
    return node;
  }

  Station& me_;
  cudaGraph_t call_ = nullptr, gate_ = nullptr, all_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
};

/// Outcome of the stuck rank.
enum class Stuck { until_the_deadline, until_it_aborts };

/// Checks the other rank, which waits for rows that are never announced.
void expect_blamed(Station& me, Stuck how, int stuck) {
  me.f.check(idle_within(me.stream(), 10s), "the call does not end");
  const Outcome o = outcome_of([&] { me.group.check(); });
  me.f.equal(stuck, slowest(me.group), "slowest rank by wait_statistics");
  if (how == Stuck::until_the_deadline) return expect_report(me, o, {"MoE layer", "layer_told", 2, true}, stuck);
  me.f.equal(code_name(ErrorCode::peer_failed), code_name(o.code), "code, " + shown(o));
  me.f.equal(stuck, o.failed_rank, "failed rank");
  me.f.equal(code_name(ErrorCode::io), code_name(o.reason), "reason, " + shown(o));
}

/// Checks the stuck rank after its kernel is released: it finds that its group has failed, and leaves.
void expect_departure(Station& me, Stuck how) {
  me.synchronize();
  const Outcome o = outcome_of([&] { me.group.check(); });
  me.f.equal(code_name(ErrorCode::peer_failed), code_name(o.code), "code at the stuck rank, " + shown(o));
  if (how == Stuck::until_the_deadline)
    me.f.equal(code_name(ErrorCode::peer_timeout), code_name(o.reason), "reason at the stuck rank, " + shown(o));
}

class StuckFusedRank : public testing::TestWithParam<std::tuple<Stuck, bool>> {};

TEST_P(StuckFusedRank, BetweenItsPlanAndItsRows) {
  const Stuck how = std::get<0>(GetParam());
  const bool fp8 = std::get<1>(GetParam());
  constexpr int kStuck = 1;
  const MoeCase m = fp8 ? two_ranks_in_fp8() : two_ranks();
  isolated([&] {
    on_gpus(kWorld, heap_of(m), how == Stuck::until_the_deadline ? 1s : 20s, [&](Station& me) {
      GpuRig rig(me);
      MoeGpuRank rank(rig, me.group, m);
      run_call(me, rank, 0, false, [&] { rank.forward(); });
      rank.write(1);
      std::optional<StuckCall> call;
      if (me.rank() == kStuck) call.emplace(me, rank);
      me.meet();
      if (call)
        call->launch();
      else
        rank.forward();
      if (call && how == Stuck::until_it_aborts) {
        std::this_thread::sleep_for(300ms);  // the other rank probably waits for rows by then; in any case its kernel must end
        me.group.abort(static_cast<int32_t>(ErrorCode::io));
      }
      if (!call) expect_blamed(me, how, kStuck);
      me.gather();
      if (call) {
        me.f.check(call->stuck(), "the call went on before the other rank had ended");
        call->resume();
        expect_departure(me, how);
      }
      me.gather();
      expect_refused(me, rank);
      expect_context_works(me);
      if (call) call->destroy();
      me.gather();
    });
    call_of_new_group();
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, StuckFusedRank,
                         testing::Combine(testing::Values(Stuck::until_the_deadline, Stuck::until_it_aborts), testing::Bool()),
                         [](const auto& p) {
                           const bool aborts = std::get<0>(p.param) == Stuck::until_it_aborts;
                           return std::string(aborts ? "until_it_aborts" : "until_the_deadline") +
                                  (std::get<1>(p.param) ? "_in_fp8" : "");
                         });

/// A rank that is late but within the deadline causes no fault. The statistics of the other rank list it, although its plan was
/// on time.
TEST(SlowFusedRank, IsNamedByTheWaitStatistics) {
  constexpr int kSlow = 1;
  const MoeCase m = two_ranks();
  on_gpus(kWorld, heap_of(m), 20s, [&](Station& me) {
    GpuRig rig(me);
    MoeGpuRank rank(rig, me.group, m);
    run_call(me, rank, 0, false, [&] { rank.forward(); });
    std::optional<StuckCall> call;
    if (me.rank() == kSlow) call.emplace(me, rank);
    const auto slow = [&] {
      call->launch();
      me.gather();  // the other rank has called
      std::this_thread::sleep_for(200ms);
      call->resume();
    };
    const auto waiting = [&] {
      const auto before = me.group.wait_statistics();
      rank.forward();
      me.gather();
      me.synchronize();
      const auto after = me.group.wait_statistics();
      me.f.check(after[kSlow].waits > before[kSlow].waits, "nothing was counted");
      const double more = after[kSlow].total_ms - before[kSlow].total_ms;
      me.f.check(more > 50, "waited " + std::to_string(more) + " ms for it");
      me.f.equal(kSlow, slowest(me.group), "slowest rank");
    };
    run_call(me, rank, 1, false, [&] { call ? slow() : waiting(); });
    me.group.check();
    if (call) call->destroy();
    me.meet();
  });
}

// ---- a rank that refuses its call

/// A rank with invalid arguments throws at once. Its peer, whose kernel waits for it, receives the error.
TEST(RefusedFusedCall, EndsThePeersCall) {
  const MoeCase m = two_ranks();
  isolated([&] {
    on_gpus(kWorld, heap_of(m), 20s, [&](Station& me) {
      GpuRig rig(me);
      MoeGpuRank rank(rig, me.group, m);
      rank.write(0);
      me.meet();
      const auto start = Clock::now();
      const Outcome at_once = outcome_of([&] { rank.forward({.num_sms = me.rank() == 1 ? 100000 : 0}); });
      me.meet();
      me.f.check(Clock::now() - start < 15s, "the peer waited for its deadline");
      if (me.rank() == 1) {
        me.f.equal(code_name(ErrorCode::invalid_argument), code_name(at_once.code), shown(at_once));
      } else {
        const Outcome o = at_once.code == ErrorCode::ok ? outcome_of([&] { me.group.check(); }) : at_once;
        me.f.equal(code_name(ErrorCode::peer_failed), code_name(o.code), shown(o));
        me.f.equal(1, o.failed_rank, "failed rank");
        me.f.equal(code_name(ErrorCode::invalid_argument), code_name(o.reason), "reason, " + shown(o));
      }
      expect_context_works(me);
      me.gather();
    });
    call_of_new_group();
  });
}

// ---- killed processes

/// The waits in progress when rank 1 is killed: rank 1 waits for the other rank's plan, or the other rank waits for the plan or
/// the rows of rank 1; in the last case, rank 1 is stuck between the two.
enum class Killed { other_waits_for_it, it_waits_for_the_other, between_its_plan_and_its_rows };
const char* name_of(Killed kind) {
  switch (kind) {
    case Killed::other_waits_for_it: return "other_waits";
    case Killed::it_waits_for_the_other: return "it_waits";
    case Killed::between_its_plan_and_its_rows: return "between_plan_and_rows";
  }
  return "";
}

struct KilledFused {
  static constexpr int kWorld = 2, kVictim = 1;
  static constexpr size_t kCalls = 20;
  static constexpr auto kDeadline = 5s;
  Killed kind;
  MoeCase what = two_ranks();
  std::string store = "unix:@switchyard-killed-fused-" + std::to_string(::getpid()) + "-" + name_of(kind);

  /// Whether all of the victim's calls are queued when it is killed.
  bool queues_before(int rank) const {
    if (kind == Killed::between_its_plan_and_its_rows) return true;
    return (rank == kVictim) == (kind == Killed::it_waits_for_the_other);
  }
  bool gets_stuck(int rank) const { return kind == Killed::between_its_plan_and_its_rows && rank == kVictim; }
};

void rank_of_killed(switchyard::test::ChildRank& child, const KilledFused& k) {
  Group group = join_killed(child, k, heap_of(k.what));
  Meeting alone(1);
  Failures failures("rank " + std::to_string(child.rank()));
  Station me(group, failures, alone);
  GpuRig rig(me);
  MoeGpuRank rank(rig, group, k.what);
  rank.write(0);
  group.barrier();
  rank.forward();
  me.synchronize();
  group.barrier();
  rank.by_hand(false);
  me.synchronize();
  group.barrier();
  failures.equal(std::string(), rank.judge_bits(0, false), "the call before");
  for (const auto& text : failures.take()) child.say(text);
  group.barrier();
  std::optional<StuckCall> first;
  if (k.gets_stuck(child.rank())) first.emplace(me, rank);
  group.barrier();
  size_t calls = 0;
  const auto queue = [&] {
    for (; calls < k.kCalls; ++calls) first&& calls == 0 ? first->launch() : rank.forward();
  };
  be_killed_or_survive(child, k, me, queue, [&] { return calls; });
  require_failed(child, outcome_of([&] { rank.forward(); }), "a later call");
  require_context_works(child);
  child.say("done");
}

class KilledFusedProcess : public testing::TestWithParam<Killed> {};

/// A process is killed in the middle of a call while further calls are queued on every rank that has entered it.
TEST_P(KilledFusedProcess, TheOtherEndsWithinTheDeadline) { kill_one(KilledFused{GetParam()}, rank_of_killed); }

INSTANTIATE_TEST_SUITE_P(Gpu, KilledFusedProcess,
                         testing::Values(Killed::other_waits_for_it, Killed::it_waits_for_the_other,
                                         Killed::between_its_plan_and_its_rows),
                         [](const auto& k) { return std::string(name_of(k.param)); });

}  // namespace
}  // namespace harness
