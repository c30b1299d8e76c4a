// SPDX-License-Identifier: Apache-2.0
// Low-latency calls that select slots themselves: every row, scale, index, sum and count has the bits of a call after
// SlotSelector::select(), whose slots slots_test.cpp checks.
//
// Entries: selecting_calls_threads and selecting_calls_processes (label multiproc); on GPUs, gpu_selecting_calls_*.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>

#include "harness/outcome.hpp"
#include "harness/suite_hosts.hpp"
#include "modes/slots/slot_ranks.hpp"
#include "switchyard/low_latency.hpp"

namespace harness {
namespace {

using namespace switchyard;

constexpr int kExperts = 11, kSpare = 2;
constexpr int64_t kMaxTokens = 40;

struct Shape {
  const char* name;
  ScaleKind scales = ScaleKind::none;
  ScaleOrder order = ScaleOrder::row_major;
  bool fp8 = false;  ///< `x` is fp8 with scales
  DType dtype = DType::bf16;
  Sending sending = Sending::per_rank;
  int64_t hidden = 256;
  int topk = 4;
  bool wide = false, split = false;  ///< int64 ids; the dispatch is split
};
// On GPUs, the first six select in the dispatch kernel, the others before it.
const Shape kShapes[] = {
    {"bf16"},
    {"bf16, split, int64", ScaleKind::none, ScaleOrder::row_major, false, DType::bf16, Sending::per_rank, 1040, 8, true, true},
    {"fp8", ScaleKind::f32},
    {"fp8, columns", ScaleKind::f32, ScaleOrder::column_major},
    {"ue8m0, columns, int64", ScaleKind::ue8m0, ScaleOrder::column_major, false, DType::bf16, Sending::per_rank, 256, 3, true},
    {"given in fp8", ScaleKind::f32, ScaleOrder::row_major, true},
    {"f32", ScaleKind::none, ScaleOrder::row_major, false, DType::f32, Sending::per_rank, 40, 1, false, true},
    {"bf16, per route, int64", ScaleKind::none, ScaleOrder::row_major, false, DType::bf16, Sending::per_route, 72, 2, true},
};

ExpertMap random_map(int world, uint64_t seed) {
  return map_with_replicas(kExperts, world, (kExperts + world - 1) / world + kSpare, seed);
}
std::vector<int64_t> random_routes(int world, uint64_t seed) { return skewed_routes(kExperts, world, seed, 20); }

/// Tokens of one rank in one call.
struct Input {
  int64_t tokens;
  std::vector<int64_t> wide;
  std::vector<int32_t> narrow;
  std::vector<std::byte> rows;
  std::vector<float> scales, weights;

  Input(const Shape& shape, int64_t num_tokens, uint64_t seed) : tokens(num_tokens) {
    Draw draw(seed);
    for (int64_t f = 0; f < tokens * shape.topk; ++f) {  // half of the routes go to three experts
      const int64_t id = draw.one_in(2) ? draw.between(0, 2) : draw.between(-1, kExperts - 1);
      wide.push_back(id);
      narrow.push_back(static_cast<int32_t>(id));
      weights.push_back(static_cast<float>(draw.between(1, 64)) / 64);
    }
    for (int64_t i = 0; i < tokens * shape.hidden; ++i) {
      const auto bits = std::bit_cast<uint32_t>(static_cast<float>(draw.between(-96, 96)) / 8);
      const auto append = [&](uint32_t value, size_t bytes) {
        for (size_t b = 0; b < bytes; ++b) rows.push_back(static_cast<std::byte>(value >> 8 * b));
      };
      if (shape.fp8)
        append(static_cast<uint32_t>(draw.between(0, 0x77)), 1);
      else if (shape.dtype == DType::f32)
        append(bits, 4);
      else
        append(bits >> 16, 2);
    }
    const auto scale_row = static_cast<int64_t>(scale_row_bytes(shape.hidden, ScaleKind::f32, kScaleGroup) / sizeof(float));
    for (int64_t i = 0; shape.fp8 && i < tokens * scale_row; ++i) scales.push_back(static_cast<float>(draw.between(1, 16)) / 8);
  }
};

LowLatencyConfig config_of(const Shape& shape, const ExpertMap& map) {
  LowLatencyConfig c;
  c.hidden = shape.hidden;
  c.num_experts = map.num_slots();
  c.topk = shape.topk;
  c.max_tokens = kMaxTokens;
  c.dtype = shape.dtype;
  c.scales = shape.scales;
  c.scale_order = shape.order;
  c.sending = shape.sending;
  return c;
}

using Bytes = std::vector<uint8_t>;

/// One rank's exchange with a selector of its own. Selects in the calls, or before them.
class Side {
 public:
  Side(Group& group, const Shape& shape, const ExpertMap& map, const std::vector<int64_t>& routes, int num_sms, bool in_call)
      : selector(group, map, routes),
        group_(group),
        memory_(rank_memory(group)),
        shape_(shape),
        num_sms_(num_sms),
        in_call_(in_call),
        exchange_(group, config_of(shape, map)),
        output_(exchange_.make_output()) {}

