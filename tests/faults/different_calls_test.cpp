// SPDX-License-Identifier: Apache-2.0
// Ranks that make different collective calls: every pair of calls ends with a mismatch on all ranks, long before the deadline.
// The pairs cover one mode or two, one object or two, and setup calls.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "arch/cpu/cpu_arch.hpp"
#include "harness/fleet.hpp"
#include "modes/fused/fused_moe_rig.hpp"
#include "modes/low_latency/low_latency_rig.hpp"
#include "modes/normal/normal_rig.hpp"
#include "protocol/counts.hpp"
#include "switchyard/expert_map.hpp"
#include "switchyard/ledger.hpp"

namespace harness {
namespace {

using namespace std::chrono_literals;
using switchyard::CombineOptions;
using switchyard::Dispatched;
using switchyard::DispatchOptions;
using switchyard::DType;
using switchyard::ErrorCode;
using switchyard::Group;
using switchyard::Layout;
using switchyard::LedgerCombine;
using switchyard::LedgerConfig;
using switchyard::LowLatencyExchange;
using switchyard::NormalExchange;
using switchyard::Staging;

constexpr int kWorld = 3;
/// A deadline longer than the time limit of this program: a wait that no error ends is a failure.
constexpr auto kNever = 3600s;

/// Objects of all modes, ready for each of their calls.
struct Rig {
  explicit Rig(Group& g)
      : group(g),
        rank_major(g),
        twin(g),
        expert_major(g, NormalRig::config(Staging::direct, Layout::expert_major)),
        ring(g, NormalRig::config(Staging::ring)),
        low(g, low_latency_config()),
        low_twin(g, low_latency_config()),
        ledger(g, ledger_config()),
        ledger_twin(g, ledger_config()),
        fused(g),
        of_rank_major(rank_major.dispatch()),
        of_expert_major(expert_major.dispatch()),
        of_ring(ring.dispatch()),
        prepared(ledger.prepare(of_expert_major.handle.ledger())),
        prepared_twin(ledger_twin.prepare(of_expert_major.handle.ledger())) {
    low.dispatch();
    low_twin.dispatch();
  }
  static switchyard::LowLatencyConfig low_latency_config() {
    auto c = LowLatencyRig::config();
    c.scales = switchyard::ScaleKind::none;  // required by moe_all_to_all
    return c;
  }
  static LedgerConfig ledger_config() {
    LedgerConfig c;
    c.hidden = NormalRig::kHidden;
    c.num_experts = NormalRig::kExperts;
    c.topk = NormalRig::kTopk;
    c.max_tokens = NormalRig::kTokens;
    c.dtype = DType::bf16;
    return c;
  }
  void combine_by(LedgerCombine& object, const switchyard::PreparedLedger& of) {
    object.combine(of_expert_major.x, nullptr, of, rank_major.out.data());
  }

