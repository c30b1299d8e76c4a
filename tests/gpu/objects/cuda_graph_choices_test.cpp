// SPDX-License-Identifier: Apache-2.0
// Captured calls with the options used by models: sums per route, bias, a capacity beyond which routes are dropped, and expert
// outputs in registered memory. They are replayed with different inputs, routings and token counts, and everything is compared.
#include <algorithm>
#include <array>

#include "gpu/harness/object_rig.hpp"

namespace harness {
namespace {

constexpr int64_t kMaxTokens = 14;
constexpr int kReplays = 120, kVariants = 6;

struct Choice {
  const char* name;
  int world;
  Layout layout;
  CombineOrder order = CombineOrder::per_rank;
  bool drops = false;       ///< there is room for 60 % of the rows of the first variant
  bool registered = false;  ///< experts write to registered memory instead of in place
  int num_bias = 0;
  Width width = Width::narrow;
};
std::ostream& operator<<(std::ostream& out, const Choice& c) { return out << c.name; }

using Cases = std::vector<std::shared_ptr<const Case>>;

/// Routings with different T but the same room for rows.
Cases make_variants(const Choice& choice) {
  Cases all;
  for (uint64_t v = 0; v < kVariants; ++v) {
    Scenario s = gpu_scenario("variant " + std::to_string(v), choice.world, choice.layout, kMaxTokens, 70 + v);
    s.int64_ids = false;
    for (size_t r = 0; r < s.tokens.size() && v > 0; ++r)
      s.tokens[r] = static_cast<int64_t>(oracle::mix(6, v, r) % (kMaxTokens + 1));
    s.order = choice.order;
    s.num_bias = choice.num_bias;
    if (choice.drops) s.problem.overflow = switchyard::Overflow::drop_and_report;
    if (choice.drops && v == 0) s.capacity_percent = 60;
    if (choice.drops && v > 0) {
      s.problem.size = SizePolicy::capacity;
      s.problem.capacity = all[0]->problem.capacity;
    }
    all.push_back(make_case(with_width(s, choice.width)));
  }
  return all;
}

/// The inputs of all variants and the captured addresses for one of the graph's two dispatches and its combine.
struct Side {
  Side(Station& me, const Cases& cases, int repetition) : cases_(cases) {
    const size_t row = row_bytes_of(*cases[0]), all = static_cast<size_t>(kMaxTokens) * row;
    x = me.allocate(all), out = me.allocate(all), poison_ = me.allocate(all);
    for (int b = 0; b < cases[0]->scenario.num_bias; ++b) bias[static_cast<size_t>(b)] = me.allocate(all);
    for (const auto& c : cases) {
      data.push_back(std::make_unique<RankData>(*c, me.rank(), repetition));
      in.push_back(me.upload(*c, *data.back()));
      const CombineOptions o = data.back()->combine_options();
      bias_.emplace_back();
      for (size_t b = 0; b < 2; ++b)
        if (bias[b]) bias_.back()[b] = me.upload(o.bias[b], in.back().x_bytes);
    }
  }
  /// Sets the inputs of variant v and poisons `out`.
  void set(size_t v, CopyList& list) const {
    list.add(x, in[v].x.data, in[v].x_bytes);
    list.add(out, poison_, static_cast<size_t>(kMaxTokens) * row_bytes_of(*cases_[v]));
    for (size_t b = 0; b < 2; ++b)
      if (bias[b]) list.add(bias[b], bias_[v][b], in[v].x_bytes);
  }
  switchyard::ConstRows rows() const { return {x, kMaxTokens, cases_[0]->scenario.hidden, DType::bf16}; }

  std::vector<std::unique_ptr<RankData>> data;
  std::vector<Inputs> in;
  std::byte *x = nullptr, *out = nullptr;
  std::array<std::byte*, 2> bias{};