  /// Inputs in the rank's memory.
  struct Given {
    ConstRows x;
    ExpertIds ids;
    const float* weights = nullptr;
  };

  /// In calls that select, T is in device memory. `between()` is called before a split call is received.
  Given dispatch(
      const Input& in, const std::function<void()>& between = [] {}) {
    const Given given = give(in);
    LowLatencyDispatchOptions o;
    o.topk_weights = given.weights;
    o.stream = memory_.stream();
    o.num_sms = num_sms_;
    const int32_t tokens = static_cast<int32_t>(in.tokens);
    if (in_call_) {
      o.selector = used_;
      o.device_tokens = static_cast<const int32_t*>(memory_.give(&tokens, sizeof tokens));
    }
    if (shape_.split) {
      const ReceiveHook receive = exchange_.dispatch_send(given.x, given.ids, output_, o);
      between();
      receive();
    } else {
      exchange_.dispatch(given.x, given.ids, output_, o);
    }
    return given;
  }

  /// The parts of the output that the call defines, then the sums.
  std::vector<Bytes> exchange(const Input& in) {
    const Given given = dispatch(in);
    std::vector<Bytes> parts = read_output();
    LowLatencyCombineOptions back;
    back.stream = memory_.stream();
    back.num_sms = num_sms_;
    Bytes out(static_cast<size_t>(given.ids.num_tokens) * dtype_bytes(shape_.dtype, shape_.hidden));
    void* const sums = memory_.lend(out.data(), out.size());
    ConstRows y = output_.x;
    y.data = memory_.give(made_.data(), made_.size());
    y.dtype = shape_.dtype;
    y.scales = nullptr;
    y.scale_kind = ScaleKind::none;
    exchange_.combine(y, output_, sums, back);
    if (!out.empty()) memory_.read(out.data(), sums, out.size());
    memory_.release();
    out.resize(static_cast<size_t>(in.tokens) * dtype_bytes(shape_.dtype, shape_.hidden));
    parts.push_back(out);
    return parts;
  }

  Bytes all_to_all(const Input& in) {
    const Given given = give(in);
    AllToAllOptions o;
    o.topk_weights = given.weights;
    o.stream = memory_.stream();
    o.num_sms = num_sms_;
    if (in_call_) o.selector = used_;
    Bytes out(in.rows.size());
    void* const sums = memory_.lend(out.data(), out.size());
    exchange_.moe_all_to_all(given.x, given.ids, sums, o);
    if (!out.empty()) memory_.read(out.data(), sums, out.size());
    memory_.release();
    return out;
  }

  /// Later calls use another selector.
  void use(SlotSelector& other) { used_ = &other; }

  SlotSelector selector;