  Group& group;
  NormalRig rank_major, twin, expert_major, ring;
  LowLatencyRig low, low_twin;
  LedgerCombine ledger, ledger_twin;
  FusedMoeRig fused;
  Dispatched of_rank_major, of_expert_major, of_ring;
  switchyard::PreparedLedger prepared, prepared_twin;
};

struct Call {
  const char* name;
  void (*make)(Rig& rig);
  const char* in_text;  ///< name of the call in an error about different calls
};

void make_another(NormalRig& rig, const Dispatched& d) { (void)rig.exchange.dispatch(rig.x(), d.handle); }

const Call kCalls[] = {
    {"dispatch", [](Rig& r) { r.rank_major.dispatch(); }, "dispatch of object 1"},
    {"cached", [](Rig& r) { make_another(r.rank_major, r.of_rank_major); }, "cached dispatch of object 1"},
    {"combine", [](Rig& r) { r.rank_major.combine(r.of_rank_major); }, "combine of object 1"},
    {"dispatch_of_twin", [](Rig& r) { r.twin.dispatch(); }, "dispatch of object 2"},
    {"combine_of_twin", [](Rig& r) { r.twin.combine(r.of_rank_major); }, "combine of object 2"},
    {"dispatch_by_expert", [](Rig& r) { r.expert_major.dispatch(); }, "dispatch of object 3"},
    {"cached_by_expert", [](Rig& r) { make_another(r.expert_major, r.of_expert_major); }, "cached dispatch of object 3"},
    {"combine_by_expert", [](Rig& r) { r.expert_major.combine(r.of_expert_major); }, "combine of object 3"},
    {"ring_dispatch", [](Rig& r) { r.ring.dispatch(); }, "dispatch of object 4"},
    {"ring_cached", [](Rig& r) { make_another(r.ring, r.of_ring); }, "cached dispatch of object 4"},
    {"ring_combine", [](Rig& r) { r.ring.combine(r.of_ring); }, "combine of object 4"},
    {"low_latency_dispatch", [](Rig& r) { r.low.dispatch(); }, "dispatch of object 5"},
    {"low_latency_combine", [](Rig& r) { r.low.combine(); }, "combine of object 5"},
    {"all_to_all", [](Rig& r) { r.low.exchange.moe_all_to_all(r.low.x(), r.low.expert_ids(), r.low.out.data()); },
     "moe_all_to_all of object 5"},
    {"halves_of_twin", [](Rig& r) { r.low_twin.dispatch_send()(); }, "dispatch of object 6"},
    {"halves_of_combine_of_twin", [](Rig& r) { r.low_twin.combine_send()(); }, "combine of object 6"},
    {"ledger_combine", [](Rig& r) { r.combine_by(r.ledger, r.prepared); }, "ledger combine of object 7"},
    {"ledger_combine_of_twin", [](Rig& r) { r.combine_by(r.ledger_twin, r.prepared_twin); }, "ledger combine of object 8"},
    {"barrier", [](Rig& r) { r.group.barrier(); }, "barrier"},
    {"all_gather",
     [](Rig& r) {
       char all[kWorld];
       r.group.all_gather("x", 1, all);
     },
     "all_gather"},
    {"register_memory",
     [](Rig& r) {
       static char memory[64];
       (void)r.group.register_memory(memory, sizeof memory);
     },
     "register_memory"},
    {"sleep", [](Rig& r) { r.group.sleep(); }, "sleep"},
    {"normal_exchange", [](Rig& r) { NormalExchange e(r.group, NormalRig::config()); }, "construction of object 10"},
    {"low_latency_exchange", [](Rig& r) { LowLatencyExchange e(r.group, LowLatencyRig::config()); },
     "construction of object 10"},
    {"ledger_combine_object", [](Rig& r) { LedgerCombine e(r.group, Rig::ledger_config()); }, "construction of object 10"},
    {"fused_layer", [](Rig& r) { r.fused.round(); }, "MoE layer of object 9"},
    {"fused_layer_object", [](Rig& r) { FusedMoeRig e(r.group); }, "construction of object 10"},
};

class DifferentCalls : public testing::TestWithParam<size_t> {};

/// Rank `odd` makes call a, and the others make call b. Afterwards, every call reports the mismatch again, unless the only
/// failure was that an object could not be created.
TEST_P(DifferentCalls, EndWithMismatchAtOnce) {
  const Call& a = kCalls[GetParam()];
  for (size_t i = 0; i < std::size(kCalls); ++i) {
    const Call& b = kCalls[i];
    if (i == GetParam()) continue;
    const int odd = static_cast<int>((GetParam() + i) % kWorld);
    const bool both_made = std::string(a.in_text) == b.in_text;  // detected when configurations are compared
    const auto all = outcomes(kWorld, options_with(kNever), [&](Group& group) {
      Rig rig(group);
      const Outcome o = outcome_of([&] { (group.rank() == odd ? a : b).make(rig); });
      if (!both_made) {
        EXPECT_EQ(code_name(outcome_of([&] { rig.twin.dispatch(); }).code), "mismatch");
      }
      if (o.code != ErrorCode::ok) throw switchyard::Error(o.code, o.text);
    });
    for (const Outcome& o : all) {
      EXPECT_EQ(code_name(o.code), "mismatch") << a.name << " against " << b.name << ": " << o.text;
      EXPECT_TRUE(both_made || o.text.find(a.in_text) != std::string::npos) << a.name << ", " << b.name << ": " << o.text;
      EXPECT_TRUE(both_made || o.text.find(b.in_text) != std::string::npos) << a.name << ", " << b.name << ": " << o.text;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(AllPairs, DifferentCalls, testing::Range(size_t{0}, std::size(kCalls)),
                         [](const auto& p) { return std::string(kCalls[p.param].name); });

/// An option, its value on rank 0 and its value on rank 1.
struct Differing {
  const char *option, *value, *other;
};

/// A call that rank 1 makes with other options; without any: what the errors say instead.
struct OptionCase {
  const char* name;
  std::vector<Differing> options;
  void (*call)(Rig& rig, bool other);
  const char* text = "";
};

/// The part of the error of a difference that `rank` found.
std::string text_found_by(int rank, const OptionCase& of) {
  std::string text = of.text;
  for (const Differing& d : of.options) {
    const std::string on_0 = std::string(d.value) + " on rank 0", on_1 = std::string(d.other) + " on rank 1";
    text += (text.empty() ? "" : ", ") + std::string(d.option) + " = " +
            (rank == 0 ? on_0 + " and " + on_1 : on_1 + " and " + on_0);
  }
  return text;
}

/// A map whose slots are the experts of the rig's object.
switchyard::ExpertMap slots_of(const LowLatencyRig& rig) {
  const int experts = rig.exchange.config().num_experts;
  return switchyard::home_map(experts, 2, experts / 2);
}

const OptionCase kOptionCases[] = {
    {"type_of_rows",
     {{"x.dtype", "bf16", "f16"}},
     [](Rig& r, bool other) {
       auto x = r.rank_major.x();
       if (other) x.dtype = DType::f16;
       (void)r.rank_major.exchange.dispatch(x, r.rank_major.expert_ids());
     }},
    {"quantize",
     {{"DispatchOptions::quantize", "none", "f32"}},
     [](Rig& r, bool other) {
       DispatchOptions o;
       if (other) o.quantize = switchyard::ScaleKind::f32;
       (void)r.rank_major.exchange.dispatch(r.rank_major.x(), r.rank_major.expert_ids(), nullptr, o);
     }},
    {"padding",
     {{"DispatchOptions::padding", "zero", "unspecified"}},
     [](Rig& r, bool other) {
       DispatchOptions o;
       if (other) o.padding = switchyard::Padding::unspecified;
       (void)r.expert_major.exchange.dispatch(r.expert_major.x(), r.of_expert_major.handle, o);
     }},
    {"size",
     {{"DispatchOptions::size", "exact", "worst_case"}},
     [](Rig& r, bool other) {
       DispatchOptions o;
       o.size = other ? switchyard::SizePolicy::worst_case : switchyard::SizePolicy::exact;
       (void)r.ring.exchange.dispatch(r.ring.x(), r.ring.expert_ids(), nullptr, o);
     }},
    {"two_options",
     {{"DispatchOptions::padding", "zero", "unspecified"}, {"DispatchOptions::overflow", "fail", "drop_and_report"}},
     [](Rig& r, bool other) {
       DispatchOptions o;
       o.size = switchyard::SizePolicy::capacity;
       o.capacity = 64;
       if (other) o.overflow = switchyard::Overflow::drop_and_report;
       if (other) o.padding = switchyard::Padding::unspecified;
       (void)r.rank_major.exchange.dispatch(r.rank_major.x(), r.rank_major.expert_ids(), nullptr, o);
     }},
    {"order",
     {{"CombineOptions::order", "per_rank", "per_route"}},
     [](Rig& r, bool other) {
       CombineOptions o;
       if (other) o.order = switchyard::CombineOrder::per_route;
       r.expert_major.exchange.combine(r.of_expert_major.x, r.of_expert_major.handle, r.expert_major.out.data(), o);
     }},
    {"apply_weights",
     {{"CombineOptions::apply_weights", "true", "false"}},
     [](Rig& r, bool other) {
       CombineOptions o;
       o.apply_weights = !other;
       r.expert_major.exchange.combine(r.of_expert_major.x, r.of_expert_major.handle, r.expert_major.out.data(), o);
     }},
    {"handles",
     {},
     [](Rig& r, bool other) {
       const switchyard::Handle second = r.rank_major.dispatch().handle;
       (void)r.rank_major.exchange.dispatch(r.rank_major.x(), other ? second : r.of_rank_major.handle);
     },
     "the handles are of different dispatches"},
    {"weights",
     {},
     [](Rig& r, bool other) {
       (void)r.rank_major.exchange.dispatch(r.rank_major.x(), r.rank_major.expert_ids(),
                                            other ? nullptr : r.rank_major.weights.data());
     },
     "some ranks passed topk_weights and others did not"},
    {"low_latency_order",
     {{"LowLatencyCombineOptions::order", "per_route", "per_rank"}},
     [](Rig& r, bool other) {
       r.low.combine(other ? switchyard::CombineOrder::per_rank : switchyard::CombineOrder::per_route);
     }},
    {"low_latency_type",
     {{"y.dtype", "bf16", "f16"}},
     [](Rig& r, bool other) {
       auto y = r.low.y();
       if (other) y.dtype = DType::f16;
       r.low.exchange.combine(y, r.low.output, r.low.out.data(), {switchyard::CombineOrder::per_route});
     }},
    {"selector",
     {{"LowLatencyDispatchOptions::selector", "null", "given"}},
     [](Rig& r, bool other) {
       switchyard::SlotSelector selector(r.group, slots_of(r.low));
       auto o = r.low.options();
       if (other) o.selector = &selector;
       r.low.exchange.dispatch(r.low.x(), r.low.expert_ids(), r.low.output, o);
     }},
    {"selector_of_halves",
     {{"LowLatencyDispatchOptions::selector", "given", "null"}},
     [](Rig& r, bool other) {
       switchyard::SlotSelector selector(r.group, slots_of(r.low));
       auto o = r.low.options();
       if (!other) o.selector = &selector;
       r.low.exchange.dispatch_send(r.low.x(), r.low.expert_ids(), r.low.output, o)();
     }},
    {"selector_of_all_to_all",
     {{"AllToAllOptions::selector", "given", "null"}},
     [](Rig& r, bool other) {
       switchyard::SlotSelector selector(r.group, slots_of(r.low));
       switchyard::AllToAllOptions o;
       if (!other) o.selector = &selector;
       r.low.exchange.moe_all_to_all(r.low.x(), r.low.expert_ids(), r.low.out.data(), o);
     }},
    {"add",
     {{"MoeLayerCall::add", "false", "true"}},
     [](Rig& r, bool other) {
       switchyard::detail::FusedMoeCall o;
       o.add = other;
       r.fused.layer.forward(r.fused.rows.data(), r.fused.expert_ids(), r.fused.weights.data(), r.fused.out.data(), o);
     }},
};

class DifferentOptions : public testing::TestWithParam<size_t> {};

/// Both ranks name the option, both values and the rank of each, whichever of them finds the difference.
TEST_P(DifferentOptions, AreNamed) {
  const OptionCase& of = kOptionCases[GetParam()];
  const auto all = outcomes(2, options_with(90s), [&](Group& group) {
    Rig rig(group);
    of.call(rig, group.rank() == 1);
  });
  const std::string either = text_found_by(0, of), other = text_found_by(1, of);
  for (const Outcome& o : all) {
    EXPECT_EQ(code_name(o.code), "mismatch") << o.text;
    EXPECT_TRUE(o.text.find(either) != std::string::npos || o.text.find(other) != std::string::npos)
        << either << ", or " << other << ", not in\n"
        << o.text;
  }
}

INSTANTIATE_TEST_SUITE_P(All, DifferentOptions, testing::Range(size_t{0}, std::size(kOptionCases)),
                         [](const auto& p) { return std::string(kOptionCases[p.param].name); });

/// The mismatch is reported even if the mismatched calls only send and the next calls of all ranks match.
TEST(DifferentCallsLater, OfRanksThatHaveOnlySent) {
  const auto all = outcomes(2, options_with(90s), [&](Group& group) {
    LowLatencyRig a(group), b(group), c(group);
    const auto received = (group.rank() == 0 ? a : b).dispatch_send();
    const auto also = c.dispatch_send();
    also();
    received();
  });
  for (const Outcome& o : all) {
    EXPECT_EQ(code_name(o.code), "mismatch") << o.text;
    EXPECT_NE(o.text.find("dispatch of object 1"), std::string::npos) << o.text;
  }
}

TEST(DifferentCallsLater, WhileTheGroupSleeps) {
  for (const bool gather : {false, true}) {
    const auto all = outcomes(kWorld, options_with(90s), [&](Group& group) {
      group.sleep();
      std::vector<uint64_t> words(kWorld);
      if (group.rank() != 1)
        group.wake();
      else if (gather)
        group.all_gather(words.data(), 8, words.data());
      else
        group.barrier();
    });
    for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "mismatch") << o.text;
  }
}

/// Ranks that throw before any collective step stay in step: after misuse on all ranks, local calls, and calls rejected during
/// sleep.
TEST(SameCalls, AfterRefusedOnes) {
  const auto all = outcomes(2, options_with(60s), [&](Group& group) {
    NormalRig rig(group);
    LowLatencyRig low(group);
    const auto refused_on = [&](int rank, const std::function<void()>& call) {
      EXPECT_TRUE(group.rank() != rank || outcome_of(call).code == ErrorCode::invalid_argument);
    };
    refused_on(0, [&] { group.wake(); });
    group.sleep();
    refused_on(1, [&] { rig.dispatch(); });
    refused_on(0, [&] { group.sleep(); });
    group.wake();
    for (int i = 0; i < 70; ++i) {
      const Dispatched d = rig.dispatch();
      const auto received = low.dispatch_send();
      if (group.rank() == 0) (void)rig.exchange.allocate_rows(d.handle, DType::bf16);
      rig.combine(d);
      received();
      low.combine();
      if (i % 16 == 0) group.barrier();
    }
  });
  for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "ok") << o.text;
}

/// Ranks do not number their calls, as on GPUs: a rank waiting for a placement receives the counts from a rank that makes a new
/// dispatch.
TEST(CountsInACallWithoutCounts, AreAMismatch) {
  namespace detail = switchyard::detail;
  constexpr int kRanks = 2;
  std::vector<uint64_t> memory[kRanks];
  detail::HeapView view;
  view.world = kRanks;
  const detail::ControlLayout control{detail::kHeapHeaderBytes, kRanks, 4};
  for (int r = 0; r < kRanks; ++r) {
    memory[r].resize((detail::kHeapHeaderBytes + static_cast<size_t>(control.bytes())) / 8);
    view.base[r] = reinterpret_cast<std::byte*>(memory[r].data());
  }
  detail::FaultRecord faults[kRanks];
  const auto run = [&](int rank, detail::Operation operation) {
    uint64_t claims = 0;
    detail::WaitCounter waits[kRanks];
    detail::CallContext call;
    call.heap = view;
    call.heap.rank = rank;
    call.epoch = 5;
    call.timeout_ns = uint64_t{60} * 1000000000u;
    call.operation = operation;
    call.abort_word = memory[rank].data();
    const uint64_t left = 0;
    call.left_ranks = &left;
    call.fault = &faults[rank];
    call.fault_claims = &claims;
    call.waits = waits;
    detail::CpuWarp warp(0, 0, 1, 1, nullptr);
    if (operation == detail::Operation::dispatch) {
      const std::vector<std::byte> row(static_cast<size_t>(control.counts_row_bytes()));
      EXPECT_FALSE(detail::exchange_counts<detail::Cpu>(warp, call, control, row.data()));
      return;
    }
    detail::publish_placement<detail::Cpu>(warp, call, control, detail::Placement{});
    EXPECT_FALSE(detail::wait_placements<detail::Cpu>(warp, call, control, detail::Site::placement));
    for (int r = 0; r < kRanks; ++r)  // like the rank's host
      std::atomic_ref(memory[r][0]).store(detail::make_abort_word(rank, static_cast<int>(ErrorCode::mismatch)));
  };
  std::thread fresh([&] { run(0, detail::Operation::dispatch); });
  run(1, detail::Operation::combine);
  fresh.join();
  EXPECT_TRUE(faults[1].mismatch);
  EXPECT_EQ(faults[1].awaited_rank, 0);
  EXPECT_TRUE(faults[0].aborted);
}

#if !defined(__SANITIZE_THREAD__)
TEST(DifferentCallsOfProcesses, EndWithMismatchAtOnce) {
  const std::pair<size_t, size_t> pairs[] = {{0, 2}, {1, 18}, {11, 22}, {16, 5}, {18, 19}, {21, 13}, {23, 20}};
  for (const auto& [a, b] : pairs) {
    Fleet fleet;
    fleet.world = kWorld;
    fleet.options = options_with(kNever);
    const auto failures = run_processes(fleet, [&](Group& group, Failures& f) {
      Rig rig(group);
      const Outcome o = outcome_of([&] { kCalls[group.rank() == 1 ? a : b].make(rig); });
      f.equal(std::string("mismatch"), code_name(o.code), "code of " + o.text);
    });
    EXPECT_EQ(joined(failures), "") << kCalls[a].name << " against " << kCalls[b].name;
  }
}
#endif

}  // namespace
}  // namespace harness
