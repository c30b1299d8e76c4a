// SPDX-License-Identifier: Apache-2.0
// Weakens one memory order at a time and requires ThreadSanitizer to report a race: a suite that cannot detect a missing order
// proves nothing by passing. Each mutant runs one targeted scenario in a forked child. Orders whose weakening is undetectable
// are listed with the reason; if such a weakening is detected after all, the list is out of date and the test fails too.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "arch/cpu/order_table.hpp"
#include "layout/sites.hpp"
#include "modes/flat/flat_script.hpp"
#include "modes/fused/fused_rig.hpp"
#include "modes/ledger/ledger_rig.hpp"
#include "modes/low_latency/low_latency_script.hpp"
#include "modes/normal/scenario.hpp"

#if !defined(SWITCHYARD_MUTABLE_ORDERS) || !defined(__SANITIZE_THREAD__)
#error "the mutation suite needs -fsanitize=thread and SWITCHYARD_MUTABLE_ORDERS"
#endif

extern "C" const char* __tsan_default_options();
extern "C" const char* __tsan_default_options() { return "halt_on_error=1:exitcode=66:report_signal_unsafe=0"; }

namespace harness {
namespace {

using switchyard::detail::Side;
using switchyard::detail::Site;

constexpr int kRaceReported = 66;
constexpr int kRunsOfSurvivor = 6;  // on a busy machine, the schedule may hide a race in a single run

enum class Phase {
  dispatch,
  dispatch_out,
  cached,
  combine_in_place,
  combine_ordinary,
  combine_sums,
  combine_routes,
  ledger,
  ledger_sentinel,
  low_latency,
  flat,
  fused,
  fused_per_rank,
  // Two hosts with two ranks each, and rounds of a few rows.
  dispatch_hosts,
  cached_hosts,
  rows_back_hosts,
  sums_back_hosts,
  low_latency_hosts
};
constexpr bool on_hosts(Phase phase) { return phase >= Phase::dispatch_hosts; }
constexpr const char* kPhaseNames[] = {"dispatch",         "dispatch_out",     "cached",         "combine_in_place",
                                       "combine_ordinary", "combine_sums",     "combine_routes", "ledger",
                                       "ledger_sentinel",  "low_latency",      "flat",           "fused",
                                       "fused_per_rank",   "dispatch_hosts",   "cached_hosts",   "rows_back_hosts",
                                       "sums_back_hosts",  "low_latency_hosts"};

/// One memory order of one flag, weakened during one kind of call.
struct Mutant {
  Site site;
  Side side;
  Phase phase;
  Staging staging;
};
std::string to_string(const Mutant& m) {
  return std::string(switchyard::detail::site_name(m.site)) + (m.side == Side::acquire ? "_acquire_" : "_release_") +
         kPhaseNames[static_cast<int>(m.phase)] + (m.staging == Staging::ring ? "_ring" : "_direct");
}
std::ostream& operator<<(std::ostream& out, const Mutant& m) { return out << to_string(m); }

/// The flags that publish data in each call. Every flag is listed here or in redundant_because.
struct Use {
  Site site;
  Phase phase;
  Staging staging;
};
constexpr Use kUses[] = {
    {Site::counts, Phase::dispatch, Staging::direct},
    {Site::counts, Phase::dispatch, Staging::ring},
    {Site::placement, Phase::dispatch, Staging::direct},
    {Site::placement, Phase::cached, Staging::direct},
    {Site::placement, Phase::dispatch, Staging::ring},
    {Site::rows, Phase::dispatch, Staging::direct},
    {Site::rows, Phase::cached, Staging::direct},
    {Site::rows, Phase::dispatch_out, Staging::direct},  // rows are copied as they arrive
    {Site::local_sends, Phase::dispatch, Staging::direct},
    {Site::local_sends, Phase::cached, Staging::direct},
    {Site::local_sends, Phase::combine_ordinary, Staging::direct},  // precedes outputs: copies of the rows
    {Site::local_sends, Phase::combine_in_place, Staging::direct},  // precedes pulled: reads of the rows
    {Site::local_sends, Phase::combine_sums, Staging::direct},      // precedes outputs: sums
    {Site::local_sends, Phase::combine_routes, Staging::direct},    // precedes outputs: pushed rows
    {Site::placement, Phase::combine_in_place, Staging::direct},
    {Site::placement, Phase::combine_routes, Staging::direct},
    {Site::placement, Phase::combine_in_place, Staging::ring},
    {Site::outputs, Phase::combine_ordinary, Staging::direct},
    {Site::outputs, Phase::combine_sums, Staging::direct},
    {Site::outputs, Phase::combine_routes, Staging::direct},
    {Site::pulled, Phase::combine_in_place, Staging::direct},
    {Site::ledger_rows, Phase::ledger, Staging::direct},
    {Site::local_sends, Phase::ledger, Staging::direct},           // precedes ledger_rows: copies of the rows
    {Site::ledger_rows, Phase::ledger_sentinel, Staging::direct},  // signatures; the flag's other orderings: ReuseOfBuffers
    {Site::returned, Phase::ledger_sentinel, Staging::direct},
    {Site::ring_tail, Phase::dispatch, Staging::ring},
    {Site::ring_tail, Phase::cached, Staging::ring},
    {Site::ring_tail, Phase::combine_in_place, Staging::ring},
    {Site::ring_head, Phase::dispatch, Staging::ring},
    {Site::ring_head, Phase::cached, Staging::ring},
    {Site::ring_head, Phase::combine_in_place, Staging::ring},
    {Site::call_header, Phase::low_latency, Staging::direct},  // its value is read; the flag's other orderings: ReuseOfBuffers
    {Site::message, Phase::low_latency, Staging::direct},
    {Site::returned, Phase::low_latency, Staging::direct},
    {Site::call_header, Phase::flat, Staging::direct},
    {Site::message, Phase::flat, Staging::direct},
    {Site::returned, Phase::flat, Staging::direct},
    {Site::layer_told, Phase::fused, Staging::direct},
    {Site::layer_rows, Phase::fused, Staging::direct},
    {Site::layer_tiles, Phase::fused, Staging::direct},
    {Site::layer_returned, Phase::fused, Staging::direct},
    {Site::local_sends, Phase::fused, Staging::direct},  // precedes layer_told: tokens and announced routes
    {Site::layer_told, Phase::fused_per_rank, Staging::direct},
    {Site::layer_rows, Phase::fused_per_rank, Staging::direct},
    {Site::layer_tiles, Phase::fused_per_rank, Staging::direct},
    {Site::layer_returned, Phase::fused_per_rank, Staging::direct},
    {Site::local_sends, Phase::fused_per_rank, Staging::direct},
    // Flags set by proxies.
    {Site::counts, Phase::dispatch_hosts, Staging::direct},
    {Site::placement, Phase::dispatch_hosts, Staging::direct},
    {Site::rows, Phase::dispatch_hosts, Staging::direct},
    {Site::rows, Phase::cached_hosts, Staging::direct},
    {Site::placement, Phase::rows_back_hosts, Staging::direct},
    {Site::outputs, Phase::sums_back_hosts, Staging::direct},
    {Site::pulled, Phase::rows_back_hosts, Staging::direct},
    {Site::local_sends, Phase::cached_hosts, Staging::direct},
    {Site::local_sends, Phase::rows_back_hosts, Staging::direct},
    {Site::local_sends, Phase::sums_back_hosts, Staging::direct},
    {Site::call_header, Phase::low_latency_hosts, Staging::direct},
    {Site::message, Phase::low_latency_hosts, Staging::direct},
    // `returned` is excluded: ThreadSanitizer treats all sockets as one synchronization object, and ranks use their sockets
    // after their rows.
};

/// Returns why weakening this flag's orders is undetectable, or null if it must be detected.
const char* redundant_because(Site site) {
  switch (site) {
    case Site::none: return "the abort word says all it has to say itself: nothing else is read because of it";
    case Site::barrier: return "the group barrier goes through the bootstrap; the site only names it in errors";
    case Site::network:
      return "the pool's start and end of a phase order the warps of a rank; the site only names a round in errors";
    case Site::expert_count: return "its value is all that it says: it is posted, without an order";
    case Site::counts:
    case Site::placement:
    case Site::rows:
    case Site::outputs:
    case Site::pulled:
    case Site::ledger_rows:
    case Site::ring_tail:
    case Site::ring_head:
    case Site::call_header:
    case Site::message:
    case Site::returned:
    case Site::layer_told:
    case Site::layer_rows:
    case Site::layer_tiles:
    case Site::layer_returned:
    case Site::local_sends: break;
  }
  return nullptr;
}

/// Real payload through every flag: three ranks, repeated experts (aliases), and rings with few slots.
std::shared_ptr<const Case> scenario_of(Phase phase, Staging staging) {
  Scenario s;
  s.problem.world = 3;
  s.problem.experts = 6;
  s.problem.topk = 3;
  const bool by_rank = phase == Phase::dispatch_out || phase == Phase::rows_back_hosts || phase == Phase::combine_in_place ||
                       phase == Phase::combine_ordinary;
  s.problem.layout = by_rank ? Layout::rank_major : Layout::expert_major;
  if (phase == Phase::combine_routes) s.order = CombineOrder::per_route;
  s.tokens = {17, 16, 15};
  if (on_hosts(phase)) {
    s.problem.world = 4;
    s.problem.experts = 8;
    s.problem.topk = 4;
    s.tokens = {17, 16, 15, 16};
    if (phase == Phase::sums_back_hosts) {
      s.order = CombineOrder::per_host;
      s.tokens = {67, 66, 65, 66};  // gives every warp rows in each round
    }
  }
  s.staging = staging;
  s.ring = {2, 2, 4};
  return make_case(s);
}

/// Real payload for ledger combine: several chunks of rows per warp and owner, and rows from all ranks for most tokens.
std::shared_ptr<const LedgerCase> ledger_scenario(Phase phase) {
  LedgerScenario s;
  s.problem.world = 3;
  s.problem.experts = 6;
  s.problem.topk = 3;
  s.tokens = {17, 16, 15};
  s.hidden = phase == Phase::ledger_sentinel ? 2048 : 2044;  // rows that are not multiples of 16 bytes use flags
  return make_ledger_case(s);
}

/// All ranks are at the same point when memory orders change and between calls. Because a barrier orders everything, each call
/// is tested separately.
class StepRunner {
 public:
  StepRunner(switchyard::Group& group, const std::optional<Mutant>& mutant) : group_(group), mutant_(mutant) {}

