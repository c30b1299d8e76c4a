// SPDX-License-Identifier: Apache-2.0
// Faults specific to normal mode: differing options, undersized pools and heaps, and counts that do not fit.
// fault_stories_test.cpp covers the faults common to all modes.
#include <gtest/gtest.h>

#include <chrono>

#include "modes/normal/normal_rig.hpp"

namespace harness {
namespace {

using namespace std::chrono_literals;
using switchyard::CombineOptions;
using switchyard::ConstRows;
using switchyard::Dispatched;
using switchyard::DispatchOptions;
using switchyard::DType;
using switchyard::ErrorCode;
using switchyard::Group;
using switchyard::Layout;
using switchyard::NormalConfig;
using switchyard::NormalExchange;
using switchyard::ScaleKind;
using switchyard::Staging;

// --- Different calls

TEST(Mismatch, DispatchOptions) {
  using Spoil = std::function<void(DispatchOptions&)>;
  const Spoil spoils[] = {[](DispatchOptions& o) { o.quantize = ScaleKind::f32; },
                          [](DispatchOptions& o) { o.padding = switchyard::Padding::unspecified; },
                          [](DispatchOptions& o) { o.size = switchyard::SizePolicy::worst_case; },
                          [](DispatchOptions& o) { o.overflow = switchyard::Overflow::drop_and_report; }};
  for (const Staging staging : {Staging::direct, Staging::ring}) {
    for (const auto& spoil : spoils) {
      expect_mismatch(outcomes(3, options_with(60s), [&](Group& group) {
        NormalRig rig(group, NormalRig::config(staging));
        DispatchOptions options;
        if (group.rank() == 2) spoil(options);
        (void)rig.exchange.dispatch(rig.x(), rig.expert_ids(), rig.weights.data(), options);
      }));
    }
  }
}

TEST(Mismatch, WeightsOnSomeRanksOnly) {
  expect_mismatch(outcomes(3, options_with(60s), [&](Group& group) {
    NormalRig rig(group);
    (void)rig.exchange.dispatch(rig.x(), rig.expert_ids(), group.rank() == 1 ? nullptr : rig.weights.data());
  }));
}

TEST(Mismatch, CachedOptionsAndTypes) {
  for (const Staging staging : {Staging::direct, Staging::ring}) {
    expect_mismatch(outcomes(2, options_with(60s), [&](Group& group) {
      NormalRig rig(group, NormalRig::config(staging));
      const auto handle = rig.dispatch().handle;
      DispatchOptions options;
      if (group.rank() == 1) options.quantize = ScaleKind::ue8m0;
      (void)rig.exchange.dispatch(rig.x(), handle, options);
    }));
  }
}

TEST(Mismatch, CombineOptionsAndTypes) {
  for (const Staging staging : {Staging::direct, Staging::ring}) {
    for (const int kind : {0, 1, 2}) {
      expect_mismatch(outcomes(3, options_with(60s), [&](Group& group) {
        NormalRig rig(group, NormalRig::config(staging, Layout::expert_major));
        const Dispatched d = rig.dispatch();
        ConstRows y = d.x;
        CombineOptions options;
        if (group.rank() == 0 && kind == 0) options.order = switchyard::CombineOrder::per_route;
        if (group.rank() == 0 && kind == 1) options.apply_weights = false;
        if (group.rank() == 0 && kind == 2) y.dtype = DType::f16;
        rig.exchange.combine(y, d.handle, rig.out.data(), options);
      }));
    }
  }
}

// --- Exhaustion

TEST(Pool, ExhaustedOnOneRankFailsOnAllAndIsNotSticky) {
  NormalConfig config = NormalRig::config();
  const size_t one = NormalExchange::memory_required(config, 3).pool_bytes;
  config.pool_bytes = one * 3 / 2;
  const auto all = outcomes(3, options_with(60s), [&](Group& group) {
    NormalRig rig(group, config);
    std::vector<Dispatched> held;
    int failures = 0;
    std::vector<switchyard::RowBuffer> fill;  // rank 1's pool is exhausted earlier than that of the others
    const auto handle = rig.dispatch().handle;
    if (group.rank() == 1) {
      const Outcome full = outcome_of([&] {
        while (true) fill.push_back(rig.exchange.allocate_rows(handle, DType::bf16));
      });
      EXPECT_EQ(code_name(full.code), "pool_exhausted") << full.text;
    }
    for (int i = 0; i < 3; ++i) {
      const Outcome o = outcome_of([&] { held.push_back(rig.dispatch()); });
      failures += o.code == ErrorCode::pool_exhausted;
      EXPECT_EQ(code_name(o.code), "pool_exhausted") << o.text;
      EXPECT_NE(o.text.find("rank 1"), std::string::npos) << o.text;
      EXPECT_EQ(code_name(outcome_of([&] { group.check(); }).code), "ok");
    }
    EXPECT_EQ(failures, 3);
    fill.clear();
    group.barrier();
    rig.round();
    rig.round();
  });
  for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "ok") << o.text;
}

TEST(Pool, ExhaustedByStagingOfOrdinaryRows) {
  NormalConfig config = NormalRig::config();
  const auto all = outcomes(2, options_with(60s), [&](Group& group) {
    NormalRig rig(group, config);
    const Dispatched d = rig.dispatch();
    std::vector<uint16_t> y(static_cast<size_t>(d.rows * NormalRig::kHidden), 0x3F80);
    std::vector<switchyard::RowBuffer> fill;
    if (group.rank() == 0)
      (void)outcome_of([&] {
        while (true) fill.push_back(rig.exchange.allocate_rows(d.handle, DType::bf16));
      });
    const ConstRows rows{y.data(), d.rows, NormalRig::kHidden, DType::bf16};
    const Outcome o = outcome_of([&] { rig.exchange.combine(rows, d.handle, rig.out.data()); });
    EXPECT_EQ(code_name(o.code), "pool_exhausted") << o.text;
    fill.clear();
    group.barrier();
    rig.exchange.combine(rows, d.handle, rig.out.data());
    EXPECT_EQ(rig.out[0] & 0x7F80, rig.out[5] & 0x7F80);
  });
  for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "ok") << o.text;
}