 private:
  /// The ids are slots unless the call selects.
  Given give(const Input& in) {
    Given given;
    given.x = {memory_.give(in.rows.data(), in.rows.size()), in.tokens, shape_.hidden,
               shape_.fp8 ? DType::fp8_e4m3 : shape_.dtype};
    if (shape_.fp8) {
      given.x.scales = memory_.give(in.scales.data(), in.scales.size() * sizeof(float));
      given.x.scale_kind = ScaleKind::f32;
    }
    given.weights = static_cast<const float*>(memory_.give(in.weights.data(), in.weights.size() * sizeof(float)));
    const size_t bytes = in.wide.size() * (shape_.wide ? 8 : 4);
    const void* const host = shape_.wide ? static_cast<const void*>(in.wide.data()) : in.narrow.data();
    given.ids = {memory_.give(host, bytes), in.tokens, shape_.topk, shape_.wide};
    if (in_call_) return given;
    slots_.resize(bytes);
    void* const slots = memory_.lend(slots_.data(), bytes);
    selector.select(given.ids, slots, memory_.stream());
    given.ids.data = slots;
    return given;
  }

  template <class T>
  std::vector<T> read(const T* from, int64_t count) {
    std::vector<T> to(static_cast<size_t>(count));
    if (count > 0) memory_.read(to.data(), from, to.size() * sizeof(T));
    return to;
  }

  /// Also fills made_, the experts' rows: functions of the rows' sources.
  std::vector<Bytes> read_output() {
    const int64_t local = selector.map().slots_per_rank, each = output_.rows_per_expert;
    const auto counts = read(output_.rows_of_expert, local);
    const auto ranges = read(output_.source_range, local * group_.size());
    const auto sources = read(output_.row_source, local * each);
    const size_t row = dtype_bytes(output_.x.dtype, shape_.hidden), made_row = dtype_bytes(shape_.dtype, shape_.hidden);
    const auto rows = read(static_cast<const std::byte*>(output_.x.data), local * each * static_cast<int64_t>(row));
    const bool row_scales = shape_.scales != ScaleKind::none && shape_.order == ScaleOrder::row_major;
    const size_t scale_row = row_scales ? scale_row_bytes(shape_.hidden, shape_.scales, kScaleGroup) : 0;
    const auto scales = read(static_cast<const std::byte*>(output_.x.scales), local * each * static_cast<int64_t>(scale_row));
    std::vector<Bytes> parts(5);
    const auto append = [](Bytes& to, const void* from, size_t bytes) {
      const auto* const at = static_cast<const uint8_t*>(from);
      to.insert(to.end(), at, at + bytes);
    };
    append(parts[0], counts.data(), counts.size() * 4);
    append(parts[1], ranges.data(), ranges.size() * 8);
    made_.assign(static_cast<size_t>(local * each) * made_row, 0);
    for (int64_t e = 0; e < local; ++e)
      for (int64_t i = e * each; i < e * each + counts[static_cast<size_t>(e)]; ++i) {
        const auto at = static_cast<size_t>(i);
        append(parts[2], &sources[at], 8);
        append(parts[3], &rows[at * row], row);
        if (row_scales) append(parts[4], &scales[at * scale_row], scale_row);
        Draw draw(static_cast<uint64_t>(sources[at]) + 1);
        for (size_t b = 0; b < made_row; b += made_row / static_cast<size_t>(shape_.hidden)) {
          const auto bits = std::bit_cast<uint32_t>(static_cast<float>(draw.between(-50, 50)) / 4);
          if (shape_.dtype == DType::f32)
            std::memcpy(&made_[at * made_row + b], &bits, 4);
          else
            std::memcpy(&made_[at * made_row + b], reinterpret_cast<const std::byte*>(&bits) + 2, 2);
        }
      }
    return parts;
  }