 protected:
  template <class F>
  void step(bool weakened, F&& call) {
    if (mutant_ && weakened) set(std::memory_order_relaxed);
    call();
    if (mutant_ && weakened) set(std::memory_order_acq_rel);
    group_.barrier();
  }

  switchyard::Group& group_;

 private:
  void set(std::memory_order order) {
    group_.barrier();
    if (group_.rank() == 0) switchyard::detail::set_order(mutant_->site, mutant_->side, order);
    group_.barrier();
  }
  const std::optional<Mutant>& mutant_;
};

class LedgerRunner : StepRunner {
 public:
  LedgerRunner(switchyard::Group& group, const LedgerCase& c, Failures& f, const std::optional<Mutant>& mutant)
      : StepRunner(group, mutant), c_(c), f_(f), ledger_(group, make_config(c)) {}

  void run() {
    for (int i = 0; i < 4; ++i) {
      LedgerRankData data(c_, group_.rank(), i);
      const auto prepared = ledger_.prepare(data.tables());
      step(true, [&] {
        ledger_.combine(data.y(), data.probs(), prepared, data.out().data());
        data.check_out(f_);
      });
    }
  }

 private:
  const LedgerCase& c_;
  Failures& f_;
  switchyard::LedgerCombine ledger_;
};

class PhaseRunner : StepRunner {
 public:
  PhaseRunner(switchyard::Group& group, const Case& c, Failures& f, const std::optional<Mutant>& mutant)
      : StepRunner(group, mutant), c_(c), f_(f), exchange_(group, make_config(c)) {}