 private:
  const Cases& cases_;
  std::byte* poison_ = nullptr;  ///< same pattern with which Station fills its memory
  std::vector<std::array<void*, 2>> bias_;
};

/// One rank's graph: a dispatch, a combine, a cached dispatch and a combine.
class ChosenGraph {
 public:
  ChosenGraph(Station& me, NormalExchange& exchange, const Cases& cases, bool registered)
      : me_(me), exchange_(exchange), cases_(cases), fresh_(me, cases, 0), cached_(me, cases, 1) {
    ids_ = me.allocate(kMaxTokens * 3 * 4);
    weights_ = reinterpret_cast<float*>(me.allocate(kMaxTokens * 3 * 4));
    tokens_ = reinterpret_cast<int32_t*>(me.allocate(4));
    if (registered) {
      const auto bytes = static_cast<size_t>(worst_rows(*cases[0])) * row_bytes_of(*cases[0]);
      outputs_ = me.allocate(bytes);
      registered_ = me.group.register_memory(outputs_, bytes);
    }
    for (size_t v = 0; v < cases.size(); ++v) {
      const Inputs& in = fresh_.in[v];
      me.meet();
      handles_.push_back(exchange.dispatch(in.x, in.ids, in.weights, me.dispatch_options(*cases[v], me.stream())).handle);
      me.meet();
      (void)handles_.back().rows();
    }
    me.meet();
    capture();
    me.meet();
  }
  /// Collective; must be called after all replays have ended.
  ~ChosenGraph() {
    if (exec_) cudaGraphExecDestroy(exec_);
    if (graph_) cudaGraphDestroy(graph_);
  }
  ChosenGraph(const ChosenGraph&) = delete;

  void replay(size_t v) {
    const Inputs& in = fresh_.in[v];
    CopyList list;
    fresh_.set(v, list);
    cached_.set(v, list);
    list.add(ids_, in.ids.data, in.ids_bytes);
    list.add(weights_, in.weights, in.weights_bytes);
    launch_copies(list, me_.stream());
    launch_set(tokens_, static_cast<int32_t>(in.ids.num_tokens), me_.stream());
    must(cudaGraphLaunch(exec_, me_.stream()), "cudaGraphLaunch");
    Replayed r{v, {}, {}};
    for (size_t n = 0; n < 2; ++n) {
      r.shots[n] = me_.shoot(delivered_[n], me_.stream());
      r.outs[n] = me_.keep(side(n).out, in.out_bytes, me_.stream());
    }
    replayed_.push_back(r);
  }

  /// Call after meet().
  void check() {
    for (size_t i = 0; i < replayed_.size(); ++i) {
      const Replayed& r = replayed_[i];
      for (size_t n = 0; n < 2; ++n) {
        me_.f.set_context("replay " + std::to_string(i) + " of variant " + std::to_string(r.variant) +
                          (n == 0 ? "" : ", cached"));
        me_.check(*cases_[r.variant], *side(n).data[r.variant], r.shots[n], handles_[r.variant]);
        me_.check_combined(*side(n).data[r.variant], side(n).in[r.variant], r.outs[n]);
      }
    }
  }

 private:
  struct Replayed {
    size_t variant;
    std::array<Shot, 2> shots;
    std::array<std::byte*, 2> outs;
  };

  Side& side(size_t n) { return n == 0 ? fresh_ : cached_; }

  void combine(const Dispatched& d, const Handle& handle, const Side& to) {
    switchyard::ConstRows y = d.x;
    if (outputs_) {
      launch_copy(outputs_, d.x.data, static_cast<size_t>(d.x.rows) * row_bytes_of(*cases_[0]), me_.stream());
      y.data = outputs_;
    }
    CombineOptions o = me_.combine_options(*cases_[0], me_.stream());
    for (size_t b = 0; b < 2; ++b) o.bias[b] = to.bias[b];
    exchange_.combine(y, handle, to.out, o);
  }

