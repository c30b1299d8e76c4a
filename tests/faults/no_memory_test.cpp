// SPDX-License-Identifier: Apache-2.0
// A rank runs out of memory in a call: each allocation in each collective call fails in turn, on one rank or in one of its
// workers. The library always throws Error, and the peers receive it long before their deadline. If all ranks fail in step, the
// group stays usable.
//
// Executable: no_memory_test, which replaces every operator new and delete, because a sanitizer with its own operators would
// report a mismatch for a block allocated by one set and freed by the other. Label: none. Timeout: 120 s.
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdlib>
#include <new>

#include "modes/fused/fused_moe_rig.hpp"
#include "modes/low_latency/low_latency_rig.hpp"
#include "modes/normal/normal_rig.hpp"
#include "switchyard/ledger.hpp"
#include "testing/test_access.hpp"

namespace {

thread_local int allocations_left = -1;               // allocations left for this thread; negative: no limit
thread_local bool is_rank = false, no_pages = false;  // no_pages: allocations of whole pages fail
std::atomic<int> of_workers_left{-1};

void* try_to_take(size_t bytes, size_t alignment) noexcept {
  if (no_pages && alignment >= 4096) return nullptr;
  if (allocations_left >= 0 && allocations_left-- == 0) return nullptr;
  if (!is_rank && of_workers_left.load() >= 0 && of_workers_left.fetch_sub(1) == 0) return nullptr;
  return std::aligned_alloc(alignment, (bytes + alignment) / alignment * alignment);
}
void* take(size_t bytes, size_t alignment) {
  if (void* const p = try_to_take(bytes, alignment)) return p;
  throw std::bad_alloc();
}

}  // namespace

#pragma GCC diagnostic ignored "-Wmismatched-new-delete"  // take() is visible through inlining

void* operator new(size_t bytes) { return take(bytes, 16); }
void* operator new[](size_t bytes) { return take(bytes, 16); }
void* operator new(size_t bytes, std::align_val_t alignment) { return take(bytes, static_cast<size_t>(alignment)); }
void* operator new[](size_t bytes, std::align_val_t alignment) { return take(bytes, static_cast<size_t>(alignment)); }
void* operator new(size_t bytes, const std::nothrow_t&) noexcept { return try_to_take(bytes, 16); }
void* operator new[](size_t bytes, const std::nothrow_t&) noexcept { return try_to_take(bytes, 16); }
void* operator new(size_t bytes, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  return try_to_take(bytes, static_cast<size_t>(alignment));
}
void* operator new[](size_t bytes, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  return try_to_take(bytes, static_cast<size_t>(alignment));
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete[](void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }
void operator delete[](void* p, size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, size_t, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void* p, size_t, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, const std::nothrow_t&) noexcept { std::free(p); }
void operator delete[](void* p, const std::nothrow_t&) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t, const std::nothrow_t&) noexcept { std::free(p); }
void operator delete[](void* p, std::align_val_t, const std::nothrow_t&) noexcept { std::free(p); }

