// SPDX-License-Identifier: Apache-2.0
// MoeLayers that select slots of random maps. With per_route, their results are bit-identical to those of the layer without
// replicas; with both orders, to those of an oracle that sums the rows of single routes by the ranks of their slots. Slots that
// no call may use have NaN weights.
//
// Entries: replicated_layer_threads and replicated_layer_processes (label multiproc); on GPUs, gpu_replicated_layer_*.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>

#include "harness/outcome.hpp"
#include "harness/suite_hosts.hpp"
#include "modes/slots/slot_ranks.hpp"
#include "oracle/rows.hpp"
#include "switchyard/layer.hpp"

namespace harness {
namespace {

using namespace switchyard;

constexpr int kExperts = 11, kTopk = 4, kMaxReplicas = 4;
constexpr int64_t kMaxTokens = 20;
// Products on GPUs are tested elsewhere with these sizes. On the CPU, smaller ones suffice.
constexpr bool kOnGpu = kBackend == Backend::cuda;
constexpr int64_t kHidden = kOnGpu ? 256 : 64, kIntermediate = kOnGpu ? 136 : 40;

struct Kind {
  const char* name;
  MoeExchange exchange;
  MoeForm form;
};
constexpr Kind kKinds[] = {{"normal", MoeExchange::normal, MoeForm::separate},
                           {"low latency", MoeExchange::low_latency, MoeForm::separate},
                           {"fused", MoeExchange::normal, MoeForm::fused},
                           {"split", MoeExchange::normal, MoeForm::fused}};
constexpr CombineOrder kOrders[] = {CombineOrder::per_route, CombineOrder::per_rank};

std::string name_of(const Kind& kind, CombineOrder order) { return std::string(kind.name) + ", " + to_string(order); }
bool is_split(const Kind& kind) { return kind.name == kKinds[3].name; }

/// Each expert has between one and kMaxReplicas slots; some slots stay empty.
ExpertMap random_map(int world, uint64_t seed) {
  Draw draw(seed);
  ExpertMap map = home_map(kExperts, world, (kExperts + world - 1) / world + 3);
  std::vector<int> replicas(kExperts, 1);
  for (int32_t& slot : map.expert_of_slot) {
    const auto e = static_cast<int32_t>(draw.between(0, kExperts - 1));
    if (slot >= 0 || draw.one_in(6) || replicas[static_cast<size_t>(e)] == kMaxReplicas) continue;
    slot = e;
    ++replicas[static_cast<size_t>(e)];
  }
  return map;
}
std::vector<int64_t> random_routes(int world, uint64_t seed) { return skewed_routes(kExperts, world, seed, 20); }

MoeLayerConfig config_of(const Kind& kind, CombineOrder order, int experts, int world) {
  MoeLayerConfig c;
  c.hidden = kHidden;
  c.intermediate = kIntermediate;
  c.num_experts = experts;
  c.topk = kTopk;
  c.max_tokens = kMaxTokens;
  c.order = order;
  c.exchange = kind.exchange;
  c.form = kind.form;
  c.storage = WeightStorage::view;
  if (!is_split(kind)) return c;
  c.overflow = Overflow::split;  // most calls run in passes
  c.capacity = world * kTopk * 7;
  return c;
}

using Rows = std::vector<std::byte>;

/// Multiples of scale / 8 up to `scale`.
Rows random_row_values(int64_t n, uint64_t seed, float scale) {
  Draw draw(seed);
  Rows rows(dtype_bytes(DType::bf16, n));
  for (int64_t i = 0; i < n; ++i)
    oracle::store(DType::bf16, rows.data(), i, static_cast<float>(draw.between(-8, 8)) / 8 * scale);
  return rows;
}

/// The second product's weights: one of each row is not 0.
Rows sparse_values(uint64_t seed) {
  Draw draw(seed);
  Rows rows(dtype_bytes(DType::bf16, kHidden * kIntermediate));
  for (int64_t c = 0; c < kHidden; ++c)
    oracle::store(DType::bf16, rows.data(), c * kIntermediate + draw.between(0, kIntermediate - 1),
                  static_cast<float>(draw.between(1, 7)) / 4);
  return rows;
}

/// Weights of experts in a rank's memory, slot by slot. Both products of a row are exact before they are rounded, so no result
/// depends on the order of their sums, which on the CPU varies with the number of rows.
struct SlotMemory {
  static constexpr size_t kW13 = size_t{4} * kIntermediate * kHidden, kW2 = size_t{2} * kIntermediate * kHidden;
  std::byte *w13 = nullptr, *w2 = nullptr;

