// SPDX-License-Identifier: Apache-2.0
// Memory of a group outside its calls: registered buffers that combine reads in place, and sleep and wake. Runs twice: with
// ranks as threads and, with SWITCHYARD_TEST_RANKS=processes, with ranks as forked processes.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>

#include "exchange/group/impl.hpp"
#include "modes/normal/normal_rig.hpp"
#include "modes/normal/scenario.hpp"
#include "testing/test_access.hpp"

namespace harness {
namespace {

using switchyard::Dispatched;
using switchyard::ErrorCode;
using switchyard::Group;
using switchyard::Handle;
using switchyard::NormalConfig;
using switchyard::NormalExchange;
using switchyard::RegisteredMemory;
using switchyard::RowBuffer;
using switchyard::Rows;

Scenario base(const std::string& name, int world, Layout layout = Layout::rank_major) {
  Scenario s;
  s.name = name;
  s.problem.world = world;
  s.problem.experts = 10;
  s.problem.topk = 3;
  s.problem.layout = layout;
  s.problem.max_tokens = 16;
  for (int r = 0; r < world; ++r) s.tokens.push_back(16 - r % 3);
  // The rows themselves are returned, so combine needs no partial sums and can read them in place.
  if (layout == Layout::expert_major) s.order = CombineOrder::per_route;
  return s;
}

std::string run(int world, size_t heap, const RankBody& body,
                std::chrono::milliseconds timeout = std::chrono::milliseconds(30000)) {
  Fleet fleet;
  fleet.world = world;
  fleet.options.heap_bytes = heap;
  fleet.options.num_blocks = 2;
  fleet.options.timeout = timeout;
  fleet.options.rendezvous_timeout = std::max<std::chrono::milliseconds>(timeout, std::chrono::seconds(5));
  return joined(run_ranks(ranks_of_suite(), fleet, body));
}

void expect_code(ErrorCode code, const std::string& in_text, const Outcome& o, Failures& f) {
  f.equal(static_cast<int>(code), static_cast<int>(o.code), "code, " + o.text);
  f.check(o.text.find(in_text) != std::string::npos, "'" + in_text + "' is not in: " + o.text);
}

// --- Registered memory

/// Combines rows at `at` and returns the number of copied bytes.
uint64_t combine_at(NormalExchange& exchange, RankData& data, const Handle& handle, void* at, Failures& f) {
  const Rows y{at, handle.rows(), exchange.config().hidden, DType::bf16, nullptr, ScaleKind::none};
  data.fill_outputs(y);
  exchange.combine(y, handle, data.out(), data.combine_options(), data.out_weights());
  data.check_combined(f);
  return exchange.last_call().copied_bytes;
}

class Registered : public testing::Test {
 protected:
  void SetUp() override {
    if (ranks_of_suite() == Ranks::processes) GTEST_SKIP() << "what processes are told: RegisteredByProcesses";
  }
};

TEST_F(Registered, CombineReadsRowsWhereTheyLie) {
  for (const int world : {1, 2, 4}) {
    for (const Layout layout : {Layout::rank_major, Layout::expert_major}) {
      const auto c = make_case(base("registered", world, layout));
      EXPECT_EQ(run(world, heap_bytes({c}),
                    [&](Group& group, Failures& f) {
                      NormalExchange exchange(group, make_config(*c));
                      RankData data(*c, group.rank(), 0), again(*c, group.rank(), 1);
                      const Dispatched d = exchange.dispatch(data.x(), data.ids(), data.weights());
                      const auto bytes = static_cast<size_t>(d.rows * exchange.config().hidden * 2);
                      // With per_route, rows are pushed to their owners, so those in ordinary memory need no copy either.
                      // Otherwise, rows that other ranks read are copied.
                      const std::vector<int32_t> prefix = d.handle.matrices(1).rank_prefix_matrix;
                      const auto here = [&](int sources) {
                        return sources ? prefix[static_cast<size_t>((sources - 1) * world + group.rank())] : 0;
                      };
                      const auto own = static_cast<uint64_t>(here(group.rank() + 1) - here(group.rank()));
                      const uint64_t row_bytes = static_cast<uint64_t>(exchange.config().hidden) * 2;
                      const uint64_t copied = layout == Layout::rank_major ? bytes - own * row_bytes : 0;
                      std::vector<std::byte> buffer(bytes + 8192), plain(bytes + 1);
                      std::byte* const mine = buffer.data() + 16 * (group.rank() + 1);
                      f.set_context("ordinary memory");
                      f.equal(copied, combine_at(exchange, data, d.handle, plain.data(), f), "copied bytes");
                      {
                        const RegisteredMemory whole = group.register_memory(mine, bytes + 4096);
                        const RegisteredMemory none = group.register_memory(nullptr, 0);
                        const RegisteredMemory overlapping = group.register_memory(mine + 32, bytes);
                        f.check(whole && none && overlapping, "registrations hold something");
                        for (const size_t offset : {size_t{0}, size_t{48}, size_t{4096}}) {
                          f.set_context("registered, at " + std::to_string(offset));
                          f.equal(uint64_t{0}, combine_at(exchange, again, d.handle, mine + offset, f), "copied bytes");
                        }
                        f.set_context("reaches beyond the registered range");
                        f.equal(copied, combine_at(exchange, data, d.handle, mine + 4096 + 16, f), "copied bytes");
                      }
                      f.set_context("no longer registered");
                      group.barrier();
                      f.equal(copied, combine_at(exchange, again, d.handle, mine, f), "copied bytes");
                    }),
                "");
    }
  }
}

/// In one combine, some rows are in registered memory, some in a row buffer, and some in neither.
TEST_F(Registered, EveryRankMayUseOtherMemory) {
  for (const Layout layout : {Layout::rank_major, Layout::expert_major}) {
    const auto c = make_case(base("mixed", 4, layout));
    EXPECT_EQ(run(4, heap_bytes({c}),
                  [&](Group& group, Failures& f) {
                    NormalExchange exchange(group, make_config(*c));
                    std::vector<std::byte> buffer(size_t{64} << 10);
                    // Moving the object does not end the registration.
                    RegisteredMemory first = group.register_memory(group.rank() == 3 ? nullptr : buffer.data(),
                                                                   group.rank() == 3 ? 0 : buffer.size());
                    const RegisteredMemory registered = std::move(first);
                    for (int i = 0; i < 8; ++i) {
                      f.set_context("call " + std::to_string(i));
                      RankData data(*c, group.rank(), i);
                      const Dispatched d = exchange.dispatch(data.x(), data.ids(), data.weights());
                      const RowBuffer rows = exchange.allocate_rows(d.handle, DType::bf16);
                      std::vector<std::byte> plain(static_cast<size_t>(d.rows) * 128 + 1);
                      void* const choices[] = {buffer.data() + 128 * i, rows.rows().data, plain.data()};
                      const int choice = (group.rank() + i) % 3;
                      const uint64_t copied = combine_at(exchange, data, d.handle, choices[choice], f);
                      const bool in_place = choice == 1 || (choice == 0 && group.rank() != 3);
                      if (layout == Layout::rank_major) f.equal(in_place, copied == 0, "in place");
                    }
                  }),
              "");
  }
}

/// A rank that has ended its registration cannot read other ranks' rows: it reports a mismatch and makes no invalid read.
TEST_F(Registered, EndedByOneRankOnly) {
  const auto c = make_case(base("ended", 3));
  EXPECT_EQ(run(3, heap_bytes({c}),
                [&](Group& group, Failures& f) {
                  NormalExchange exchange(group, make_config(*c));
                  RankData data(*c, group.rank(), 0);
                  const Dispatched d = exchange.dispatch(data.x(), data.ids(), data.weights());
                  std::vector<std::byte> buffer(static_cast<size_t>(d.rows) * 128);
                  std::optional<RegisteredMemory> registered(group.register_memory(buffer.data(), buffer.size()));
                  if (group.rank() == 1) registered.reset();
                  Outcome o = outcome_of([&] { (void)combine_at(exchange, data, d.handle, buffer.data(), f); });
                  if (o.code == ErrorCode::ok && group.rank() != 1)  // it had completed when the error arrived
                    o = outcome_of([&] { (void)exchange.dispatch(data.x(), data.ids(), data.weights()); });
                  expect_code(ErrorCode::mismatch, "registered memory", o, f);
                  if (group.rank() != 1) f.check(o.text.find("rank 1 found") != std::string::npos, "who found it: " + o.text);
                }),
            "");
}

TEST_F(Registered, BadArgumentsThrowOnAllRanksAndAreNotSticky) {
  const auto c = make_case(base("bad", 3));
  EXPECT_EQ(run(3, heap_bytes({c}),
                [&](Group& group, Failures& f) {
                  std::byte byte{};
                  void* const given = group.rank() == 2 ? nullptr : &byte;
                  expect_code(ErrorCode::invalid_argument, "rank 2: memory = null with 1 bytes",
                              outcome_of([&] { (void)group.register_memory(given, 1); }), f);
                  std::vector<RegisteredMemory> all;
                  for (int round = 0; round < 2; ++round) {
                    for (int i = 0; i < Group::kMaxRegistered; ++i) all.push_back(group.register_memory(&byte, 1));
                    expect_code(ErrorCode::unsupported, "64", outcome_of([&] { (void)group.register_memory(&byte, 1); }), f);
                    if (group.rank() == 1) {  // memory that is free on only one rank is not free
                      all.erase(all.begin() + 5);
                      expect_code(ErrorCode::unsupported, "64", outcome_of([&] { (void)group.register_memory(&byte, 1); }), f);
                    } else {
                      expect_code(ErrorCode::unsupported, "64", outcome_of([&] { (void)group.register_memory(&byte, 1); }), f);
                      all.erase(all.begin() + 5);
                    }
                    all.push_back(group.register_memory(&byte, 1));
                    all.clear();
                  }
                  run_case(group, *c, f);
                }),
            "");
}

TEST(RegisteredByProcesses, AreToldWhyNot) {
  if (ranks_of_suite() == Ranks::threads) GTEST_SKIP() << "threads may register: Registered";
  const auto c = make_case(base("processes", 2));
  EXPECT_EQ(run(2, heap_bytes({c}),
                [&](Group& group, Failures& f) {
                  std::byte byte{};
                  expect_code(ErrorCode::unsupported, "processes, which cannot see each other's ordinary memory",
                              outcome_of([&] { (void)group.register_memory(&byte, 1); }), f);
                  run_case(group, *c, f);
                }),
            "");
}

// --- Sleep and wake

/// Number of bytes in this rank's segment that are backed by memory.
size_t resident_bytes(const Group& group) {
  const auto& view = group.impl().heap->view();
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> pages(view.bytes / page);
  if (::mincore(view.base[view.rank], view.bytes, pages.data()) != 0) throw std::runtime_error("mincore");
  size_t resident = 0;
  for (const unsigned char p : pages) resident += (p & 1u) != 0 ? page : 0;
  return resident;
}

/// Sleeps and wakes, and checks that memory in use is released and is zero after the wake-up.
void nap(Group& group, Failures& f) {
  constexpr size_t kBallast = size_t{4} << 20;
  auto& heap = *group.impl().heap;
  const size_t ballast = heap.allocate(kBallast, 4096, 0);
  std::byte* const mine = heap.view().base[group.rank()] + ballast;
  std::memset(mine, 0x5A, kBallast);
  const size_t before = resident_bytes(group);
  f.check(before >= kBallast, "resident before: " + std::to_string(before));
  group.sleep();
  f.check(group.asleep(), "asleep() after sleep");
  const size_t during = resident_bytes(group);
  f.check(during <= before - kBallast && during <= size_t{256} << 10,
          "resident while asleep: " + std::to_string(during) + " of " + std::to_string(before));
  group.wake();
  f.check(!group.asleep(), "asleep() after wake");
  size_t not_zero = 0;
  for (size_t i = 0; i < kBallast; ++i) not_zero += mine[i] != std::byte{0} ? 1 : 0;
  f.equal(size_t{0}, not_zero, "bytes that are not zero after wake");
  heap.release(ballast);
}

constexpr size_t kBallastBytes = size_t{5} << 20;

/// Two objects, a handle and a row buffer are created first; everything works after each of three sleeps. The epoch wraps.
TEST(Sleep, ExchangesBeforeAndAfterAreExact) {
  for (const int world : {1, 2, 4}) {
    for (const Staging staging : {Staging::direct, Staging::ring}) {
      Scenario sa = base("first", world), sb = base("second", world, Layout::expert_major);
      sb.seed = 7;
      sa.staging = sb.staging = staging;
      const auto a = make_case(sa), b = make_case(sb);
      EXPECT_EQ(run(world, heap_bytes({a}) + heap_bytes({b}) + kBallastBytes,
                    [&](Group& group, Failures& f) {
                      switchyard::detail::number_calls_from(group, (uint64_t{1} << 40) - 3);
                      NormalExchange first(group, make_config(*a)), second(group, make_config(*b));
                      RankData da(*a, group.rank(), 0), db(*b, group.rank(), 0);
                      const Dispatched old = first.dispatch(da.x(), da.ids(), da.weights());
                      da.check_dispatched(old, f);
                      const RowBuffer rows = first.allocate_rows(old.handle, DType::bf16);
                      (void)combine_at(first, da, old.handle, rows.rows().data, f);
                      const Handle other = second.dispatch(db.x(), db.ids(), db.weights()).handle;
                      for (int i = 0; i < 3; ++i) {
                        f.set_context("nap " + std::to_string(i));
                        nap(group, f);
                        RankData again(*a, group.rank(), 10 + i), fresh(*b, group.rank(), 20 + i), more(*a, group.rank(), i);
                        f.set_context("old handle after nap " + std::to_string(i));
                        (void)combine_at(first, again, old.handle, rows.rows().data, f);
                        const Dispatched cached = first.dispatch(again.x(), old.handle);
                        again.check_dispatched(cached, f);
                        f.set_context("second object after nap " + std::to_string(i));
                        const RowBuffer y = second.allocate_rows(other, DType::bf16);
                        (void)combine_at(second, fresh, other, y.rows().data, f);
                        f.set_context("new dispatch after nap " + std::to_string(i));
                        const Dispatched d = first.dispatch(more.x(), more.ids(), more.weights());
                        more.check_dispatched(d, f);
                        (void)combine_at(first, more, d.handle, rows.rows().data, f);
                      }
                    }),
                "");
    }
  }
}

TEST(Sleep, CallsMeanwhileAreErrorsAndChangeNothing) {
  EXPECT_EQ(run(3, size_t{8} << 20,
                [&](Group& group, Failures& f) {
                  NormalRig rig(group);
                  const Dispatched d = rig.dispatch();
                  expect_code(ErrorCode::invalid_argument, "does not sleep", outcome_of([&] { group.wake(); }), f);
                  for (int i = 0; i < 2; ++i) {
                    group.sleep();
                    const auto refused = [&](const char* name, const std::function<void()>& call) {
                      f.set_context(name);
                      expect_code(ErrorCode::invalid_argument, "Group::wake()", outcome_of(call), f);
                    };
                    refused("dispatch", [&] { (void)rig.dispatch(); });
                    refused("cached dispatch", [&] { (void)rig.exchange.dispatch(rig.x(), d.handle); });
                    refused("combine", [&] { rig.combine(d); });
                    refused("allocate_rows", [&] { (void)rig.exchange.allocate_rows(d.handle, DType::bf16); });
                    refused("construction", [&] { NormalRig another(group); });
                    f.set_context("sleep twice");
                    expect_code(ErrorCode::invalid_argument, "sleeps already", outcome_of([&] { group.sleep(); }), f);
                    f.set_context("what needs no heap");
                    f.equal(NormalRig::kTokens, d.handle.num_tokens(), "tokens of the handle");
                    group.check();
                    group.barrier();
                    (void)rig.exchange.last_call();
                    group.wake();
                    rig.round();
                  }
                }),
            "");
}

TEST(Sleep, ObjectsAndGroupsMayEndWhileAsleep) {
  EXPECT_EQ(run(3, size_t{8} << 20,
                [&](Group& group, Failures& f) {
                  {
                    NormalRig rig(group);
                    std::optional<Dispatched> d(rig.dispatch());
                    const RowBuffer rows = rig.exchange.allocate_rows(d->handle, DType::bf16);
                    group.sleep();
                    d.reset();
                  }
                  f.equal(size_t{0}, group.heap_used(), "heap in use");
                  group.wake();
                  NormalRig(group).round();
                  group.sleep();  // the group is destroyed while asleep
                }),
            "");
}

TEST(Sleep, ARankThatDoesNotComeIsNamed) {
  EXPECT_EQ(run(
                3, size_t{4} << 20,
                [&](Group& group, Failures& f) {
                  NormalRig rig(group);
                  rig.round();
                  if (group.rank() == 1) {
                    for (int i = 0; i < 3000 && outcome_of([&] { group.check(); }).code == ErrorCode::ok; ++i) ::usleep(20000);
                    return;
                  }
                  const Outcome o = outcome_of([&] { group.sleep(); });
                  const bool named = (o.code == ErrorCode::peer_timeout && o.report.awaited_rank == 1 &&
                                      std::string(o.report.operation) == "sleep") ||
                                     (o.code == ErrorCode::peer_failed && o.reason == ErrorCode::peer_timeout);
                  f.check(named, std::string(switchyard::to_string(o.code)) + ": " + o.text);
                  f.check(outcome_of([&] { group.check(); }).code != ErrorCode::ok, "not sticky");
                },
                kSoon),
            "");
}

}  // namespace
}  // namespace harness
