// SPDX-License-Identifier: Apache-2.0
// Dispatches that deliver rows to the caller's memory. The scenarios compare rows and scales bit by bit, with ranks as threads,
// as processes and on GPUs; the error tests use host memory.
//
// Entries: delivery_threads and delivery_processes; on GPUs, gpu_delivery_threads and gpu_delivery_processes.
#include "modes/normal/acceptance.hpp"
#include "modes/normal/normal_rig.hpp"

namespace harness {
namespace {

using switchyard::Dispatched;
using switchyard::DispatchOptions;
using switchyard::ErrorCode;
using switchyard::Group;
using switchyard::NormalExchange;
using switchyard::Overflow;
using switchyard::Rows;
using switchyard::SizePolicy;

class D : public Acceptance {};

TEST_P(D, RowsOfAllTypes) {
  std::vector<Scenario> all;
  for (const Layout layout : {Layout::rank_major, Layout::expert_major}) {
    for (const Delivery delivery : {Delivery::caller, Delivery::row_buffer}) {
      for (const DType type : {DType::bf16, DType::f32}) {
        Scenario s = base("delivery of rows", 3 * world() + 1, 4, 27, layout);
        s.x_type = s.y_type = type;
        s.delivery = delivery;
        s.problem.alignment = layout == Layout::expert_major ? 8 : 1;
        s.output_memory = delivery == Delivery::caller ? OutputMemory::in_place : OutputMemory::ordinary;
        all.push_back(s);
      }
    }
  }
  expect_exact(all);
}

TEST_P(D, ScalesThatComeAndThatAreMade) {
  std::vector<Scenario> all;
  for (const ScaleKind scales : {ScaleKind::f32, ScaleKind::ue8m0}) {
    for (const bool made : {false, true}) {
      Scenario s = base("delivery of scales", 11, 5, 13, made ? Layout::rank_major : Layout::expert_major);
      s.hidden = 400;
      s.x_type = made ? DType::bf16 : DType::fp8_e4m3;
      s.x_scales = made ? ScaleKind::none : scales;
      s.quantize = made ? scales : ScaleKind::none;
      s.x_pattern = Pattern::random_values;
      s.delivery = Delivery::caller;
      all.push_back(s);
    }
  }
  expect_exact(all);
}

// With more tokens than a rank has warps, rows are announced, copied and summed in steps, even if only some ranks copy.
TEST_P(D, ManyTokens) {
  const int64_t tokens = kBackend == switchyard::Backend::cuda ? 1500 : 120;
  std::vector<Scenario> all;
  for (const Layout layout : {Layout::rank_major, Layout::expert_major}) {
    for (const Delivery delivery : {Delivery::caller, Delivery::by_rank}) {
      Scenario s = base("delivery of many tokens", 2 * world(), 3, tokens, layout);
      s.tokens[static_cast<size_t>(world()) - 1] = 3;
      s.delivery = delivery;
      s.output_memory = delivery == Delivery::caller ? OutputMemory::ordinary : OutputMemory::by_rank;
      s.cached = true;
      s.repeats = 1;
      all.push_back(s);
      s.name += ", some dropped";
      s.capacity_percent = 70;
      s.problem.overflow = Overflow::drop_and_report;
      all.push_back(s);
    }
  }
  Scenario scales = base("delivery of many tokens that are quantised", 2 * world(), 3, tokens);
  scales.quantize = ScaleKind::f32;
  scales.hidden = 256;
  scales.x_pattern = Pattern::random_values;
  scales.delivery = Delivery::by_rank;
  scales.output_memory = OutputMemory::by_rank;
  scales.repeats = 1;
  all.push_back(scales);
  expect_exact(all);
}

TEST_P(D, NoTokensAndCapacities) {
  std::vector<Scenario> all;
  for (const Layout layout : {Layout::rank_major, Layout::expert_major}) {
    Scenario none = base("delivery of nothing", 8, 3, 0, layout);
    none.delivery = Delivery::row_buffer;
    all.push_back(none);
    Scenario one = base("delivery of one rank's tokens", 8, 3, 0, layout);
    one.tokens[0] = 17;
    one.delivery = Delivery::caller;
    all.push_back(one);
    Scenario bounded = base("delivery at capacity", 8, 3, 20, layout);
    bounded.capacity_percent = 60;
    bounded.problem.overflow = Overflow::drop_and_report;
    bounded.delivery = Delivery::caller;
    all.push_back(bounded);
  }
  expect_exact(all);
}

INSTANTIATE_TEST_SUITE_P(All, D, testing::ValuesIn(everywhere(true)), where_name);

// ---- Rules, on the CPU ----

void on_two(const std::function<void(Group&, Failures&)>& body) {
  if (kBackend == switchyard::Backend::cuda) GTEST_SKIP() << "speaks of host memory";
  Fleet fleet;
  fleet.world = 2;
  fleet.options.heap_bytes = NormalExchange::heap_bytes(NormalRig::config(), 2) + (1 << 20);
  EXPECT_EQ(joined(run_ranks(ranks_of_suite(), fleet, body)), "");
}

/// Memory for `rows` rows in a rig, and a view of it.
struct RowStorage {
  RowStorage(const NormalExchange& exchange, int64_t rows)
      : data(static_cast<size_t>(rows * exchange.config().hidden) * 4 + 1),
        view{data.data(), rows, exchange.config().hidden, exchange.config().dtype} {}
  std::vector<std::byte> data;
  Rows view;
};

TEST(DeliveryRules, TooSmallIsAnErrorOfAllRanksIfOnlyCountsTell) {
  on_two([](Group& group, Failures& f) {
    NormalRig rig(group);
    const int64_t needed = rig.dispatch().handle.rows();
    RowStorage own(rig.exchange, group.rank() == 0 ? needed - 1 : needed);
    DispatchOptions o;
    o.out = &own.view;
    const Outcome full = outcome_of([&] { (void)rig.exchange.dispatch(rig.x(), rig.expert_ids(), nullptr, o); });
    f.equal(static_cast<int>(ErrorCode::pool_exhausted), static_cast<int>(full.code), full.text);
    if (group.rank() == 0) f.check(full.text.find("DispatchOptions::out has room for") != std::string::npos, full.text);
    rig.round();  // everything remains usable
    RowStorage enough(rig.exchange, needed);
    o.out = &enough.view;
    const Dispatched d = rig.exchange.dispatch(rig.x(), rig.expert_ids(), nullptr, o);
    f.check(d.x.data == enough.view.data && !d.block, "delivered");
  });
}

TEST(DeliveryRules, WhatIsKnownBeforeTheCallIsAnInvalidArgument) {
  struct Fault {
    const char* text;
    void (*spoil)(Rows&, DispatchOptions&);
  };
  const Fault faults[] = {
      {"out->rows", [](Rows& r, DispatchOptions& o) { r.rows = 1, o.size = SizePolicy::worst_case; }},
      {"out->cols", [](Rows& r, DispatchOptions&) { r.cols += 8; }},
      {"out->dtype", [](Rows& r, DispatchOptions&) { r.dtype = DType::f16; }},
      {"out->scale_kind", [](Rows& r, DispatchOptions&) { r.scale_kind = ScaleKind::f32; }},
      {"out->data", [](Rows& r, DispatchOptions&) { r.data = nullptr; }},
      {"out->scales",
       [](Rows& r, DispatchOptions& o) { r.dtype = DType::fp8_e4m3, r.scale_kind = o.quantize = ScaleKind::f32; }},
  };
  for (const Fault& fault : faults) {
    on_two([&](Group& group, Failures& f) {
      NormalRig rig(group);
      RowStorage own(rig.exchange, 1000);
      DispatchOptions o;
      o.out = &own.view;
      fault.spoil(own.view, o);
      const Outcome wrong = outcome_of([&] { (void)rig.exchange.dispatch(rig.x(), rig.expert_ids(), nullptr, o); });
      f.check(wrong.code == ErrorCode::invalid_argument || wrong.code == ErrorCode::peer_failed, wrong.text);
      if (wrong.code == ErrorCode::invalid_argument) f.check(wrong.text.find(fault.text) != std::string::npos, wrong.text);
    });
  }
}

/// Even with all their rows kept, any number of dispatches fit into a pool without room for a second output.
TEST(DeliveryRules, ThePoolHasItsRoomBack) {
  on_two([](Group& group, Failures& f) {
    NormalRig rig(group);
    std::vector<std::unique_ptr<RowStorage>> buffers;
    std::vector<Dispatched> kept;
    for (int layer = 0; layer < 50; ++layer) {
      buffers.push_back(std::make_unique<RowStorage>(rig.exchange, switchyard::max_rows(rig.exchange.config(), 2)));
      DispatchOptions o;
      o.out = &buffers.back()->view;
      o.size = layer % 2 ? SizePolicy::exact : SizePolicy::worst_case;
      kept.push_back(rig.exchange.dispatch(rig.x(), rig.expert_ids(), nullptr, o));
    }
    for (const Dispatched& d : kept)
      f.check(std::equal(static_cast<std::byte*>(d.x.data),
                         static_cast<std::byte*>(d.x.data) + kept[0].handle.rows() * rig.exchange.config().hidden * 2,
                         static_cast<std::byte*>(kept[0].x.data)),
              "all layers have the same rows");
    rig.combine(kept.front());
  });
}

}  // namespace
}  // namespace harness