  void run(Phase phase) {
    for (int i = 0; i < 4; ++i) {
      RankData first(c_, group_.rank(), 2 * i), again(c_, group_.rank(), 2 * i + 1);
      switchyard::Dispatched d;
      switchyard::DispatchOptions o;
      const int64_t max = switchyard::max_rows(exchange_.config(), group_.size()), hidden = c_.scenario.hidden;
      std::vector<std::byte> mine(static_cast<size_t>(max * hidden * 2));
      const switchyard::Rows out{mine.data(), max, hidden, DType::bf16};
      if (phase == Phase::dispatch_out) o.out = &out;
      step(phase == Phase::dispatch || phase == Phase::dispatch_out || phase == Phase::dispatch_hosts, [&] {
        d = exchange_.dispatch(first.x(), first.ids(), first.weights(), o);
        first.check_dispatched(d, f_);
      });
      if (phase == Phase::cached || phase == Phase::cached_hosts) {
        step(true, [&] { again.check_dispatched(exchange_.dispatch(again.x(), d.handle), f_); });
      }
      if (phase <= Phase::cached || phase == Phase::dispatch_hosts || phase == Phase::cached_hosts) continue;
      switchyard::RowBuffer buffer;
      std::vector<std::byte> memory(static_cast<size_t>(d.rows * c_.scenario.hidden * 2));
      switchyard::Rows y{memory.data(), d.rows, c_.scenario.hidden, DType::bf16};
      if (phase == Phase::combine_in_place || phase == Phase::rows_back_hosts) {
        buffer = exchange_.allocate_rows(d.handle, DType::bf16);
        y = buffer.rows();
      }
      step(true, [&] {
        first.fill_outputs(y);
        exchange_.combine(y, d.handle, first.out(), first.combine_options());
        std::memset(y.data, 0xEE, memory.size());
        first.check_combined(f_);
      });
    }
  }

