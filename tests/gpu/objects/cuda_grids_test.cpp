// SPDX-License-Identifier: Apache-2.0
// Low-latency, flat and ledger calls on grids of every size (E18), from one multiprocessor to the rank's entire share of its
// GPU; larger grids are rejected.
#include <algorithm>
#include <set>

#include "gpu/harness/ledger_station.hpp"
#include "gpu/harness/station_rig.hpp"

namespace harness {
namespace {

using switchyard::LowLatencyExchange;

/// Number of multiprocessors of the GPU, and of a rank.
struct Multiprocessors {
  int all = 0, share = 0;
};
/// Call inside isolated().
Multiprocessors multiprocessors(int world) {
  int devices = 0;
  Multiprocessors m;
  must(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
  must(cudaDeviceGetAttribute(&m.all, cudaDevAttrMultiProcessorCount, 0), "device attribute");
  m.share = m.all / ((world + devices - 1) / devices);
  return m;
}

StreamedCase small_case(int world, ScaleKind scales) {
  StreamedCase c;
  Form& f = c.form;
  f.seed = 51;
  f.world = world;
  f.experts = 3 * world + 1;
  f.topk = 5;
  f.max_tokens = 20;
  f.hidden = 512;
  f.scales = scales;
  return c;
}

class Grids : public testing::TestWithParam<int> {};

/// Objects without scales also make whole exchanges in one call.
TEST_P(Grids, OfLowLatencyAndFlatCalls) {
  const int world = GetParam();
  isolated([&] {
    const Multiprocessors m = multiprocessors(world);
    for (const ScaleKind scales : {ScaleKind::none, ScaleKind::f32}) {
      for (const int sms : std::set<int>{1, 8, 64, m.share}) {
        if (sms > m.share) continue;
        StreamedCase c = small_case(world, scales);
        c.plan.num_sms = sms;
        on_gpus(world, LowLatencyExchange::heap_bytes(c.config(), world), [&](Station& me) {
          me.f.set_context(std::to_string(sms) + " multiprocessors");
          LowLatencyExchange exchange = c.make(me.group);
          StationRig rig(me);
          Calls streamed(rig, exchange, c);
          me.meet();
          streamed.run(1, 60);
          if (scales == ScaleKind::none) streamed.all_to_all({61}, streamed.lane(0), {});
          expect_verdict(me, streamed, streamed.judged(), true);
        });
      }
    }
  });
}

TEST_P(Grids, OfTheLedgerCombine) {
  const int world = GetParam();
  isolated([&] {
    const Multiprocessors m = multiprocessors(world);
    for (const int64_t hidden : {96, 97}) {
      const auto c = gpu_case(world, 3, DType::bf16, hidden);
      for (const int sms : std::set<int>{1, 8, 64, m.share}) {
        if (sms > m.share) continue;
        on_gpus(world, heap_of(*c), [&](Station& me) {
          me.f.set_context(std::to_string(sms) + " multiprocessors");
          switchyard::LedgerCombine ledger(me.group, make_config(*c));
          LedgerStation mine(me, *c);
          mine.num_sms = sms;
          const switchyard::PreparedLedger prepared = ledger.prepare(mine.data.tables());
          me.meet();
          for (int i = 0; i < 10; ++i) mine.combine(ledger, prepared);
          me.meet();
          mine.check();
          me.meet();
        });
      }
    }
  });
}

/// `call(sms)` must fail with an error that names the argument and the allowed values.
void expect_refused(Station& me, const Multiprocessors& m, int sms, const std::function<void(int)>& call) {
  const Outcome o = outcome_of([&] { call(sms); });
  me.f.equal(static_cast<int>(ErrorCode::invalid_argument), static_cast<int>(o.code), "code, " + shown(o));
  me.f.check(o.text.find("num_sms = " + std::to_string(sms)) != std::string::npos, o.text);
  me.f.check(o.text.find("[0, " + std::to_string(m.share) + "]") != std::string::npos, o.text);
}

/// Rank 0 requests too many multiprocessors in every kind of call. Each call uses a separate group, because an error ends the
/// group.
TEST_P(Grids, OfMoreThanARankHasAreRefused) {
  const int world = GetParam();
  isolated([&] {
    const Multiprocessors m = multiprocessors(world);
    const StreamedCase c = small_case(world, ScaleKind::none);
    const auto of_ledger = gpu_case(world);
    const size_t heap = LowLatencyExchange::heap_bytes(c.config(), world) + heap_of(*of_ledger);
    for (const int sms : {m.share + 1, 2 * m.all}) {
      for (int kind = 0; kind < 4; ++kind) {
        on_gpus(world, heap, [&](Station& me) {
          me.f.set_context("call " + std::to_string(kind));
          LowLatencyExchange exchange = c.make(me.group);
          switchyard::LedgerCombine ledger(me.group, make_config(*of_ledger));
          StationRig rig(me);
          Calls streamed(rig, exchange, c);
          LedgerStation mine(me, *of_ledger);
          const switchyard::PreparedLedger prepared = ledger.prepare(mine.data.tables());
          auto& lane = streamed.lane(0);
          const switchyard::ConstRows x{lane.a.x, c.form.max_tokens, c.form.hidden, c.form.type};
          const switchyard::ExpertIds ids{lane.a.ids, c.form.max_tokens, c.form.topk, lane.a.int64_ids};
          me.meet();
          streamed.dispatch({1}, lane, 0, {});
          me.meet();
          const std::function<void(int)> calls[] = {
              [&](int n) { exchange.dispatch(x, ids, lane.outputs[0], {.stream = me.stream(), .num_sms = n}); },
              [&](int n) {
                const switchyard::Rows& rows = lane.outputs[0].x;
                exchange.combine({rows.data, rows.rows, rows.cols, rows.dtype}, lane.outputs[0], lane.a.out,
                                 {.stream = me.stream(), .num_sms = n});
              },
              [&](int n) { exchange.moe_all_to_all(x, ids, lane.a.out, {.stream = me.stream(), .num_sms = n}); },
              [&](int n) {
                mine.num_sms = n;
                mine.combine(ledger, prepared);
              }};
          if (me.rank() == 0) expect_refused(me, m, sms, calls[kind]);
          me.meet();
        });
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, Grids, testing::Values(1, 2, 4), [](const auto& w) { return "W" + std::to_string(w.param); });

}  // namespace
}  // namespace harness