  void capture() {
    DispatchOptions o = me_.dispatch_options(*cases_[0], me_.stream());
    must(cudaStreamBeginCapture(me_.stream(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    {
      o.device_tokens = tokens_;
      const Dispatched d = exchange_.dispatch(
          fresh_.rows(), switchyard::ExpertIds::of(reinterpret_cast<const int32_t*>(ids_), kMaxTokens, 3), weights_, o);
      combine(d, d.handle, fresh_);
      o.device_tokens = nullptr;
      const Dispatched e = exchange_.dispatch(cached_.rows(), d.handle, o);
      combine(e, d.handle, cached_);
      delivered_ = {d, e};
    }
    for (Dispatched& d : delivered_) {  // addresses only
      d.block.reset();
      d.handle = Handle();
    }
    must(cudaStreamEndCapture(me_.stream(), &graph_), "cudaStreamEndCapture");
    must(cudaGraphInstantiate(&exec_, graph_, 0), "cudaGraphInstantiate");
    must(cudaGraphUpload(exec_, me_.stream()), "cudaGraphUpload");
  }

  Station& me_;
  NormalExchange& exchange_;
  const Cases& cases_;
  Side fresh_, cached_;
  std::byte *ids_ = nullptr, *outputs_ = nullptr;
  float* weights_ = nullptr;
  int32_t* tokens_ = nullptr;
  switchyard::RegisteredMemory registered_;
  std::vector<Handle> handles_;
  std::array<Dispatched, 2> delivered_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
  std::vector<Replayed> replayed_;
};

class GraphChoices : public testing::TestWithParam<Choice> {};

TEST_P(GraphChoices, ReplayWithOtherInputsAndTokens) {
  const Choice& choice = GetParam();
  const auto cases = make_variants(choice);
  ASSERT_EQ(choice.drops, cases[0]->expected.any_dropped);
  const NormalConfig config = config_with_large_pool(*cases[0], 6);
  on_gpus(choice.world, heap_for(config, choice.world), [&](Station& me) {
    NormalExchange exchange(me.group, config);
    {
      ChosenGraph graph(me, exchange, cases, choice.registered);
      for (int i = 0; i < kReplays; ++i) {
        graph.replay(oracle::mix(13, static_cast<uint64_t>(i)) % cases.size());
        if (i % 16 == 15) must(cudaStreamSynchronize(me.stream()), "replays");
      }
      me.meet();
      graph.check();
      me.group.check();
      me.meet();
    }
    me.meet();
  });
}

constexpr auto kRankMajor = Layout::rank_major, kExpertMajor = Layout::expert_major;
constexpr auto kPerRank = CombineOrder::per_rank, kPerRoute = CombineOrder::per_route;
constexpr bool kDrops = true, kRegistered = true;
INSTANTIATE_TEST_SUITE_P(
    Gpu, GraphChoices,
    testing::Values(Choice{"per_route_W2", 2, kExpertMajor, kPerRoute}, Choice{"per_route_W4", 4, kExpertMajor, kPerRoute},
                    Choice{"per_route_W2_wide", 2, kExpertMajor, kPerRoute, !kDrops, !kRegistered, 0, Width::wide},
                    Choice{"drops_rank_major", 2, kRankMajor, kPerRank, kDrops},
                    Choice{"drops_expert_major", 4, kExpertMajor, kPerRank, kDrops},
                    Choice{"drops_expert_major_wide", 2, kExpertMajor, kPerRank, kDrops, !kRegistered, 0, Width::wide},
                    Choice{"registered_rank_major", 4, kRankMajor, kPerRank, !kDrops, kRegistered},
                    Choice{"registered_per_route", 2, kExpertMajor, kPerRoute, !kDrops, kRegistered},
                    Choice{"registered_per_route_wide", 2, kExpertMajor, kPerRoute, !kDrops, kRegistered, 0, Width::wide},
                    Choice{"bias_rank_major", 2, kRankMajor, kPerRank, !kDrops, !kRegistered, 2},
                    Choice{"bias_expert_major", 4, kExpertMajor, kPerRank, !kDrops, !kRegistered, 1, Width::wide},
                    Choice{"all_rank_major", 3, kRankMajor, kPerRank, kDrops, kRegistered, 2, Width::wide},
                    Choice{"all_per_route", 2, kExpertMajor, kPerRoute, kDrops, kRegistered, 2},
                    Choice{"all_per_route_wide", 2, kExpertMajor, kPerRoute, kDrops, kRegistered, 2, Width::wide}),
    [](const auto& choice) { return std::string(choice.param.name); });

}  // namespace
}  // namespace harness
