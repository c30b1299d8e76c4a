// SPDX-License-Identifier: Apache-2.0
// Low-latency calls in closed form on the CPU backend: the sequences that gpu/modes/cuda_low_latency_test.cpp queues on GPUs,
// and tests that the shared judge detects every kind of error.
#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <memory>
#include <thread>
#include <utility>

#include "harness/fleet.hpp"
#include "modes/flat/flat_function.hpp"
#include "modes/low_latency/masked_layer.hpp"

namespace harness {
namespace {

using switchyard::Group;
using switchyard::LowLatencyExchange;

/// Uses host memory and runs each job as a loop.
class HostRig {
 public:
  explicit HostRig(int rank) : rank_(rank) {}
  int rank() const { return rank_; }
  void* allocate(size_t bytes) {
    memory_.push_back(std::make_unique<std::byte[]>(bytes + 256));
    auto at = reinterpret_cast<uintptr_t>(memory_.back().get());
    return reinterpret_cast<void*>((at + 255) / 256 * 256);
  }
  void* stream(int) const { return nullptr; }
  template <class Job>
  void enqueue(const Job& job, void*) const {
    for (int64_t i = 0; i < job.size(); ++i) job(i);
  }
  void pause(uint64_t ns, void*) const { std::this_thread::sleep_for(std::chrono::nanoseconds(ns)); }
  void pace(void*) const {}