TEST(Heap, FormulaIsExact) {
  for (const Staging staging : {Staging::direct, Staging::ring}) {
    const NormalConfig config = NormalRig::config(staging, Layout::expert_major);
    const auto all = outcomes(3, options_with(60s, NormalExchange::heap_bytes(config, 3)), [&](Group& group) {
      NormalRig rig(group, config);
      EXPECT_GE(group.heap_used(), NormalExchange::memory_required(config, 3).total());
      rig.round();
    });
    for (const Outcome& o : all) EXPECT_EQ(code_name(o.code), "ok") << o.text;
  }
}

// --- Limits

/// The largest counts that fit the 24 bits of a flag's value: one record per token from an expert-major source, or one row per
/// route plus the end mark in a ring's stream.
TEST(Construction, CountsFitTheFlagsThatCarryThem) {
  const auto outcome_with = [](Staging staging, Layout layout, int topk, int64_t max_tokens) {
    NormalConfig config = NormalRig::config(staging, layout);
    config.hidden = 8;
    config.topk = topk;
    config.max_tokens = max_tokens;
    return outcome_of([&] { (void)NormalExchange::memory_required(config, 2); });
  };
  struct Bound {
    Staging staging;
    Layout layout;
    int topk;
    int64_t max;
    const char* in_text;
  };
  const Bound bounds[] = {
      {Staging::direct, Layout::expert_major, 2, 16777215, "max_tokens (expert-major) = 16777216: must be in [0, 16777215]"},
      {Staging::direct, Layout::rank_major, 2, 67108864, "max_tokens = 67108865"},
      {Staging::ring, Layout::expert_major, 1, 8388607, "max_tokens * topk (rows of one ring stream) = 8388608"},
      {Staging::ring, Layout::rank_major, 1, 8388607, "max_tokens * topk (rows of one ring stream) = 8388608"},
  };
  for (const Bound& b : bounds) {
    for (const int64_t fewer : {0, 1}) {
      const Outcome o = outcome_with(b.staging, b.layout, b.topk, b.max - fewer);
      EXPECT_EQ(code_name(o.code), "ok") << o.text;
    }
    const Outcome o = outcome_with(b.staging, b.layout, b.topk, b.max + 1);
    EXPECT_EQ(code_name(o.code), "invalid_argument") << b.in_text;
    EXPECT_NE(o.text.find(b.in_text), std::string::npos) << o.text;
  }
}

}  // namespace
}  // namespace harness
