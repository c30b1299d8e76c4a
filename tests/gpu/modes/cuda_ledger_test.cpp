// SPDX-License-Identifier: Apache-2.0
// Ledger combine: with the tables of a dispatch, captured in graphs, and on several streams. Also memory for prepared ledgers,
// misuse, ranks with different ledgers, and a silent rank. tests/modes/ledger/ledger_test.cpp checks its results.
#include <atomic>
#include <algorithm>
#include <map>
#include <string>

#include "gpu/faults/fault_checks.hpp"
#include "gpu/harness/graph_nodes.hpp"
#include "gpu/harness/ledger_station.hpp"
#include "gpu/harness/trace_rig.hpp"
#include "harness/rank_memory.hpp"
#include "harness/rank_steps.hpp"
#include "switchyard/trace.hpp"

namespace harness {
namespace {

using switchyard::LedgerCombine;
using switchyard::LedgerTables;
using switchyard::PreparedLedger;

/// A trace contains the phases and every call of this rank.
TEST(GpuLedger, ATraceShowsItsPhases) {
  constexpr int kWorld = 3, kCalls = 4;
  const auto c = gpu_case(kWorld);
  switchyard::TraceOptions options;
  options.num_blocks = 2;
  options.num_warps = 32;
  switchyard::Trace trace(kWorld, options);
  on_gpus(kWorld, heap_of(*c), [&](Station& me) {
    LedgerCombine ledger(me.group, make_config(*c));
    LedgerStation mine(me, *c);
    const PreparedLedger prepared = ledger.prepare(mine.data.tables());
    me.meet();
    me.group.set_trace(&trace);
    me.gather();
    for (int i = 0; i < kCalls; ++i) mine.combine(ledger, prepared);
    me.meet();
    me.group.set_trace(nullptr);
    me.gather();
    mine.check();
    std::map<std::string, uint64_t> spans;
    for (const auto& phase : trace.summary())
      if (phase.rank == me.rank()) spans[phase.name] = phase.count;
    me.f.equal(uint64_t{kCalls}, spans["ledger_combine"], "calls");
    for (const char* name : {"return_segments", "restore_tokens"})
      me.f.check(spans[name] >= kCalls, std::string("no ") + name + " in some call");
    me.gather();
  });
}

/// Rank 2 is 20 ms late: the waits for its rows name it, and no long wait names another rank. The spans account for every byte.
TEST(GpuLedger, ATraceNamesTheLateSenderAndCountsItsBytes) {
  constexpr int kWorld = 3, kLate = 2, kCalls = 6;
  constexpr uint64_t kDelay = 20'000'000;
  for (const int64_t hidden : {96, 97}) {  // sentinel rows, and others
    const auto c = gpu_case(kWorld, 3, DType::bf16, hidden);
    switchyard::Trace trace(kWorld, large_trace_options());
    std::atomic<uint64_t> reported{0};  // sum over all ranks
    on_gpus(kWorld, heap_of(*c), [&](Station& me) {
      me.f.set_context("hidden " + std::to_string(hidden));
      LedgerCombine ledger(me.group, make_config(*c));
      LedgerStation mine(me, *c);
      auto* const sink = reinterpret_cast<float*>(me.allocate(4));
      const PreparedLedger prepared = ledger.prepare(mine.data.tables());
      record(me, trace, [&] {
        for (int i = 0; i < kCalls; ++i) {
          if (me.rank() == kLate) launch_busy(1, 32, kDelay, sink, me.stream());
          mine.combine(ledger, prepared);
          me.meet();
          reported += ledger.last_call().remote_bytes;
          me.gather();
        }
      });
      me.f.check(reported > 0, "nothing crossed: proves nothing");
      me.f.equal(reported.load(), traced_bytes(trace), "bytes of the spans");
      if (me.rank() != kLate) {
        auto named = waits_for(me, trace, kLate, kDelay / 2);
        me.f.check(named["long"] >= kCalls,
                   std::to_string(named["long"]) + " long waits in " + std::to_string(kCalls) + " calls");
      }
      mine.check();
      me.meet();
    });
  }
}

TEST(GpuLedger, ACallIsOneLaunch) {
  for (const int64_t hidden : {96, 97}) {  // sentinel rows, and others
    const auto c = gpu_case(2, 3, DType::bf16, hidden);
    on_gpus(2, heap_of(*c), [&](Station& me) {
      LedgerCombine ledger(me.group, make_config(*c));
      LedgerStation mine(me, *c);
      const PreparedLedger prepared = ledger.prepare(mine.data.tables());
      me.meet();
      expect_one_launch(me, "ledger combine, hidden " + std::to_string(hidden), [&] { mine.combine(ledger, prepared); });
      mine.probs = nullptr;
      expect_one_launch(me, "ledger combine without probabilities", [&] { mine.combine(ledger, prepared); });
      me.meet();
    });
  }
}

TEST(GpuLedger, OfADispatchGivesTheBitsOfTheHandle) {
  for (const int world : {1, 2, 4, 8}) {
    const auto c = gpu_case(world);
    switchyard::NormalConfig normal;
    normal.invalid_ids = switchyard::InvalidIds::count;
    normal.hidden = c->scenario.hidden;
    normal.num_experts = c->problem.experts;
    normal.topk = c->problem.topk;
    normal.max_tokens = c->problem.max_tokens;
    normal.layout = Layout::expert_major;
    normal.expert_alignment = c->problem.alignment;
    on_gpus(world, heap_of(*c) + heap_for(normal, world), [&](Station& me) {
      NormalExchange exchange(me.group, normal);
      LedgerCombine ledger(me.group, make_config(*c));
      LedgerStation mine(me, *c);
      const std::vector<int64_t>& ids = c->problem.ids[static_cast<size_t>(me.rank())];
      const int64_t tokens = c->problem.tokens(me.rank());
      const auto* device_ids = static_cast<const int64_t*>(me.upload(ids.data(), ids.size() * 8));
      const void* x = me.upload(mine.data.out().data(), mine.bytes);
      std::byte* by_handle = me.allocate(mine.bytes);
      me.meet();
      DispatchOptions o;
      o.stream = me.stream();
      o.num_sms = 2;
      const Dispatched d = exchange.dispatch({x, tokens, normal.hidden, DType::bf16},
                                             switchyard::ExpertIds::of(device_ids, tokens, normal.topk), mine.probs, o);
      CombineOptions by_route;
      by_route.order = CombineOrder::per_route;
      by_route.stream = o.stream;
      by_route.num_sms = 2;
      switchyard::ConstRows y = mine.y;
      y.rows = d.x.rows;  // worst-case size: more rows are allocated than the experts wrote
      std::byte* copied_rows = me.allocate(static_cast<size_t>(y.rows * y.cols) * 2);
      must(cudaMemcpyAsync(copied_rows, mine.y.data, static_cast<size_t>(mine.y.rows * y.cols) * 2, cudaMemcpyDeviceToDevice,
                           me.stream()),
           "cudaMemcpyAsync");
      y.data = copied_rows;
      exchange.combine(y, d.handle, by_handle, by_route);
      me.meet();
      const LedgerTables tables = d.handle.ledger(), golden = golden_tables(*c, me.rank());
      me.f.equal_range(golden.peer_token_per_expert, tables.peer_token_per_expert, "peer_token_per_expert");
      me.f.equal_range(golden.expanded_row_idx, tables.expanded_row_idx, "expanded_row_idx");
      me.f.equal_range(golden.cumsum_per_expert, tables.cumsum_per_expert, "cumsum_per_expert");
      me.f.equal_range(golden.dispatch_offset, tables.dispatch_offset, "dispatch_offset");
      me.f.equal_range(golden.prev_sum_before_rank, tables.prev_sum_before_rank, "prev_sum_before_rank");
      const PreparedLedger prepared = ledger.prepare(tables);
      me.meet();
      mine.combine(ledger, prepared);
      me.meet();
      std::vector<std::byte> host(mine.bytes);
      if (mine.bytes > 0) me.read(host.data(), by_handle, host.size());
      mine.check();
      if (mine.bytes > 0) me.read(mine.data.out().data(), mine.out, mine.bytes);
      me.f.check(host == mine.data.out(), "combine by the ledger and by the handle differ");
      me.meet();
    });
  }
}

/// Packed tables in host memory give the oracle's results, even with another ledger of the same object in between. Each rank
/// has a GPU to itself, because a call copies to the GPU while peers wait.
TEST(GpuLedger, ByPackedTables) {
  for (const int world : {1, std::min(3, gpus_of_suite())}) {
    const auto c = gpu_case(world), other = gpu_case(world, 8);
    on_gpus(world, heap_of(*c), [&](Station& me) {
      LedgerCombine ledger(me.group, make_config(*c));
      for (int turn = 0; turn < 4; ++turn) {
        me.f.set_context("turn " + std::to_string(turn));
        LedgerStation mine(me, turn % 2 == 0 ? *c : *other, turn);
        const auto bytes = switchyard::pack_route_meta(mine.data.tables(), ledger.config(), world, me.rank());
        me.meet();
        switchyard::combine_by_ledger(mine.y, mine.probs, bytes, ledger, c->problem.tokens(me.rank()), mine.out,
                                      mine.options());
        me.meet();
        mine.check();
        me.meet();
      }
    });
  }
}

/// Graphs with one, two and three calls, replayed with an uncaptured call between them: the host supplies nothing per call.
TEST(GpuLedger, GraphsAreReplayed) {
  const auto a = gpu_case(2, 5), b = gpu_case(2, 6);
  on_gpus(2, heap_of(*a), [&](Station& me) {
    LedgerCombine ledger(me.group, make_config(*a));
    LedgerStation one(me, *a), two(me, *b);
    PreparedLedger first = ledger.prepare(one.data.tables()), second = ledger.prepare(two.data.tables());
    me.meet();
    for (int calls = 1; calls <= 3; ++calls) {
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t exec = nullptr;
      must(cudaStreamBeginCapture(me.stream(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
      for (int i = 0; i < calls; ++i) i % 2 == 0 ? one.combine(ledger, first) : two.combine(ledger, second);
      must(cudaStreamEndCapture(me.stream(), &graph), "cudaStreamEndCapture");
      must(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
      if (calls == 3) first = second = PreparedLedger();  // the graph keeps the ledgers alive
      for (int replay = 0; replay < 100; ++replay) must(cudaGraphLaunch(exec, me.stream()), "cudaGraphLaunch");
      me.meet();
      me.f.set_context("graph of " + std::to_string(calls));
      one.check();
      if (calls > 1) two.check();
      if (calls < 3) {
        must(cudaMemsetAsync(one.out, 0xEE, one.bytes, me.stream()), "cudaMemsetAsync");
        one.combine(ledger, first);
        me.meet();
        one.check();
      }
      must(cudaGraphExecDestroy(exec), "cudaGraphExecDestroy");
      must(cudaGraphDestroy(graph), "cudaGraphDestroy");
      me.meet();
    }
  });
}

/// returned() refers to the last call that the GPU ran, regardless of calls captured or enqueued after it was recorded.
TEST(GpuLedger, ReturnedRowsAreOfTheCallThatRan) {
  for (const int64_t hidden : {96, 97}) {  // sentinel rows, and others
    const auto few = gpu_case(2, 5, DType::bf16, hidden), many = gpu_case(2, 6, DType::bf16, hidden, 40);
    on_gpus(2, heap_of(*many), [&](Station& me) {
      me.f.set_context("hidden " + std::to_string(hidden));
      LedgerCombine ledger(me.group, make_config(*many));
      LedgerStation one(me, *few), two(me, *many);
      const PreparedLedger first = ledger.prepare(one.data.tables()), second = ledger.prepare(two.data.tables());
      me.f.check(first.returned_rows() != second.returned_rows(), "as many rows: proves nothing");
      const auto expect_rows_of = [&](LedgerStation& s, const PreparedLedger& of, const std::string& what) {
        me.meet();
        const switchyard::ConstRows rows = ledger.returned();
        me.f.equal(of.returned_rows(), rows.rows, what + ": rows");
        std::vector<std::byte> host(static_cast<size_t>(rows.rows * rows.cols) * 2);
        me.read(host.data(), rows.data, host.size());
        s.data.check_returned(host.data(), rows.rows, me.f);
        me.meet();
      };
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t exec = nullptr;
      me.meet();
      one.combine(ledger, first);
      me.meet();
      must(cudaStreamBeginCapture(me.stream(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
      two.combine(ledger, second);
      must(cudaStreamEndCapture(me.stream(), &graph), "cudaStreamEndCapture");
      must(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
      expect_rows_of(one, first, "captured, not launched");
      one.combine(ledger, first);
      must(cudaGraphLaunch(exec, me.stream()), "cudaGraphLaunch");
      expect_rows_of(two, second, "launched after a call");
      must(cudaGraphExecDestroy(exec), "cudaGraphExecDestroy");
      must(cudaGraphDestroy(graph), "cudaGraphDestroy");
      me.meet();
    });
  }
}

/// Sentinel rows survive sleep bit by bit: a word of a sentinel row that became zero would look as if it had arrived.
TEST(GpuLedger, NapsBetweenCalls) {
  const auto c = gpu_case(2);
  on_gpus(2, heap_of(*c), [&](Station& me) {
    LedgerCombine ledger(me.group, make_config(*c));
    std::vector<std::unique_ptr<LedgerStation>> calls;
    for (int i = 0; i < 5; ++i) calls.push_back(std::make_unique<LedgerStation>(me, *c, i));
    const PreparedLedger prepared = ledger.prepare(calls[0]->data.tables());
    for (auto& call : calls) {
      me.meet();
      call->combine(ledger, prepared);
      me.meet();
      me.group.sleep();
      me.gather();
      me.group.wake();
      me.meet();
      call->check();
    }
    me.meet();
  });
}

/// Rows of whole 16-byte units at any address: they are sentinel rows but are handled by a different kernel.
TEST(GpuLedger, RowsThatBeginAnywhere) {
  for (const DType type : {DType::f16, DType::bf16}) {
    const auto c = gpu_case(2, 9, type);
    for (const size_t at : {2, 4, 8, 14}) {
      on_gpus(2, heap_of(*c), [&](Station& me) {
        me.f.set_context("rows begin at byte " + std::to_string(at));
        LedgerCombine ledger(me.group, make_config(*c));
        LedgerStation mine(me, *c);
        std::byte* const y = me.allocate(static_cast<size_t>(mine.y.rows * mine.y.cols) * 2 + 16) + at;
        std::byte* const out = me.allocate(mine.bytes + 16) + (16 - at);
        must(cudaMemcpyAsync(y, mine.y.data, static_cast<size_t>(mine.y.rows * mine.y.cols) * 2, cudaMemcpyDeviceToDevice,
                             me.stream()),
             "cudaMemcpyAsync");
        mine.y.data = y;
        mine.out = out;
        const PreparedLedger prepared = ledger.prepare(mine.data.tables());
        me.meet();
        for (int i = 0; i < 3; ++i) mine.combine(ledger, prepared);
        me.meet();
        mine.check();
        me.meet();
      });
    }
  }
}

/// The stream changes from call to call, and the rows of the next call are written directly after the previous call.
TEST(GpuLedger, StreamsInTurn) {
  const auto c = gpu_case(2);
  on_gpus(2, heap_of(*c), [&](Station& me) {
    LedgerCombine ledger(me.group, make_config(*c));
    LedgerStation mine(me, *c);
    const PreparedLedger prepared = ledger.prepare(mine.data.tables());
    me.meet();
    for (int i = 0; i < 60; ++i) mine.combine(ledger, prepared, i);
    me.meet();
    mine.check();
    me.meet();
  });
}

/// D7, D11: consecutive calls with three alternating sets of rows and tables, on ranks that are late by varying amounts. No
/// rank's host waits, and no call uses the rows of the previous call.
TEST(GpuLedger, D07_QueuedCallsOfOtherRows) {
  constexpr int kCalls = 200, kSets = 3;
  for (const int world : {1, 2, 4, 8}) {
    std::shared_ptr<const LedgerCase> cases[kSets];
    for (int i = 0; i < kSets; ++i) cases[i] = gpu_case(world, 20 + static_cast<uint64_t>(i));
    on_gpus(world, heap_of(*cases[0]), [&](Station& me) {
      LedgerCombine ledger(me.group, make_config(*cases[0]));
      std::vector<std::unique_ptr<LedgerStation>> sets;
      std::vector<PreparedLedger> prepared;
      for (const auto& c : cases) {
        sets.push_back(std::make_unique<LedgerStation>(me, *c));
        prepared.push_back(ledger.prepare(sets.back()->data.tables()));
      }
      std::vector<void*> outs;
      for (size_t i = 0; i < kCalls; ++i) outs.push_back(me.allocate(sets[i % kSets]->bytes));
      me.meet();
      for (size_t i = 0; i < kCalls; ++i) {
        random_delay(100, 99, me.rank(), i);
        sets[i % kSets]->out = outs[i];
        sets[i % kSets]->combine(ledger, prepared[i % kSets]);
      }
      me.meet();
      for (size_t i = 0; i < kCalls; ++i) {
        me.f.set_context(std::to_string(world) + " ranks, call " + std::to_string(i));
        sets[i % kSets]->out = outs[i];
        sets[i % kSets]->check();
      }
      me.meet();
    });
  }
}

TEST(GpuLedger, PlacesForLedgersAreBounded) {
  const auto c = gpu_case(2);
  on_gpus(2, heap_of(*c), [&](Station& me) {
    switchyard::LedgerConfig config = make_config(*c);
    config.max_ledgers = 2;
    LedgerCombine ledger(me.group, config);
    LedgerStation mine(me, *c);
    PreparedLedger first = ledger.prepare(mine.data.tables());
    const PreparedLedger second = ledger.prepare(mine.data.tables());
    const Outcome o = outcome_of([&] { (void)ledger.prepare(mine.data.tables()); });
    me.f.equal(static_cast<int>(ErrorCode::pool_exhausted), static_cast<int>(o.code), o.text);
    me.meet();
    for (int i = 0; i < 20; ++i) {  // a place is reused only when the calls that used its last ledger are complete
      mine.combine(ledger, first);
      first = PreparedLedger();
      me.meet();
      first = ledger.prepare(mine.data.tables());
      me.meet();
    }
    mine.combine(ledger, second);
    me.meet();
    mine.check();
    me.meet();
  });
}

TEST(GpuLedger, HostMemoryIsRefused) {
  const auto c = gpu_case(2);
  on_gpus(2, heap_of(*c), 60s, [&](Station& me) {
    LedgerCombine ledger(me.group, make_config(*c));
    LedgerStation mine(me, *c);
    const PreparedLedger prepared = ledger.prepare(mine.data.tables());
    me.meet();
    if (me.rank() == 1) mine.y.data = mine.data.y().data;
    const Outcome o = outcome_of([&] {
      mine.combine(ledger, prepared);
      me.synchronize();
      mine.combine(ledger, prepared);
    });
    if (me.rank() == 1) {
      me.f.equal(static_cast<int>(ErrorCode::invalid_argument), static_cast<int>(o.code), o.text);
      me.f.check(o.text.find("expert_output.data is host memory") != std::string::npos, o.text);
    } else {
      me.f.equal(static_cast<int>(ErrorCode::peer_failed), static_cast<int>(o.code), o.text);
    }
  });
}

/// Tables, packed or not, are wrong on one rank: its error describes them, and the calls of the other ranks end.
TEST(GpuLedger, TablesThatAreRefusedEndThePeers) {
  const auto c = gpu_case(2);
  for (const bool packed : {false, true}) {
    on_gpus(2, heap_of(*c), 60s, [&](Station& me) {
      LedgerCombine ledger(me.group, make_config(*c));
      LedgerStation mine(me, *c);
      LedgerTables tables = mine.data.tables();
      auto bytes = switchyard::pack_route_meta(tables, ledger.config(), 2, me.rank());
      const PreparedLedger prepared = ledger.prepare(tables);
      me.meet();
      if (me.rank() == 1) {
        tables.dispatch_offset.back() += 1 << 20;  // rows after the end of the expert output
        tables.prev_sum_before_rank[0] = 7;
        bytes.pop_back();
      }
      const Outcome o = outcome_of([&] {
        if (me.rank() == 0) return mine.combine(ledger, prepared);
        packed
            ? switchyard::combine_by_ledger(mine.y, mine.probs, bytes, ledger, c->problem.tokens(1), mine.out, mine.options())
            : ledger.combine(mine.y, mine.probs, tables, mine.out, mine.options());
      });
      me.synchronize();
      if (me.rank() == 1) {
        me.f.equal(static_cast<int>(ErrorCode::invalid_argument), static_cast<int>(o.code), o.text);
        me.f.check(o.text.find(packed ? "route_meta" : "LedgerTables::") != std::string::npos, o.text);
      } else {
        const Outcome later = o.code == ErrorCode::ok ? outcome_of([&] { me.group.check(); }) : o;
        me.f.equal(static_cast<int>(ErrorCode::peer_failed), static_cast<int>(later.code), later.text);
      }
      me.gather();
    });
  }
}

TEST(GpuLedger, RanksWithOtherLedgersFindOut) {
  const auto a = gpu_case(2, 3), b = gpu_case(2, 4);
  on_gpus(2, heap_of(*a), 60s, [&](Station& me) {
    LedgerCombine ledger(me.group, make_config(*a));
    LedgerStation mine(me, me.rank() == 0 ? *a : *b);
    const PreparedLedger prepared = ledger.prepare(mine.data.tables());
    me.meet();
    const Outcome o = outcome_of([&] {
      mine.combine(ledger, prepared);
      me.synchronize();
      me.group.check();
    });
    me.f.check(o.code == ErrorCode::mismatch, "ended with " + o.text);
  });
}

TEST(GpuLedger, SilentRankIsReported) {
  const auto c = gpu_case(2);
  on_gpus(2, heap_of(*c), 1s, [&](Station& me) {
    LedgerCombine ledger(me.group, make_config(*c));
    LedgerStation mine(me, *c);
    const PreparedLedger prepared = ledger.prepare(mine.data.tables());
    me.meet();
    if (me.rank() == 0) {
      mine.combine(ledger, prepared);
      me.synchronize();
      const Outcome o = outcome_of([&] { mine.combine(ledger, prepared); });
      expect_report(me, o, {"ledger combine", "ledger_rows", 1}, 1);
    }
    me.gather();
    expect_context_works(me);
  });
}

}  // namespace
}  // namespace harness