  static size_t bytes(int slots) { return static_cast<size_t>(slots) * (kW13 + kW2); }
  /// `experts`: of this rank's slots; -1: an empty slot.
  void fill(RankMemory& memory, std::span<const int32_t> experts) const {
    for (size_t slot = 0; slot < experts.size(); ++slot) {
      const auto seed = static_cast<uint64_t>(experts[slot]) * 2 + 1000;
      const bool empty = experts[slot] < 0;
      const Rows up = empty ? Rows(kW13, std::byte{0xff}) : random_row_values(kW13 / 2, seed, 0.25f);
      const Rows down = empty ? Rows(kW2, std::byte{0xff}) : sparse_values(seed + 1);
      memory.write(w13 + slot * kW13, up.data(), kW13);
      memory.write(w2 + slot * kW2, down.data(), kW2);
    }
  }
};

/// The experts of a rank's slots. A slot that repeats an expert of its rank is unused, hence empty.
std::vector<int32_t> slots_of(const ExpertMap& map, int rank) {
  const auto begin = map.expert_of_slot.begin() + rank * map.slots_per_rank;
  std::vector<int32_t> experts(begin, begin + map.slots_per_rank);
  for (size_t i = 1; i < experts.size(); ++i)
    if (std::find(experts.begin(), experts.begin() + static_cast<std::ptrdiff_t>(i), experts[i]) !=
        experts.begin() + static_cast<std::ptrdiff_t>(i))
      experts[i] = -1;
  return experts;
}

/// Tokens of one rank in one call. Half of the routes go to three experts; others are dropped.
struct Input {
  int64_t tokens;
  std::vector<int32_t> narrow;
  std::vector<int64_t> wide;
  std::vector<float> weights;
  Rows x, out;

  explicit Input(int64_t num_tokens, uint64_t seed)
      : tokens(num_tokens),
        x(random_row_values(tokens * kHidden, seed + 1, 1)),
        out(random_row_values(tokens * kHidden, seed + 2, 1)) {
    Draw draw(seed);
    for (int64_t t = 0; t < tokens; ++t) {
      std::vector<int64_t> chosen;
      while (chosen.size() < kTopk) {
        const int64_t id = draw.one_in(2) ? draw.between(0, 2) : draw.between(-1, kExperts - 1);
        if (id >= 0 && std::find(chosen.begin(), chosen.end(), id) != chosen.end()) continue;
        chosen.push_back(id);
      }
      wide.insert(wide.end(), chosen.begin(), chosen.end());
    }
    narrow.assign(wide.begin(), wide.end());
    for (size_t i = 0; i < wide.size(); ++i) weights.push_back(static_cast<float>(draw.between(1, 64)) / 64);
  }
};

struct Options {
  SlotSelector* selector = nullptr;
  bool wide = false, add = false;
  std::optional<int32_t> device_tokens;
};

/// One rank's layers of one kind: without replicas, which has one expert per slot and sums per route, and with replicas.
class Side {
 public:
  Side(Group& group, const Kind& kind, CombineOrder order, const ExpertMap& map, int num_sms)
      : memory_(rank_memory(group)), num_sms_(num_sms) {
    const int first = first_expert(kExperts, group.size(), group.rank()),
              end = first_expert(kExperts, group.size(), group.rank() + 1);
    const size_t own = SlotMemory::bytes(end - first), slots = SlotMemory::bytes(map.slots_per_rank);
    auto* const at = static_cast<std::byte*>(memory_.keep(own + slots + 16));
    const auto place = [](std::byte* begin, int n) {
      return SlotMemory{begin, begin + static_cast<size_t>(n) * SlotMemory::kW13};
    };
    const SlotMemory home = place(at, end - first);
    slots_ = place(at + own, map.slots_per_rank);
    std::vector<int32_t> experts;
    for (int e = first; e < end; ++e) experts.push_back(e);
    home.fill(memory_, experts);
    load(map, group.rank());
    plain.emplace(group, config_of(kind, CombineOrder::per_route, kExperts, group.size()), home.w13, home.w2, memory_.stream());
    replicated.emplace(group, config_of(kind, order, map.num_slots(), group.size()), slots_.w13, slots_.w2, memory_.stream());
  }
  void load(const ExpertMap& map, int rank) { slots_.fill(memory_, slots_of(map, rank)); }