 private:
  int rank_;
  std::vector<std::unique_ptr<std::byte[]>> memory_;
};

/// `given`: if not null, receives the number of dispatches on rank 0 whose rows were passed as fp8.
std::string run(const StreamedCase& c, uint64_t calls, int* given = nullptr) {
  Fleet fleet;
  fleet.world = c.form.world;
  fleet.options.heap_bytes = LowLatencyExchange::heap_bytes(c.config(), c.form.world);
  fleet.options.num_warps = 2;
  return joined(run_threads(fleet, [&](Group& group, Failures& f) {
    LowLatencyExchange exchange = c.make(group);
    HostRig rig(group.rank());
    StreamedCalls<HostRig> streamed(rig, exchange, c);
    streamed.run(1, calls);
    f.equal(std::string(), describe(*streamed.verdict(), streamed.judged()), "verdict");
    if (given && group.rank() == 0) *given = static_cast<int>(streamed.given());
    f.check(c.form.experts < c.form.world || streamed.verdict()->rows > 0, "no row was judged");
  }));
}

TEST(ClosedForm, AllKindsOfCalls) {
  for (uint64_t seed = 1; seed <= 8; ++seed) {  // see EightSeedsDrawEveryWay
    for (const int world : {1, 2, 4}) EXPECT_EQ(run(draw_case(seed, world), 60), "") << "seed " << seed << " W" << world;
  }
}

/// Eight seeds, as many as QueuedCalls uses on GPUs, draw every kind of scale in both orders, all group sizes (mostly 128),
/// unquantized rows handled by kernels with and without constants, and whole and partial grids.
TEST(ClosedForm, EightSeedsDrawEveryWay) {
  for (uint64_t first = 1; first < 20; ++first) {
    std::map<std::pair<ScaleKind, bool>, int> orders;
    std::map<int, int> groups;
    int common_rows = 0, whole_grids = 0;
    for (uint64_t seed = first; seed < first + 8; ++seed) {
      const StreamedCase c = draw_case(seed, 2);
      ++orders[{c.form.scales, c.form.column_major}];
      if (c.form.scales != ScaleKind::none) ++groups[c.form.group];
      common_rows += c.form.scales == ScaleKind::none && c.form.type == DType::bf16 && c.form.hidden % 128 == 0;
      whole_grids += c.plan.num_sms == 0;
    }
    for (const ScaleKind scales : {ScaleKind::f32, ScaleKind::ue8m0})
      for (const bool column_major : {false, true}) EXPECT_GT((orders[{scales, column_major}]), 0) << "from seed " << first;
    EXPECT_GT((orders[{ScaleKind::none, false}]), 0);
    EXPECT_EQ(groups.size(), 3u);
    EXPECT_GT(groups[128], groups[64] + groups[32]);
    EXPECT_GT(common_rows, 0);
    EXPECT_TRUE(whole_grids >= 4 && whole_grids < 8) << whole_grids;
  }
}

/// Some of the dispatches that send fp8 rows are passed rows that are already fp8.
TEST(ClosedForm, SomeRowsComeQuantised) {
  const StreamedCase c = draw_case(3, 1);
  ASSERT_EQ(c.form.scales, ScaleKind::ue8m0);
  int given = 0;
  EXPECT_EQ(run(c, 60, &given), "");
  EXPECT_TRUE(given > 0 && given < 60) << given;
}

/// The calls that gpu/modes/cuda_low_latency_test.cpp queues, both with factors and with a caller-supplied function.
TEST(ClosedForm, WholeExchangesInARow) {
  for (const bool with_function : {false, true}) {
    StreamedCase c = draw_case(8, 3);
    ASSERT_EQ(c.form.scales, ScaleKind::none);
    c.plan = {.lanes = 3};
    Fleet fleet;
    fleet.world = c.form.world;
    fleet.options.heap_bytes = LowLatencyExchange::heap_bytes(c.config(), c.form.world);
    const auto failures = run_threads(fleet, [&](Group& group, Failures& f) {
      LowLatencyExchange exchange = c.make(group);
      HostRig rig(group.rank());
      StreamedCalls<HostRig> streamed(rig, exchange, c);
      const auto function = factor_function(streamed.lane(0).a.factors, c.form.first_expert(group.rank()));
      if (with_function) streamed.function = &function;
      for (uint64_t n = 1; n < 30; n += 3) streamed.all_to_all_of_lanes({n}, {});
      f.equal(uint64_t{30}, streamed.judged(), "judged calls");
      f.equal(std::string(), describe(*streamed.verdict(), streamed.judged()), "verdict");
    });
    EXPECT_EQ(joined(failures), "");
  }
}

TEST(ClosedForm, OneRankIsLate) {
  StreamedCase c = draw_case(3, 4);
  c.plan = {.lanes = 2, .slow_rank = 2, .slow_ns = 10'000'000};
  EXPECT_EQ(run(c, 110), "");
}

TEST(ClosedForm, DispatchesOnly) {
  StreamedCase c = draw_case(5, 2);
  c.plan = {.lanes = 1, .dispatch_only = true};
  EXPECT_EQ(run(c, 100), "");
}

/// The layers that gpu/modes/cuda_masked_layer_test.cpp captures in a graph.
TEST(ClosedForm, LayersOfMaskedProducts) {
  for (const int world : {1, 2, 3, 4, 8}) {
    int number = 0;
    for (const LayerCase& c : layer_cases(world)) {
      Fleet fleet;
      fleet.world = world;
      fleet.options.heap_bytes = LowLatencyExchange::heap_bytes(c.what.config(), world);
      const auto failures = run_threads(fleet, [&](Group& group, Failures& f) {
        LowLatencyExchange exchange = c.what.make(group);
        HostRig rig(group.rank());
        MaskedLayer<HostRig> layer(rig, exchange, c);
        std::vector<std::byte> out(layer.out_bytes());
        for (uint64_t replay = 0; replay < 3; ++replay) {
          layer.enqueue();
          std::memcpy(out.data(), layer.out(), out.size());
          f.equal(std::string(), layer.judge(layer.kFirst + replay, out), "layer");
        }
      });
      EXPECT_EQ(joined(failures), "") << "W" << world << " layer " << number;
      ++number;
    }
  }
}

/// Makes one dispatch and one combine on one rank; then each array in turn is corrupted in one place and judged again.
class Spoiled : public testing::Test {
 public:
  using Calls = StreamedCalls<HostRig>;

  Spoiled() {
    StreamedCase c;
    c.form.experts = 3, c.form.topk = 2, c.form.max_tokens = 5, c.form.hidden = 256, c.form.scales = ScaleKind::f32;
    form_ = c.form;
    switchyard::GroupOptions options;
    options.heap_bytes = LowLatencyExchange::heap_bytes(c.config(), 1);
    group_ = std::make_unique<Group>(std::move(Group::in_process(1, options)[0]));
    exchange_ = std::make_unique<LowLatencyExchange>(c.make(*group_));
    calls_ = std::make_unique<Calls>(rig_, *exchange_, c);
    while (form_.tokens(number_, 0) < 2 || form_.tokens(number_, 0) == form_.max_tokens ||
           form_.first_choice(number_, 0, 0, 0) == 2)
      ++number_;  // chooses a T that leaves room, and a first token with expert 0
    calls_->dispatch({number_}, lane(), 0, {});
    calls_->combine({number_ + 1}, lane(), 0, {});
  }
  Calls::Lane& lane() { return calls_->lane(0); }

