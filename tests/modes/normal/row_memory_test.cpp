// SPDX-License-Identifier: Apache-2.0
// Symmetric memory for external allocators: rows are delivered to it and read from it, and ordinary memory is usable when it is
// full.
#include <gtest/gtest.h>

#include <cstring>

#include "modes/normal/normal_rig.hpp"
#include "modes/normal/scenario.hpp"
#include "switchyard/row_memory.hpp"

namespace harness {
namespace {

using switchyard::Dispatched;
using switchyard::DispatchOptions;
using switchyard::ErrorCode;
using switchyard::Group;
using switchyard::NormalExchange;
using switchyard::RowMemory;
using switchyard::Rows;

constexpr int kWorld = 3;

Scenario base(Layout layout) {
  Scenario s;
  s.name = "row memory";
  s.problem.world = kWorld;
  s.problem.experts = 10;
  s.problem.topk = 3;
  s.problem.layout = layout;
  s.problem.max_tokens = 16;
  for (int r = 0; r < kWorld; ++r) s.tokens.push_back(16 - r % 3);
  s.repeats = 2;
  s.max_delay_us = 200;
  return s;
}

std::string run(const std::shared_ptr<const Case>& c, size_t bytes, const RankBody& body) {
  Fleet fleet;
  fleet.world = kWorld;
  fleet.options.heap_bytes = heap_bytes({c}) + bytes + 4096;
  fleet.options.num_blocks = 2;
  return joined(run_threads(fleet, body));
}

/// Dispatches to `to`, combines the expert outputs in that memory, and checks both. Rank-major rows in other memory are copied.
void exchange_at(NormalExchange& exchange, const Case& c, Group& group, void* to, int64_t rows, bool there, int repetition,
                 Failures& f) {
  RankData data(c, group.rank(), repetition);
  const Rows out{to, rows, c.scenario.hidden, c.scenario.x_type};
  DispatchOptions options = make_dispatch_options(c, group.rank());
  options.out = &out;
  const Dispatched d = exchange.dispatch(data.x(), data.ids(), data.weights(), options);
  f.equal<const void*>(to, d.x.data, "where the rows are");
  data.check_dispatched(d, f);
  const bool copies = c.scenario.problem.layout == Layout::rank_major && !there;
  const auto check_copies = [&](const char* name) {
    if (c.scenario.problem.layout == Layout::rank_major) f.equal(copies, exchange.last_call().copied_bytes > 0, name);
  };
  check_copies("dispatch copies rows");
  data.fill_outputs(d.x);
  exchange.combine(d.x, d.handle, data.out(), data.combine_options(), data.out_weights());
  data.check_combined(f);
  check_copies("combine copies rows");
}

/// Returns the outcome of a construction with the given number of bytes.
int code_of(Group& group, size_t bytes) {
  try {
    const RowMemory made(group, bytes);
  } catch (const switchyard::Error& error) {
    return static_cast<int>(error.code());
  }
  return static_cast<int>(ErrorCode::ok);
}

TEST(RowMemory, RowsArriveAndAreReadThere) {
  for (const Layout layout : {Layout::rank_major, Layout::expert_major}) {
    const auto c = make_case(base(layout));
    const auto config = make_config(*c);
    const int64_t rows = switchyard::max_rows(config, kWorld);
    const size_t bytes = static_cast<size_t>(rows * config.hidden) * 2;
    EXPECT_EQ(run(c, 2 * bytes + 1024,
                  [&](Group& group, Failures& f) {
                    NormalExchange exchange(group, config);
                    RowMemory memory(group, 2 * bytes + 1024);
                    void* const first = memory.allocate(bytes);
                    void* const second = memory.allocate(bytes);
                    void* const third = memory.allocate(bytes);  // no room is left: ordinary memory
                    f.equal(true, memory.contains(first) && memory.contains(second), "the first two are of the block");
                    f.equal(false, memory.contains(third), "the third is ordinary");
                    int repetition = 0;
                    for (void* const at : {first, second, third}) {
                      f.equal(uint64_t{0}, reinterpret_cast<uint64_t>(at) % 512, "alignment");
                      exchange_at(exchange, *c, group, at, rows, at != third, repetition++, f);
                    }
                    memory.release(third);
                    memory.release(first);
                    memory.release(nullptr);
                    void* const again = memory.allocate(bytes / 2);
                    f.equal<const void*>(first, again, "what was released is given again");
                    memory.release(again);
                    memory.release(second);
                  }),
              "");
  }
}

TEST(RowMemory, ItsSizeIsThatOfAllRanks) {
  const auto c = make_case(base(Layout::rank_major));
  EXPECT_EQ(run(c, 1 << 20,
                [&](Group& group, Failures& f) {
                  f.equal(static_cast<int>(ErrorCode::mismatch), code_of(group, group.rank() == 1 ? 8192 : 4096),
                          "other sizes");
                }),
            "");
}

TEST(RowMemory, WhatIsNotThereIsSaid) {
  const auto c = make_case(base(Layout::rank_major));
  EXPECT_EQ(run(c, 1 << 20,
                [&](Group& group, Failures& f) {
                  f.equal(static_cast<int>(ErrorCode::invalid_argument), code_of(group, 0), "no bytes");
                  f.equal(static_cast<int>(ErrorCode::heap_exhausted), code_of(group, size_t{1} << 40),
                          "more than the heap has");
                  f.equal(static_cast<int>(ErrorCode::ok), code_of(group, 4096), "the group goes on");
                  f.equal(size_t{0}, group.heap_used(), "heap in use at the end");
                }),
            "");
  RowMemory none;
  EXPECT_FALSE(none.contains(&none));
  EXPECT_THROW(none.allocate(1), switchyard::Error);
}

}  // namespace
}  // namespace harness