namespace harness {
namespace {

using namespace std::chrono_literals;
using switchyard::Dispatched;
using switchyard::DType;
using switchyard::ErrorCode;
using switchyard::Group;
using switchyard::Layout;
using switchyard::LedgerCombine;
using switchyard::LedgerConfig;
using switchyard::LowLatencyExchange;
using switchyard::NormalExchange;
using switchyard::Staging;

constexpr int kWorld = 3, kPoor = 1;

void make_another(NormalRig& rig, const Dispatched& d) { (void)rig.exchange.dispatch(rig.x(), d.handle); }
void combine_in_order(NormalRig& rig, const Dispatched& d, switchyard::CombineOrder order) {
  static const std::vector<uint16_t> y(size_t{kWorld} * NormalRig::kTokens * NormalRig::kTopk * NormalRig::kHidden, 0x3F80);
  const switchyard::ConstRows rows{y.data(), d.rows, NormalRig::kHidden, DType::bf16};
  switchyard::CombineOptions o;
  o.order = order;
  rig.exchange.combine(rows, d.handle, rig.out.data(), o);
}

/// Objects of all modes, ready for each of their calls.
struct Rig {
  explicit Rig(Group& g)
      : group(g),
        rank_major(g),
        expert_major(g, NormalRig::config(Staging::direct, Layout::expert_major)),
        ring(g, NormalRig::config(Staging::ring, Layout::expert_major)),
        rank_major_ring(g, NormalRig::config(Staging::ring)),
        low(g, low_latency_config()),
        ledger(g, ledger_config()),
        fused(g),
        of_rank_major(rank_major.dispatch()),
        of_expert_major(expert_major.dispatch()),
        of_ring(ring.dispatch()),
        tables(of_expert_major.handle.ledger()),
        prepared(ledger.prepare(tables)) {
    low.dispatch();
    combine_in_order(rank_major, of_rank_major, switchyard::CombineOrder::per_rank);
  }
  static switchyard::LowLatencyConfig low_latency_config() {
    auto c = LowLatencyRig::config();
    c.scales = switchyard::ScaleKind::none;
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
  template <class Ledger>
  void combine_by(const Ledger& of) {
    ledger.combine(of_expert_major.x, nullptr, of, rank_major.out.data());
  }

  Group& group;
  NormalRig rank_major, expert_major, ring, rank_major_ring;
  LowLatencyRig low;
  LedgerCombine ledger;
  FusedMoeRig fused;
  Dispatched of_rank_major, of_expert_major, of_ring;
  switchyard::LedgerTables tables;
  switchyard::PreparedLedger prepared;
};

struct Call {
  const char* name;
  void (*make)(Rig& rig);
};
const Call kCalls[] = {
    {"dispatch", [](Rig& r) { r.rank_major.dispatch(); }},
    {"cached", [](Rig& r) { make_another(r.rank_major, r.of_rank_major); }},
    {"combine", [](Rig& r) { combine_in_order(r.rank_major, r.of_rank_major, switchyard::CombineOrder::per_rank); }},
    {"dispatch_by_expert", [](Rig& r) { r.expert_major.dispatch(); }},
    {"combine_per_rank",
     [](Rig& r) { combine_in_order(r.expert_major, r.of_expert_major, switchyard::CombineOrder::per_rank); }},
    {"combine_per_route",
     [](Rig& r) { combine_in_order(r.expert_major, r.of_expert_major, switchyard::CombineOrder::per_route); }},
    {"ring_dispatch", [](Rig& r) { r.ring.dispatch(); }},
    {"ring_dispatch_by_rank", [](Rig& r) { r.rank_major_ring.dispatch(); }},
    {"ring_cached", [](Rig& r) { make_another(r.ring, r.of_ring); }},
    {"ring_combine", [](Rig& r) { r.ring.combine(r.of_ring); }},
    {"low_latency_dispatch", [](Rig& r) { r.low.dispatch(); }},
    {"low_latency_combine", [](Rig& r) { r.low.combine(); }},
    {"low_latency_combine_per_rank", [](Rig& r) { r.low.combine(switchyard::CombineOrder::per_rank); }},
    {"low_latency_halves", [](Rig& r) { r.low.combine_send()(); }},
    {"all_to_all", [](Rig& r) { r.low.exchange.moe_all_to_all(r.low.x(), r.low.expert_ids(), r.low.out.data()); }},
    {"ledger_combine", [](Rig& r) { r.combine_by(r.prepared); }},
    {"ledger_combine_of_tables", [](Rig& r) { r.combine_by(r.tables); }},
    {"barrier", [](Rig& r) { r.group.barrier(); }},
    {"all_gather",
     [](Rig& r) {
       char all[kWorld];
       r.group.all_gather("x", 1, all);
     }},
    {"register_memory",
     [](Rig& r) {
       static char memory[64];
       (void)r.group.register_memory(memory, sizeof memory);
     }},
    {"sleep", [](Rig& r) { r.group.sleep(); }},
    {"normal_exchange", [](Rig& r) { NormalExchange e(r.group, NormalRig::config(Staging::ring)); }},
    {"low_latency_exchange", [](Rig& r) { LowLatencyExchange e(r.group, LowLatencyRig::config()); }},
    {"ledger_object", [](Rig& r) { LedgerCombine e(r.group, Rig::ledger_config()); }},
    {"fused_layer", [](Rig& r) { r.fused.round(); }},
    {"fused_layer_object", [](Rig& r) { switchyard::detail::FusedMoe e(r.group, FusedMoeRig::config(), r.fused.products); }},
};

/// Deadlines longer than the time limit of this program: a wait that no error ends is a failure.
switchyard::GroupOptions patient() { return options_with(3600s); }

/// Outcomes of a call and of the barrier that follows it.
struct Ends {
  Outcome call, next;
};

/// On each rank, runs `arm`, `call` and `disarm`; then all ranks make a barrier call. Every exception must be an Error.
std::vector<Ends> ends_of(const Call& call, bool deferred, const std::function<void(int)>& arm,
                          const std::function<void(int)>& disarm) {
  std::vector<Ends> ends(kWorld);
  std::barrier armed(kWorld), made(kWorld);
  const auto all = outcomes(kWorld, patient(), [&](Group& group) {
    is_rank = true;
    if (deferred) switchyard::detail::defer_copies(group);
    const int rank = group.rank();
    Rig rig(group);
    Ends& e = ends[static_cast<size_t>(rank)];
    armed.arrive_and_wait();
    const std::function<void()> make = [&] {
      arm(rank);
      try {
        call.make(rig);
      } catch (...) {
        disarm(rank);
        throw;
      }
      disarm(rank);
    };
    e.call = outcome_of(make);
    made.arrive_and_wait();
    e.next = outcome_of([&] { group.barrier(); });
  });
  for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "ok") << o.text;
  return ends;
}

void expect_reported(const std::vector<Ends>& ends, int poor, const std::string& what) {
  for (int r = 0; r < kWorld; ++r) {
    const Ends& e = ends[static_cast<size_t>(r)];
    if (r == poor) {
      EXPECT_EQ(code_name(e.call.code), "system") << what << ": " << e.call.text;
      EXPECT_NE(e.call.text, "") << what;
      continue;
    }
    // A rank that already had all the data it needed receives the error in its next call.
    const Outcome& failure = e.call.code == ErrorCode::ok ? e.next : e.call;
    EXPECT_EQ(code_name(failure.code), "peer_failed") << what << ", rank " << r << ": " << failure.text;
    EXPECT_EQ(code_name(failure.reason), "system") << what << ", rank " << r << ": " << failure.text;
    EXPECT_EQ(failure.failed_rank, poor) << what << ", rank " << r << ": " << failure.text;
  }
}

class NoMemory : public testing::TestWithParam<Call> {};

TEST_P(NoMemory, OnOneRankIsAnErrorThatAllHearOf) {
  int allocations = 0, in_step = 0;
  for (bool failed = true; failed; ++allocations) {
    const auto ends = ends_of(
        GetParam(), false,
        [&](int rank) {
          if (rank == kPoor) allocations_left = allocations;
        },
        [&](int rank) {
          if (rank == kPoor) failed = allocations_left < 0;
          allocations_left = -1;
        });
    const std::string what = std::string(GetParam().name) + ", allocation " + std::to_string(allocations);
    const ErrorCode code = ends[kPoor].call.code;
    const bool shared = code == ErrorCode::pool_exhausted ||
                        (code == ErrorCode::system && ends[0].call.text == ends[kPoor].call.text);  // in steps of sleep
    if (shared) ++in_step;
    if (!failed || shared || code == ErrorCode::ok) {  // ok: the call did not need the memory
      for (const Ends& e : ends) {
        EXPECT_EQ(code_name(e.call.code), code_name(code)) << what << ": " << e.call.text;
        EXPECT_EQ(code_name(e.next.code), "ok") << what << ": " << e.next.text;
      }
    } else {
      expect_reported(ends, kPoor, what);
    }
  }
  std::printf("%s: %d allocations, %d that all ranks share in step\n", GetParam().name, allocations - 1, in_step);
}

INSTANTIATE_TEST_SUITE_P(Calls, NoMemory, testing::ValuesIn(kCalls), [](const auto& c) { return std::string(c.param.name); });

/// Workers allocate memory for their lists of deferred copies.
TEST(NoMemoryOfAWorker, EndsTheOtherWorkersWaitsToo) {
  int failures = 0;
  for (const Call& call : kCalls) {
    for (const int before : {0, 1, 5}) {
      bool failed = false;
      const auto ends = ends_of(
          call, true, [&](int rank) { of_workers_left = rank == 0 ? before : of_workers_left.load(); },
          [&](int rank) {
            if (rank == 0) failed = of_workers_left.exchange(-1) < 0;
          });
      of_workers_left = -1;
      int poor = -1;
      for (int r = 0; r < kWorld; ++r)
        if (ends[static_cast<size_t>(r)].call.code == ErrorCode::system) poor = r;
      failures += poor >= 0;
      if (poor >= 0) expect_reported(ends, poor, call.name);
      EXPECT_TRUE(poor >= 0 || !failed || ends[0].call.code == ErrorCode::ok) << call.name << ": " << ends[0].call.text;
    }
  }
  EXPECT_GE(failures, 5);
}

TEST(NoMemoryForRows, OfRingStagingIsSharedInStep) {
  const auto all = outcomes(kWorld, patient(), [&](Group& group) {
    NormalRig rig(group, NormalRig::config(Staging::ring));
    std::vector<Dispatched> held;  // prevents reuse of freed memory
    while (held.size() < 20) held.push_back(rig.dispatch());
    no_pages = group.rank() == kPoor;
    const Outcome o = outcome_of([&] { held.push_back(rig.dispatch()); });
    no_pages = false;
    ASSERT_EQ(code_name(o.code), "pool_exhausted") << o.text;
    EXPECT_NE(o.text.find("rank 1"), std::string::npos) << o.text;
    rig.round();
  });
  for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "ok") << o.text;
}

/// A failure in a local call does not affect the other ranks.
TEST(NoMemoryForLocalCalls, NamesTheBytes) {
  const auto all = outcomes(2, patient(), [&](Group& group) {
    Rig rig(group);
    const std::pair<const char*, std::function<void()>> calls[] = {
        {"make_output", [&] { (void)rig.low.exchange.make_output(); }},
        {"make_rows", [&] { (void)rig.low.exchange.make_rows(DType::bf16); }},
        {"matrices", [&] { (void)rig.of_expert_major.handle.matrices(1); }},
        {"ledger", [&] { (void)rig.of_expert_major.handle.ledger(); }},
        {"serialize", [&] { (void)rig.of_expert_major.handle.serialize(); }},
        {"counts", [&] { (void)rig.of_expert_major.handle.counts(); }},
        {"prepare", [&] { (void)rig.ledger.prepare(rig.tables); }},
        {"allocate_rows", [&] { (void)rig.ring.exchange.allocate_rows(rig.of_ring.handle, DType::bf16); }},
    };
    for (const auto& [name, call] : calls) {
      int errors = 0;
      for (bool failed = true; failed;) {
        allocations_left = errors;
        const Outcome o = outcome_of(call);
        failed = allocations_left < 0;
        allocations_left = -1;
        if (!failed) break;
        EXPECT_TRUE(o.code == ErrorCode::system || o.code == ErrorCode::pool_exhausted) << name << ": " << shown(o);
        EXPECT_NE(o.text.find(name), o.code == ErrorCode::system ? std::string::npos : 0) << o.text;
        ++errors;
      }
      EXPECT_GE(errors, 1) << name;
    }
    for (const size_t i : {0, 1}) {
      no_pages = true;
      const Outcome o = outcome_of(calls[i].second);
      no_pages = false;
      EXPECT_NE(o.text.find(" bytes of memory"), std::string::npos) << o.text;
    }
    rig.low.round();
  });
  for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "ok") << o.text;
}

}  // namespace
}  // namespace harness