  /// Collective. Returns `out`.
  Rows forward(MoeLayer& layer, const Input& in, const void* ids, const std::vector<float>& weights, const Options& o = {}) {
    MoeLayerCall call;
    call.stream = memory_.stream();
    call.num_sms = num_sms_;
    call.selector = o.selector;
    call.add = o.add;
    if (o.device_tokens) call.device_tokens = static_cast<const int32_t*>(memory_.give(&*o.device_tokens, 4));
    const size_t id_bytes = in.wide.size() * (o.wide ? 8 : 4);
    const ExpertIds given{memory_.give(ids, id_bytes), in.tokens, kTopk, o.wide};
    Rows result = in.out;
    void* const out = memory_.lend(result.data(), result.size());
    layer.forward(memory_.give(in.x.data(), in.x.size()), given,
                  static_cast<const float*>(memory_.give(weights.data(), weights.size() * 4)), out, call);
    if (!result.empty()) memory_.read(result.data(), out, result.size());
    memory_.release();
    return result;
  }

  /// Collective. Returns the experts' outputs for each route, [T, K, H], which the layer without replicas computes one by one.
  Rows rows_of_routes(const Input& in) {
    const auto row = dtype_bytes(DType::bf16, kHidden);
    Rows rows(static_cast<size_t>(in.tokens) * kTopk * row);
    for (size_t k = 0; k < kTopk; ++k) {
      std::vector<int32_t> ids(in.narrow.size(), -1);
      for (size_t f = k; f < ids.size(); f += kTopk) ids[f] = in.narrow[f];
      const Rows one = forward(*plain, in, ids.data(), {});
      for (size_t t = 0; t < static_cast<size_t>(in.tokens); ++t)
        std::copy_n(one.begin() + static_cast<std::ptrdiff_t>(t * row), row,
                    rows.begin() + static_cast<std::ptrdiff_t>((t * kTopk + k) * row));
    }
    return rows;
  }

  /// Collective. Slots of the ids according to another selector of the same map.
  std::vector<int32_t> slots_by(SlotSelector& selector, const Input& in) {
    std::vector<int32_t> slots(in.narrow.size());
    void* const to = memory_.lend(slots.data(), slots.size() * 4);
    selector.select(ExpertIds::of(static_cast<int32_t*>(memory_.give(in.narrow.data(), slots.size() * 4)), in.tokens, kTopk),
                    to, memory_.stream());
    if (!slots.empty()) memory_.read(slots.data(), to, slots.size() * 4);
    memory_.release();
    return slots;
  }

  std::optional<MoeLayer> plain, replicated;

