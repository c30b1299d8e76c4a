// SPDX-License-Identifier: Apache-2.0
// One rank sets one flag 100 ms late, at each site in sites.def and in every mode that has the site. The trace of each rank
// that waits for the flag must have a span that covers the delay and names the late rank.
#include <gtest/gtest.h>

#include <set>

#include "exchange/fused/impl.hpp"
#include "exchange/ledger/impl.hpp"
#include "exchange/low_latency/impl.hpp"
#include "exchange/normal/impl.hpp"
#include "faults/watched_calls.hpp"
#include "switchyard/trace.hpp"
#include "testing/late_arch.hpp"
#include "testing/test_access.hpp"

namespace harness {
namespace {

using namespace std::chrono_literals;
using switchyard::Group;
using switchyard::GroupOptions;
using switchyard::Layout;
using switchyard::Staging;
using switchyard::Trace;
using switchyard::detail::CpuLate;
using switchyard::detail::Event;
using switchyard::detail::event_info;
using switchyard::detail::lateness_of_site;
using switchyard::detail::Site;
using switchyard::detail::site_name;

constexpr std::chrono::milliseconds kDelay{100};
/// A rank that is descheduled when the delay starts may begin to wait later, by at most this time. Otherwise the call is
/// repeated.
constexpr std::chrono::milliseconds kTolerance{20};
constexpr int kMaxTrials = 20;

/// The ranks that wait for the late flag.
enum class Waiting { others, own_rank };

struct LateSite {
  Site site;
  Event wait;        ///< span of the wait
  std::string call;  ///< name in watched_calls.hpp or more_calls()
  Waiting waiting = Waiting::others;
  const char* host = "";  ///< GroupOptions::host
};
std::ostream& operator<<(std::ostream& out, const LateSite& c) { return out << site_name(c.site) << " in " << c.call; }

/// A ledger whose rows are not multiples of 16 bytes, so each row is followed by a flag.
std::shared_ptr<const LedgerCase> odd_rows(int world) {
  LedgerScenario s;
  s.problem.world = world;
  s.problem.experts = 5;
  s.problem.topk = 2;
  s.tokens.assign(static_cast<size_t>(world), 8);
  s.hidden = 17;
  return make_ledger_case(s);
}

std::vector<WatchedCall> more_calls() {
  constexpr auto make = [](Group& group) { return NormalRig(group, NormalRig::config(Staging::direct, Layout::expert_major)); };
  constexpr auto dispatch = [](NormalRig& rig, const Watch& watch) { watch([&] { rig.dispatch(); }); };
  // Rows outside the heap are copied into it, and peers pull them from there.
  constexpr auto by_rank = [](Group& group) { return NormalRig(group, NormalRig::config()); };
  constexpr auto own_rows = [](NormalRig& rig, const Watch& watch) {
    const auto d = rig.dispatch();
    const std::vector<uint16_t> y(static_cast<size_t>(d.x.rows * NormalRig::kHidden), 0x3F80);
    watch([&] {
      rig.exchange.combine({y.data(), d.x.rows, NormalRig::kHidden, switchyard::DType::bf16}, d.handle, rig.out.data());
    });
  };
  constexpr auto ledger = [](Group& group) { return SmallLedger(group, odd_rows(group.size())); };
  constexpr auto combine = [](SmallLedger& rig, const Watch& watch) { watch([&] { rig.round(); }); };
  return {{"dispatch_by_expert", "", "", 0, after_rounds<NormalRig>(1, make, dispatch)},
          {"combine_own_rows", "", "", 0, after_rounds<NormalRig>(1, by_rank, own_rows)},
          {"ledger_odd_rows", "", "", 0, after_rounds<SmallLedger>(1, ledger, combine)}};
}
WatchedCall call_named(const std::string& name) {
  for (const auto& calls : {all_calls(), more_calls()})
    for (const WatchedCall& call : calls)
      if (call.name == name) return call;
  throw std::logic_error("no call " + name);
}

std::vector<LateSite> late_sites() {
  std::vector<LateSite> all;
  const auto add = [&](Site site, Event wait, std::vector<std::string> calls, Waiting waiting = Waiting::others,
                       const char* host = "") {
    for (const std::string& call : calls) all.push_back({site, wait, call, waiting, host});
  };
  add(Site::counts, Event::wait_counts, {"dispatch", "ring_dispatch", "fused"});
  add(Site::placement, Event::wait_placement,
      {"dispatch", "ring_dispatch", "cached_dispatch", "ring_cached_dispatch", "combine", "combine_own_rows",
       "combine_by_expert", "combine_by_route", "ring_combine"});
  add(Site::rows, Event::wait_rows, {"dispatch", "dispatch_by_expert", "cached_dispatch"});
  add(Site::outputs, Event::wait_outputs, {"combine_own_rows", "combine_by_expert"});
  add(Site::pulled, Event::wait_pulled, {"combine", "combine_own_rows", "combine_by_expert"});
  add(Site::ring_tail, Event::wait_ring, {"ring_dispatch", "ring_combine"});
  add(Site::ring_head, Event::wait_ring, {"ring_dispatch", "ring_combine"});
  add(Site::call_header, Event::wait_entered,
      {"low_latency_dispatch", "low_latency_combine", "low_latency_combine_by_rank", "flat"});
  add(Site::expert_count, Event::wait_expert_count, {"low_latency_dispatch"});
  add(Site::message, Event::wait_message, {"low_latency_dispatch", "flat"});
  add(Site::returned, Event::wait_returned, {"low_latency_combine", "low_latency_combine_by_rank", "flat"});
  add(Site::returned, Event::wait_ledger_rows, {"ledger"});
  add(Site::ledger_rows, Event::wait_ledger_rows, {"ledger", "ledger_odd_rows"});
  add(Site::layer_told, Event::wait_told, {"fused"});
  add(Site::layer_rows, Event::wait_tile_rows, {"fused"}, Waiting::own_rank);
  add(Site::layer_tiles, Event::wait_tiles, {"fused"}, Waiting::own_rank);
  add(Site::layer_returned, Event::wait_returned, {"fused"});
  add(Site::barrier, Event::barrier, {"barrier"});
  add(Site::network, Event::wait_network,
      {"dispatch", "cached_dispatch", "combine", "combine_by_expert", "low_latency_dispatch", "low_latency_combine",
       "low_latency_combine_by_rank"},
      Waiting::others, "a,b,c");
  return all;
}

/// Sites at which no warp waits for a flag.
const std::set<Site> kNobodyWaits = {
    Site::none,         // words read while waiting for other sites
    Site::local_sends,  // a counter: the last warp to arrive continues, and the other warps have already left
};

class LateSites : public testing::TestWithParam<LateSite> {};

/// Duration in milliseconds of the longest span in the trace of `rank` at the late site that names the late rank.
double longest_wait(const Trace& trace, const LateSite& c, int rank, int late) {
  double longest = 0;
  for (const auto& s : trace.slices())
    // The bootstrap does not report which rank a barrier waits for.
    if (s.rank == rank && s.name == event_info(c.wait).name && (s.arg == late || c.site == Site::barrier))
      longest = std::max(longest, s.duration_us * 1e-3);
  return longest;
}

/// Makes the call with one late flag. \returns for each rank, the missing spans
std::string missing_spans(const LateSite& c, int late) {
  constexpr int kWorld = 3;
  const WatchedCall call = call_named(c.call);
  GroupOptions options = options_with(60s);
  options.num_warps = c.waiting == Waiting::own_rank ? 2 : 1;
  options.host = c.host;
  switchyard::TraceOptions tracks;
  tracks.num_blocks = options.num_blocks;
  tracks.num_warps = options.num_warps;
  tracks.events_per_track = 1 << 10;
  Trace trace(kWorld, tracks);
  const auto all = outcomes(kWorld, options, [&](Group& group) {
    if (group.rank() == late) {
      switchyard::detail::defer_copies(group);  // its objects use the arch CpuLate
      switchyard::detail::before_rounds(group, [] { lateness_of_site.before(Site::network); });  // a round has no flag
    }
    call.play(group, [&](const std::function<void()>& make) {
      group.barrier();
      if (group.rank() == late) lateness_of_site.arm(c.site, kDelay);
      group.set_trace(&trace);
      if (group.rank() == late && c.site == Site::barrier) lateness_of_site.before(Site::barrier);  // has no flag in the heap
      make();
      group.set_trace(nullptr);
    });
    group.barrier();
  });
  for (const Outcome& o : all)
    if (o.code != switchyard::ErrorCode::ok) return o.text;
  if (!lateness_of_site.happened) return "no flag of the site was set, and no round posted";
  std::string missing;
  for (int rank = 0; rank < kWorld; ++rank) {
    if ((rank == late) != (c.waiting == Waiting::own_rank)) continue;
    const double found = longest_wait(trace, c, rank, late);
    if (found < static_cast<double>((kDelay - kTolerance).count()))
      missing += "rank " + std::to_string(rank) + ": the longest span " + event_info(c.wait).name + " for rank " +
                 std::to_string(late) + " takes " + std::to_string(found) + " ms\n";
  }
  return missing;
}

TEST_P(LateSites, ASpanOfEachWaitingRankCoversTheDelay) {
  using namespace switchyard::detail;
  using namespace switchyard;
  make_deferred<NormalImpl, NormalConfig> = NormalImpl::make_on_cpu<CpuLate>;
  make_deferred<LowLatencyImpl, LowLatencyConfig> = LowLatencyImpl::make_on_cpu<CpuLate>;
  make_deferred<LedgerImpl, LedgerConfig> = LedgerImpl::make_on_cpu<CpuLate>;
  make_deferred<FusedImpl, FusedOnCpu> = FusedImpl::make_on_cpu<CpuLate>;
  for (const int late : {2, 0}) {
    std::string missing = "no trial";
    for (int trial = 0; trial < kMaxTrials && !missing.empty(); ++trial) missing = missing_spans(GetParam(), late);
    EXPECT_EQ(missing, "") << "in each of " << kMaxTrials << " trials";
  }
}

INSTANTIATE_TEST_SUITE_P(All, LateSites, testing::ValuesIn(late_sites()),
                         [](const auto& one) { return std::string(site_name(one.param.site)) + "_in_" + one.param.call; });

TEST(LateSites, EverySiteHasACase) {
  std::set<Site> with_case = kNobodyWaits;
  for (const LateSite& c : late_sites()) with_case.insert(c.site);
#define SWITCHYARD_SITE(name) EXPECT_EQ(with_case.count(Site::name), 1u) << #name;
#include "layout/sites.def"
}

}  // namespace
}  // namespace harness