  /// The kind of the first mismatch, or -1 if there is none.
  int judged_dispatch() {
    const auto& o = lane().outputs[0];
    Verdict v{};
    rig_.enqueue(
        JudgeDispatch{form_, {number_}, {0}, {o.x.data, o.x.scales, o.rows_of_expert, o.source_range, o.row_source}, &v},
        nullptr);
    return v.mismatches > 0 ? v.what : -1;
  }
  int judged_sums() {
    Verdict v{};
    rig_.enqueue(JudgeSums{form_, {number_ + 1}, {number_}, 0, Answers::made, Weights::of_dispatch, lane().a.out, &v}, nullptr);
    return v.mismatches > 0 ? v.what : -1;
  }
  template <class T>
  int with(T& place, T value, int (Spoiled::*judged)()) {
    const T before = place;
    place = value;
    const int what = (this->*judged)();
    place = before;
    return what;
  }

  Form form_;
  uint64_t number_ = 1;
  HostRig rig_{0};
  std::unique_ptr<Group> group_;
  std::unique_ptr<LowLatencyExchange> exchange_;
  std::unique_ptr<Calls> calls_;
};

TEST_F(Spoiled, EveryArrayIsJudged) {
  EXPECT_EQ(describe(*calls_->verdict(), calls_->judged()), "");
  ASSERT_EQ(judged_dispatch(), -1);
  ASSERT_EQ(judged_sums(), -1);
  const auto& o = lane().outputs[0];
  const auto kind = [](Checked what) { return static_cast<int>(what); };
  EXPECT_EQ(with(o.rows_of_expert[0], o.rows_of_expert[0] - 1, &Spoiled::judged_dispatch), kind(Checked::rows_of_expert));
  EXPECT_EQ(with(o.source_range[2], o.source_range[2] + 1, &Spoiled::judged_dispatch), kind(Checked::source_range));
  EXPECT_EQ(with(o.row_source[0], o.row_source[0] + (int64_t{1} << 32), &Spoiled::judged_dispatch), kind(Checked::row_source));
  auto* const codes = static_cast<uint8_t*>(o.x.data);
  EXPECT_EQ(with(codes[255], static_cast<uint8_t>(codes[255] ^ 1), &Spoiled::judged_dispatch), kind(Checked::row));
  auto* const scales = static_cast<float*>(o.x.scales);
  EXPECT_EQ(with(scales[1], scales[1] * 2, &Spoiled::judged_dispatch), kind(Checked::scale));
  auto* const out = static_cast<uint16_t*>(lane().a.out);
  EXPECT_EQ(with(out[256 + 70], static_cast<uint16_t>(out[256 + 70] ^ 0x80), &Spoiled::judged_sums), kind(Checked::sum));
  const auto beyond = static_cast<size_t>(form_.tokens(number_, 0)) * static_cast<size_t>(form_.hidden) + 3;
  EXPECT_EQ(with(out[beyond], uint16_t{0}, &Spoiled::judged_sums), kind(Checked::beyond_tokens));
}

TEST_F(Spoiled, ACallThatWasNotJudgedIsMissed) {
  EXPECT_EQ(describe(*calls_->verdict(), calls_->judged() + 1), "judged 2 calls of 3");
}

TEST(ClosedForm, ExactBits) {
  EXPECT_EQ(exact_bits(DType::bf16, -1.5f), 0xBFC0u);
  EXPECT_EQ(exact_bits(DType::f16, -1.5f), 0xBE00u);
  EXPECT_EQ(exact_bits(DType::f16, 1.0f / 16), 0x2C00u);
  EXPECT_EQ(exact_bits(DType::f32, 2.0f), 0x40000000u);
  EXPECT_EQ(exact_bits(DType::fp8_e4m3, 448.0f), 0x7Eu);
  EXPECT_EQ(exact_bits(DType::fp8_e4m3, -3.0f), 0xC4u);
  EXPECT_EQ(exact_bits(DType::fp8_e4m3, 0.0f), 0u);
}

}  // namespace
}  // namespace harness