 private:
  RankMemory& memory_;
  const int num_sms_;
  SlotMemory slots_;
};

/// The expected result of the first `tokens` tokens; the other rows are those of in.out. Low latency adds the rounded layer.
Rows expected(const Kind& kind, CombineOrder order, const Input& in, const Rows& rows_of_routes,
              const std::vector<int32_t>& slots, int slots_per_rank, bool add, int64_t tokens) {
  const auto row = dtype_bytes(DType::bf16, kHidden);
  const bool adds_later = add && kind.exchange == MoeExchange::low_latency;
  Rows result = in.out;
  for (size_t t = 0; t < static_cast<size_t>(tokens); ++t) {
    std::vector<oracle::Term> terms;
    for (size_t f = t * kTopk; f < (t + 1) * kTopk; ++f)
      if (slots[f] >= 0) terms.push_back({rows_of_routes.data() + f * row, in.weights[f], slots[f] / slots_per_rank});
    oracle::SumSpec spec;
    spec.hidden = kHidden;
    spec.order = order;
    spec.weighted = true;
    if (add && !adds_later) spec.bias[0] = in.out.data() + t * row;
    Rows sum(row);
    oracle::combine_row(spec, terms, sum.data());
    for (int64_t c = 0; adds_later && c < kHidden; ++c)
      oracle::store(DType::bf16, sum.data(), c,
                    oracle::load(DType::bf16, in.out.data() + t * row, c) + oracle::load(DType::bf16, sum.data(), c));
    std::copy(sum.begin(), sum.end(), result.begin() + static_cast<std::ptrdiff_t>(t * row));
  }
  return result;
}

std::vector<uint16_t> words(const Rows& rows) {
  std::vector<uint16_t> all(rows.size() / 2);
  std::copy_n(rows.begin(), rows.size(), reinterpret_cast<std::byte*>(all.data()));
  return all;
}

bool exists(const Kind& kind, int world) { return kind.form == MoeForm::separate || !spans_hosts(world); }

size_t heap_bytes(int world) {
  size_t max = 0;
  for (const Kind& kind : kKinds)
    for (const CombineOrder order : kOrders)
      max =
          std::max(max, MoeLayer::heap_bytes(config_of(kind, order, random_map(world, 1).num_slots(), world), world, kBackend));
  return 2 * max + (size_t{1} << 20);
}

class ReplicatedLayers : public testing::TestWithParam<Where> {
 protected:
  std::string run(const RankBody& body) const {
    const int world = GetParam().world;
    return joined(run_ranks(ranks_of_suite(), fleet_of(world, GetParam().workers, heap_bytes(world)), body));
  }
  int sms() const { return kOnGpu ? GetParam().workers.warps : 0; }
};

/// Three calls: with the first map, with int64 ids, `add` and the next map, and with T in memory.
void check_calls(Group& group, const Kind& kind, CombineOrder order, int num_sms, uint64_t seed, Failures& failures) {
  const int world = group.size(), rank = group.rank();
  ExpertMap map = random_map(world, seed + 3);
  Side side(group, kind, order, map, num_sms);
  SlotSelector selector(group, map), other(group, map);
  std::vector<int64_t> counts(static_cast<size_t>(world * kExperts), 0);
  for (int step = 0; step < 3; ++step) {
    failures.set_context(name_of(kind, order) + ", seed " + std::to_string(seed) + ", call " + std::to_string(step));
    if (step == 1) {
      map = random_map(world, seed + 8);
      side.load(map, rank);
      const std::vector<int64_t> routes = random_routes(world, seed + 5);
      for (SlotSelector* s : {&selector, &other}) s->set_map(map, routes, rank_memory(group).stream());
    }
    Options o{&selector, step == 1, step == 1, {}};
    for (int r = 0; r < world; ++r) {
      const Input in((r + step) % 3 * (kMaxTokens / 2),
                     seed + static_cast<uint64_t>(100 * step + r));  // no tokens on some ranks
      const int64_t tokens = step == 2 ? in.tokens * 3 / 4 : in.tokens;
      for (int64_t f = 0; f < tokens * kTopk; ++f)
        if (const int64_t id = in.wide[static_cast<size_t>(f)]; id >= 0) ++counts[static_cast<size_t>(r * kExperts + id)];
      if (r != rank) continue;
      if (step == 2) o.device_tokens = static_cast<int32_t>(tokens);
      const Rows rows = side.rows_of_routes(in);
      const std::vector<int32_t> slots = side.slots_by(other, in);
      const void* const ids = o.wide ? static_cast<const void*>(in.wide.data()) : in.narrow.data();
      const Rows got = side.forward(*side.replicated, in, ids, in.weights, o);
      const Rows wanted = expected(kind, order, in, rows, slots, map.slots_per_rank, o.add, tokens);
      failures.equal_range(words(wanted), words(got), "sums");
      o.selector = nullptr;
      const Rows plain = side.forward(*side.plain, in, ids, in.weights, o);
      if (order == CombineOrder::per_route) failures.equal_range(words(plain), words(got), "bits without replicas");
    }
  }
  failures.equal_range(counts, selector.gather_routes(), "routes");
}

TEST_P(ReplicatedLayers, HaveTheBitsOfTheOracle) {
  EXPECT_EQ(run([&](Group& group, Failures& failures) {
              for (const Kind& kind : kKinds)
                for (const CombineOrder order : kOrders)
                  if (exists(kind, group.size())) check_calls(group, kind, order, sms(), 0, failures);
            }),
            "");
}

INSTANTIATE_TEST_SUITE_P(Everywhere, ReplicatedLayers, testing::ValuesIn(everywhere()), where_name);

/// Other maps, on any number of ranks up to 8; SWITCHYARD_RANDOM_MAPS sets the number of groups.
TEST(ReplicatedLayersAtRandom, HaveTheBitsOfTheOracle) {
  const uint64_t groups = from_environment("SWITCHYARD_RANDOM_MAPS", 16);
  for (uint64_t i = 1; i <= groups && !HasFailure(); ++i) {
    Draw draw(i);
    const int world = 1 + static_cast<int>(i % 8), sms = kOnGpu ? static_cast<int>(draw.between(1, 3)) : 0;
    const Kind& kind = kKinds[i / 8 % std::size(kKinds)];
    const CombineOrder order = draw.one_of(kOrders);
    if (!exists(kind, world)) continue;
    const Workers workers{static_cast<int>(draw.between(1, 2)), static_cast<int>(draw.between(1, 2)), draw.one_in(2)};
    const auto body = [&](Group& group, Failures& failures) { check_calls(group, kind, order, sms, i * 1000, failures); };
    EXPECT_EQ(joined(run_ranks(ranks_of_suite(), fleet_of(world, workers, heap_bytes(world)), body)), "");
  }
}

/// Runs one call of every kind on two ranks, after which the group may be unusable. Rank 1 passes `pick(selector, later)`, rank
/// 0 `selector`. `later` has a map of version 2.
void expect_refused(SlotSelector* (*pick)(SlotSelector& selector, SlotSelector& later, SlotSelector& small), ErrorCode code,
                    const std::string& in_normal, const std::string& in_low_latency) {
  for (const Kind& kind : kKinds) {
    if (!exists(kind, 2)) continue;
    const auto body = [&](Group& group, Failures& f) {
      const ExpertMap map = random_map(2, 1);
      Side side(group, kind, CombineOrder::per_route, map, 1);
      SlotSelector selector(group, map), later(group, map), small(group, home_map(kExperts, 2, 6));
      later.set_map(map, {}, rank_memory(group).stream());
      const Input in(kMaxTokens, static_cast<uint64_t>(group.rank()));
      Options o{&selector, false, false, {}};
      if (group.rank() == 1) o.selector = pick(selector, later, small);
      const Outcome end = outcome_of([&] {
        side.forward(*side.replicated, in, in.narrow.data(), in.weights, o);
        group.check();
      });
      f.equal(code_name(code), code_name(cause_of(end)), "code, " + end.text);
      const std::string& text = kind.exchange == MoeExchange::low_latency ? in_low_latency : in_normal;
      if (end.code != ErrorCode::peer_failed && !spans_hosts(2))
        f.check(end.text.find(text) != std::string::npos, "'" + end.text + "' does not contain '" + text + "'");
    };
    EXPECT_EQ(on_ranks(2, body, heap_bytes(2)), "") << kind.name;
  }
}

TEST(ReplicatedLayersOfTwo, ASelectorOnOneRank) {
  expect_refused([](SlotSelector&, SlotSelector&, SlotSelector&) -> SlotSelector* { return nullptr; }, ErrorCode::mismatch,
                 "MoeLayerCall::selector = ", "LowLatencyDispatchOptions::selector = ");
}

TEST(ReplicatedLayersOfTwo, MapsOfDifferentVersions) {
  const std::string text = "map of ", rest = " (its version + 3 * the selector's number, modulo 8) = ";
  expect_refused([](SlotSelector&, SlotSelector& later, SlotSelector&) { return &later; }, ErrorCode::mismatch,
                 text + "MoeLayerCall::selector" + rest, text + "LowLatencyDispatchOptions::selector" + rest);
}

TEST(ReplicatedLayersOfTwo, ASelectorOfOtherSizes) {
  const std::string rest = " has 12 slots: must be num_experts, 18";
  expect_refused([](SlotSelector&, SlotSelector&, SlotSelector& small) { return &small; }, ErrorCode::invalid_argument,
                 "MoeLayerCall::selector" + rest, "LowLatencyDispatchOptions::selector" + rest);
}

}  // namespace
}  // namespace harness