  SlotSelector* used_ = &selector;
  Group& group_;
  RankMemory& memory_;
  const Shape& shape_;
  const int num_sms_;
  const bool in_call_;
  LowLatencyExchange exchange_;
  LowLatencyOutput output_;
  Bytes slots_, made_;
};

/// The error of a call on this rank, on GPUs also one that appears when the call runs.
template <class Call>
Outcome outcome_of_call(const Group& group, const Call& call) {
  return outcome_of([&] {
    call();
    char none = 0;
    rank_memory(group).read(&none, nullptr, 0);  // waits for the call
    group.check();
  });
}

class SelectingCalls : public testing::TestWithParam<Where> {
 protected:
  std::string run(const RankBody& body) const {
    const int world = GetParam().world;
    size_t heap = size_t{1} << 20;
    for (const Shape& shape : kShapes)
      heap = std::max(heap, 2 * LowLatencyExchange::heap_bytes(config_of(shape, random_map(world, 1)), world));
    return joined(run_ranks(ranks_of_suite(), fleet_of(world, GetParam().workers, heap + (size_t{1} << 20)), body));
  }
  /// A group for each of some shapes and kinds of call. make(shape, group, call) makes a side and an input and returns
  /// call(side, input), the error of the refused call, whose code is checked. `check` checks its text: (text, option,
  /// failures).
  template <class Make, class Check>
  void expect_refused(const Make& make, const Check& check) const {
    const bool one_host = !spans_hosts(GetParam().world);
    for (const bool flat : {false, true}) {
      if (flat && !one_host) continue;
      for (const int number : {0, 1, 7}) {  // whole and split, with both kernels of GPUs
        const Shape& shape = kShapes[number];
        const auto failures = run([&](Group& group, Failures& f) {
          const Outcome o = make(shape, group, [&](Side& side, const Input& in) {
            return outcome_of_call(group, [&] { flat ? (void)side.all_to_all(in) : (void)side.dispatch(in); });
          });
          f.equal(code_name(ErrorCode::mismatch), code_name(o.code), "code, " + o.text);
          if (one_host) check(o.text, flat ? "AllToAllOptions::selector" : "LowLatencyDispatchOptions::selector", f);
        });
        EXPECT_EQ(failures, "") << shape.name << (flat ? ", flat" : "");
      }
    }
  }
};

TEST_P(SelectingCalls, HaveTheBitsOfASelection) {
  EXPECT_EQ(run([&](Group& group, Failures& failures) {
              const int world = group.size(), sms = kBackend == Backend::cuda ? GetParam().workers.warps : 0;
              for (const Shape& shape : kShapes) {
                ExpertMap map = random_map(world, 1);
                Side before(group, shape, map, {}, sms, false), inside(group, shape, map, {}, sms, true);
                std::vector<int64_t> counts(static_cast<size_t>(world * kExperts), 0);
                for (uint64_t step = 1; step <= 4; ++step) {
                  failures.set_context(std::string(shape.name) + ", step " + std::to_string(step));
                  for (int r = 0; r < world; ++r) {
                    const Input in(shape, (r + static_cast<int>(step)) % 3 * (kMaxTokens / 2),
                                   step * 100 + static_cast<uint64_t>(r));  // no tokens on some ranks
                    const bool flat = step == 4 && shape.scales == ScaleKind::none && !spans_hosts(world);
                    for (const int64_t id : in.wide)
                      if (id >= 0) ++counts[static_cast<size_t>(r * kExperts + id)];
                    if (r != group.rank()) continue;
                    if (flat) {
                      failures.equal_range(before.all_to_all(in), inside.all_to_all(in), "sums of moe_all_to_all");
                      continue;
                    }
                    const std::vector<Bytes> expected = before.exchange(in), got = inside.exchange(in);
                    constexpr const char* kParts[] = {"rows_of_expert", "source_range", "row_source", "rows", "scales", "sums"};
                    for (size_t i = 0; i < std::size(kParts); ++i) failures.equal_range(expected[i], got[i], kParts[i]);
                  }
                  if (step == 2) {
                    map = random_map(world, 7);
                    const std::vector<int64_t> routes = random_routes(world, 5);
                    before.selector.set_map(map, routes, rank_memory(group).stream());
                    inside.selector.set_map(map, routes, rank_memory(group).stream());
                  }
                  if (step % 2 != 0) continue;
                  failures.equal_range(counts, before.selector.gather_routes(), "routes of select()");
                  failures.equal_range(counts, inside.selector.gather_routes(), "routes of selecting calls");
                  std::fill(counts.begin(), counts.end(), 0);
                }
              }
            }),
            "");
}

INSTANTIATE_TEST_SUITE_P(Everywhere, SelectingCalls, testing::ValuesIn(everywhere()), where_name);

class SelectorsOfSomeRanks : public SelectingCalls {};

/// True if the text names a rank whose call has a selector and one whose call has none. The last rank differs from the others.
bool names_both(const std::string& text, const std::string& option, int world, bool last_selects) {
  const std::string last = option + (last_selects ? " = given" : " = null") + " on rank " + std::to_string(world - 1);
  bool found = false;
  for (int r = 0; r + 1 < world; ++r) {
    const std::string rank = " on rank " + std::to_string(r);
    const std::string other = (last_selects ? "null" : "given") + rank;
    found |= text.find(last + " and " + other) != std::string::npos;
    found |= text.find(option + " = " + other + " and " + last.substr(option.size() + 3)) != std::string::npos;
  }
  return found;
}

/// A selector on the last rank only, or on all others: no rank's call succeeds, and every error names one rank of each kind.
TEST_P(SelectorsOfSomeRanks, FailOnAll) {
  const int world = GetParam().world, sms = kBackend == Backend::cuda ? GetParam().workers.warps : 0;
  const bool last_selects = world % 2 == 0;
  const ExpertMap map = random_map(world, 1);
  expect_refused(
      [&](const Shape& shape, Group& group, const auto& call) {
        Side side(group, shape, map, {}, sms, (group.rank() + 1 == world) == last_selects);
        return call(side, Input(shape, group.rank() % 2 * kMaxTokens, static_cast<uint64_t>(group.rank())));
      },
      [&](const std::string& text, const char* option, Failures& f) {
        f.check(names_both(text, option, world, last_selects), text);
      });
}

class MapsOfSomeRanks : public SelectingCalls {};

/// Ranks whose selectors have different versions of their maps: no rank's call succeeds, and the errors contain both versions.
TEST_P(MapsOfSomeRanks, FailOnAll) {
  const int world = GetParam().world, sms = kBackend == Backend::cuda ? GetParam().workers.warps : 0;
  const ExpertMap map = random_map(world, 1);
  expect_refused(
      [&](const Shape& shape, Group& group, const auto& call) {
        Side side(group, shape, map, {}, sms, true);
        SlotSelector later(group, map);
        for (int version = 2; version <= 5; ++version) later.set_map(map, {}, rank_memory(group).stream());
        side.exchange(Input(shape, kMaxTokens, static_cast<uint64_t>(group.rank())));  // equal versions
        if (group.rank() + 1 == world) side.use(later);
        // One rank has no tokens, and sends its version nevertheless.
        return call(side, Input(shape, group.rank() % 2 * kMaxTokens, static_cast<uint64_t>(group.rank())));
      },
      [&](const std::string& text, const std::string& option, Failures& f) {
        f.equal(3 + 4, map_difference(text, option), text);  // the next selector, four versions later
      });
}

/// The last rank passes another selector, with another map of the same version.
TEST_P(MapsOfSomeRanks, OfTwoSelectorsFailOnAll) {
  const int world = GetParam().world, sms = kBackend == Backend::cuda ? GetParam().workers.warps : 0;
  expect_refused(
      [&](const Shape& shape, Group& group, const auto& call) {
        Side side(group, shape, random_map(world, 1), {}, sms, true);
        SlotSelector other(group, random_map(world, 2));
        if (group.rank() + 1 == world) side.use(other);
        return call(side, Input(shape, group.rank() % 2 * kMaxTokens, static_cast<uint64_t>(group.rank())));
      },
      [&](const std::string& text, const std::string& option, Failures& f) { f.equal(3, map_difference(text, option), text); });
}

/// A map that is set between the halves of a dispatch does not concern it: every rank compares the versions that were sent.
TEST_P(MapsOfSomeRanks, AreThoseOfTheSendingHalf) {
  const int world = GetParam().world, sms = kBackend == Backend::cuda ? GetParam().workers.warps : 0;
  const ExpertMap map = random_map(world, 1);
  EXPECT_EQ(run([&](Group& group, Failures& f) {
              for (const Shape& shape : kShapes) {
                if (!shape.split) continue;
                f.set_context(shape.name);
                Side side(group, shape, map, {}, sms, true);
                const Input in(shape, kMaxTokens, static_cast<uint64_t>(group.rank()));
                for (int i = 0; i < 3; ++i) {
                  const auto set_map = [&] { side.selector.set_map(map, {}, rank_memory(group).stream()); };
                  const Outcome o = outcome_of_call(group, [&] { side.dispatch(in, set_map); });
                  f.equal(code_name(ErrorCode::ok), code_name(o.code), o.text);
                }
                f.equal(int64_t{4}, side.selector.version(), "version");
              }
            }),
            "");
}

std::vector<Where> everywhere_with_peers() {
  std::vector<Where> all = everywhere();
  std::erase_if(all, [](const Where& where) { return where.world == 1; });
  return all;
}
INSTANTIATE_TEST_SUITE_P(Everywhere, SelectorsOfSomeRanks, testing::ValuesIn(everywhere_with_peers()), where_name);
INSTANTIATE_TEST_SUITE_P(Everywhere, MapsOfSomeRanks, testing::ValuesIn(everywhere_with_peers()), where_name);

/// A selector of other sizes: every rank gets the error, on GPUs and CPUs alike.
TEST(SelectingCallsOfOne, SelectorOfOtherSizes) {
  EXPECT_EQ(on_ranks(2,
                     [](Group& group, Failures& failures) {
                       const Shape shape{"bf16"};
                       const ExpertMap map = random_map(2, 1);
                       Side side(group, shape, map, {}, 1, true);
                       LowLatencyConfig config = config_of(shape, map);
                       ++config.num_experts;
                       LowLatencyExchange other(group, config);
                       LowLatencyOutput output = other.make_output();
                       LowLatencyDispatchOptions o;
                       o.selector = &side.selector;
                       const Outcome refused = outcome_of([&] {
                         other.dispatch({nullptr, 0, shape.hidden, shape.dtype}, ExpertIds{nullptr, 0, shape.topk}, output, o);
                       });
                       failures.equal(code_name(ErrorCode::invalid_argument), code_name(cause_of(refused)), "code");
                       const std::string text = "LowLatencyDispatchOptions::selector has 16 slots: must be num_experts, 17";
                       if (refused.code != ErrorCode::peer_failed)
                         failures.check(refused.text.find(text) != std::string::npos, refused.text);
                     }),
            "");
}

/// A rank that has selected once more: the next map reports it on all ranks, and the one after it is set.
TEST(SelectingCallsOfOne, ARankThatSelectsOnceMore) {
  EXPECT_EQ(on_ranks(2,
                     [](Group& group, Failures& failures) {
                       const Shape shape{"bf16"};
                       const ExpertMap map = random_map(2, 1);
                       Side side(group, shape, map, {}, 1, true);
                       Side never(group, shape, map, {}, 1, true);
                       const Input none(shape, 0, 1);
                       if (group.rank() == 0) side.selector.select(ExpertIds{nullptr, 0, shape.topk}, nullptr);
                       side.exchange(none);
                       const Outcome o = outcome_of([&] { side.selector.set_map(map); });
                       failures.equal(code_name(ErrorCode::mismatch), code_name(o.code), "code");
                       failures.check(
                           o.text.find("the number of select calls = 2 on rank 0 and 1 on rank 1") != std::string::npos,
                           o.text);
                       side.selector.set_map(map);
                       never.selector.set_map(map);
                       failures.equal(int64_t{2}, side.selector.version(), "version");
                     }),
            "");
}

}  // namespace
}  // namespace harness