 private:
  const Case& c_;
  Failures& f_;
  switchyard::NormalExchange exchange_;
};

constexpr size_t kLowLatencyHeap = size_t{1} << 20;

void weaken(switchyard::Group& group, const std::optional<Mutant>& mutant, std::memory_order order) {
  if (!mutant) return;
  group.barrier();
  if (group.rank() == 0) switchyard::detail::set_order(mutant->site, mutant->side, order);
  group.barrier();
}

/// Queued low-latency calls with both ways of sending, both orders, and repeated experts. There is no barrier between them,
/// because a flag also orders data that a later call overwrites.
void run_low_latency(switchyard::Group& group, Failures& f, const std::optional<Mutant>& mutant) {
  LowLatencyScript s;
  s.world = group.size();
  s.config.hidden = 272;
  s.config.num_experts = 5;
  s.config.topk = 3;
  s.config.max_tokens = 7;
  s.config.pieces = 2;
  const auto tokens = [&](std::vector<int64_t> of_four) {
    of_four.resize(static_cast<size_t>(s.world));
    return of_four;
  };
  s.dispatch(tokens({7, 6, 5, 6}), Routing::duplicates).x_pattern = Pattern::random_values;
  s.combine(CombineOrder::per_route);
  s.dispatch(tokens({5, 7, 6, 7})).x_pattern = Pattern::random_values;
  s.combine(CombineOrder::per_rank);
  for (const Sending sending : {Sending::per_rank, Sending::per_route}) {
    s.config.sending = sending;
    const auto c = make_low_latency_case(s);
    switchyard::LowLatencyExchange exchange(group, s.config);
    weaken(group, mutant, std::memory_order_relaxed);
    run_on(group, exchange, *c, f);
    weaken(group, mutant, std::memory_order_acq_rel);
  }
}

/// Queued flat exchanges, each in a single launch.
void run_flat(switchyard::Group& group, Failures& f, const std::optional<Mutant>& mutant) {
  FlatScript s;
  s.world = 3;
  s.config.hidden = 272;
  s.config.num_experts = 5;
  s.config.topk = 3;
  s.config.max_tokens = 7;
  s.config.pieces = 2;
  s.config.scales = ScaleKind::none;
  s.call({7, 6, 5}, Routing::duplicates);
  s.call({5, 7, 6}).scaled = false;
  s.call({6, 5, 7});
  for (const Sending sending : {Sending::per_rank, Sending::per_route}) {
    s.config.sending = sending;
    const auto c = make_flat_case(s);
    switchyard::LowLatencyExchange exchange(group, s.config);
    weaken(group, mutant, std::memory_order_relaxed);
    run_on(group, exchange, *c, f);
    weaken(group, mutant, std::memory_order_acq_rel);
  }
}

/// Runs complete layers without a group, with nothing between the calls except a substitute for the plan.
std::vector<std::string> run_fused(bool per_rank, const std::optional<Mutant>& mutant) {
  FusedScenario s;
  s.per_rank = per_rank;
  s.world = 3;
  s.experts = 5;
  s.topk = 3;
  s.tokens = {17, 16, 15};
  s.up_columns = s.down_columns = 2;
  s.blocks = s.warps = 2;
  s.calls = 8;
  if (mutant) switchyard::detail::set_order(mutant->site, mutant->side, std::memory_order_relaxed);
  return run_fused_layer(s);
}

struct ChildEnd {
  int status = -1;
  std::string output;
};

/// Runs the scenario in a child, with `mutant` if given, and returns its exit status and output.
ChildEnd run_child(Phase phase, Staging staging, const std::optional<Mutant>& mutant) {
  const auto c = scenario_of(phase, on_hosts(phase) ? Staging::direct : staging);
  const auto ledger = ledger_scenario(phase);
  int ends[2];
  if (::pipe(ends) != 0) return {};
  std::fflush(nullptr);
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::dup2(ends[1], 1);
    ::dup2(ends[1], 2);
    Fleet fleet;
    fleet.world = c->problem.world;
    if (on_hosts(phase)) ::setenv("SWITCHYARD_HOST", "a,a,b,b", 1);
    fleet.options.heap_bytes =
        heap_bytes({c}) + switchyard::LedgerCombine::heap_bytes(make_config(*ledger), 3) + kLowLatencyHeap;
    fleet.options.num_blocks = fleet.options.num_warps = 2;
    const auto on_group = [&](switchyard::Group& group, Failures& f) {
      switchyard::detail::cross_in_rounds_of(group, 800);
      if (phase == Phase::ledger || phase == Phase::ledger_sentinel)
        LedgerRunner(group, *ledger, f, mutant).run();
      else if (phase == Phase::low_latency || phase == Phase::low_latency_hosts)
        run_low_latency(group, f, mutant);
      else if (phase == Phase::flat)
        run_flat(group, f, mutant);
      else
        PhaseRunner(group, *c, f, mutant).run(phase);
    };
    const bool per_rank = phase == Phase::fused_per_rank;
    const auto failures = per_rank || phase == Phase::fused ? run_fused(per_rank, mutant) : run_threads(fleet, on_group);
    std::fprintf(stderr, "%s", joined(failures).c_str());
    std::fflush(nullptr);
    ::_exit(failures.empty() ? 0 : 1);
  }
  ::close(ends[1]);
  ChildEnd end;
  char buffer[4096];
  for (ssize_t n; (n = ::read(ends[0], buffer, sizeof buffer)) > 0;) end.output.append(buffer, static_cast<size_t>(n));
  ::close(ends[0]);
  int status = 0;
  ::waitpid(pid, &status, 0);
  end.status = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  return end;
}

std::string summary_of(const std::string& output) {
  const size_t at = output.find("SUMMARY:");
  return at == std::string::npos ? output.substr(0, 400) : output.substr(at, std::min<size_t>(output.find('\n', at) - at, 160));
}

std::vector<Mutant> all_mutants() {
  std::vector<Mutant> all;
  for (const Side side : {Side::acquire, Side::release}) {
    for (const Use& use : kUses) all.push_back({use.site, side, use.phase, use.staging});
  }
  return all;
}

class Mutation : public testing::TestWithParam<Mutant> {};

TEST_P(Mutation, IsSeen) {
  const Mutant& m = GetParam();
  ChildEnd end;
  int quiet = 0;
  while ((end = run_child(m.phase, m.staging, m)).status == 0 && ++quiet < kRunsOfSurvivor) continue;
  EXPECT_EQ(end.status, kRaceReported) << "survived " << quiet << " runs: " << end.output;
  std::printf("seen %s after %d quiet runs: %s\n", to_string(m).c_str(), quiet, summary_of(end.output).c_str());
}

INSTANTIATE_TEST_SUITE_P(Orders, Mutation, testing::ValuesIn(all_mutants()), [](const auto& m) { return to_string(m.param); });

TEST(Control, IsCleanWithoutAMutation) {
  for (const Staging staging : {Staging::direct, Staging::ring}) {
    for (size_t i = 0; i < std::size(kPhaseNames); ++i) {
      const ChildEnd end = run_child(static_cast<Phase>(i), staging, std::nullopt);
      EXPECT_EQ(end.status, 0) << kPhaseNames[i] << ": " << end.output;
    }
  }
}

/// Every flag is either tested above or documented as redundant; weakening a redundant flag must be undetectable in every call.
TEST(Survivors, AreDocumented) {
  for (int i = 0; i < switchyard::detail::kNumSites; ++i) {
    const Site site = static_cast<Site>(i);
    const bool tried = std::any_of(std::begin(kUses), std::end(kUses), [&](const Use& use) { return use.site == site; });
    const char* reason = redundant_because(site);
    EXPECT_NE(tried, reason != nullptr) << switchyard::detail::site_name(site);
    if (!reason) continue;
    std::printf("survivor %s: %s\n", switchyard::detail::site_name(site), reason);
    for (const Side side : {Side::acquire, Side::release}) {
      for (const Staging staging : {Staging::direct, Staging::ring}) {
        for (const Phase phase : {Phase::cached, Phase::combine_ordinary, Phase::ledger, Phase::low_latency, Phase::flat,
                                  Phase::fused, Phase::fused_per_rank}) {
          const ChildEnd end = run_child(phase, staging, Mutant{site, side, phase, staging});
          EXPECT_EQ(end.status, 0) << "documented as redundant (" << reason << "), but: " << end.output;
        }
      }
    }
  }
}

}  // namespace
}  // namespace harness
