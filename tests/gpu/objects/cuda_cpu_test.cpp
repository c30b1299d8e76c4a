// SPDX-License-Identifier: Apache-2.0
// With the same input on the CPU backend and on GPUs in one process, every output is bitwise equal.
#include <algorithm>
#include <cstring>

#include "gpu/harness/object_rig.hpp"

namespace harness {
namespace {

using Bytes = std::vector<std::byte>;
/// Returns host copies of backend memory.
using Reader = std::function<Bytes(const void*, size_t)>;

/// All results of one rank, indexed by name.
class Results {
 public:
  void add(const std::string& name, Bytes bytes) { parts_.emplace_back(name, std::move(bytes)); }
  template <class T>
  void add_values(const std::string& name, const std::vector<T>& values) {
    const auto* const at = reinterpret_cast<const std::byte*>(values.data());
    add(name, Bytes(at, at + values.size() * sizeof(T)));
  }
  void add_dispatched(const std::string& call, const Dispatched& d, const Reader& read) {
    const auto rows = static_cast<size_t>(d.handle.rows());  // other rows may have any content
    const auto array = [&](const char* name, const auto& span) {
      add(call + ", " + name, read(span.data(), span.size_bytes()));
    };
    add_values<int64_t>(call + ", shape", {d.x.rows, d.x.cols, static_cast<int64_t>(d.x.dtype), d.handle.rows()});
    add(call + ", x", read(d.x.data, rows * switchyard::dtype_bytes(d.x.dtype, d.x.cols)));
    add(call + ", scales", read(d.x.scales, d.x.scales ? rows * switchyard::scale_row_bytes(d.x.cols, d.x.scale_kind) : 0));
    array("topk_ids", d.topk_ids), array("topk_weights", d.topk_weights), array("source_token", d.source_token);
    array("row_source", d.row_source), array("row_weights", d.row_weights), array("expert_first_row", d.expert_first_row);
    array("tokens_per_expert", d.tokens_per_expert), array("aligned_per_expert", d.aligned_per_expert);
    array("dropped", d.dropped), array("dropped_per_source", d.dropped_per_source);
    const switchyard::DispatchCounts counts = d.handle.counts();
    add_values(call + ", counts of tokens", counts.tokens_per_expert);
    add_values(call + ", counts of rows", counts.aligned_per_expert);
    add_values(call + ", first rows", counts.expert_first_row);
  }
  void compare(const Results& other, int rank, Failures& f) const {
    f.equal(parts_.size(), other.parts_.size(), "parts");
    for (size_t i = 0; i < std::min(parts_.size(), other.parts_.size()); ++i) {
      const auto& [name, cpu] = parts_[i];
      const auto& [same_name, gpu] = other.parts_[i];
      const std::string what = "rank " + std::to_string(rank) + ", " + name;
      f.equal(name, same_name, "part");
      if (!f.equal(cpu.size(), gpu.size(), what + ", bytes")) continue;
      const auto at = std::mismatch(cpu.begin(), cpu.end(), gpu.begin()).first - cpu.begin();
      f.equal(cpu.size(), static_cast<size_t>(at), what + ", first byte that differs");
    }
  }
  bool any() const {
    return std::any_of(parts_.begin(), parts_.end(), [](const auto& part) { return !part.second.empty(); });
  }

 private:
  std::vector<std::pair<std::string, Bytes>> parts_;
};

DispatchOptions cpu_options(const Case& c, int rank) {
  DispatchOptions o = make_dispatch_options(c, rank);
  o.num_sms = 0;
  return o;
}

/// Runs dispatch, combine and cached dispatch on the CPU.
void run_on_cpu(Group& group, const NormalConfig& config, const Case& c, Results& results) {
  const Reader read = [](const void* at, size_t bytes) {
    const auto* const from = static_cast<const std::byte*>(at);
    return Bytes(from, from + bytes);
  };
  NormalExchange exchange(group, config);
  RankData data(c, group.rank(), 0), again(c, group.rank(), 1);
  const DispatchOptions options = cpu_options(c, group.rank());
  const Dispatched d = exchange.dispatch(data.x(), data.ids(), data.weights(), options);
  results.add_dispatched("dispatch", d, read);
  const switchyard::RowBuffer y = exchange.allocate_rows(d.handle, c.scenario.y_type);
  data.fill_outputs(y.rows());
  exchange.combine(y.rows(), d.handle, data.out(), data.combine_options(), data.out_weights());
  const auto tokens = static_cast<size_t>(c.problem.tokens(group.rank()));
  results.add("combine", read(data.out(), tokens * static_cast<size_t>(c.scenario.hidden) * 2));
  if (data.out_weights()) results.add("weights", read(data.out_weights(), tokens * static_cast<size_t>(c.problem.topk) * 4));
  results.add_dispatched("cached dispatch", exchange.dispatch(again.x(), d.handle, options), read);
}

/// Runs the same calls on a GPU. Memory does not change while it is read, because all ranks have met.
void run_on_gpu(Station& me, const NormalConfig& config, const Case& c, Results& results) {
  const Reader read = [&me](const void* at, size_t bytes) {
    Bytes to(bytes);
    me.read(to.data(), at, bytes);
    return to;
  };
  NormalExchange exchange(me.group, config);
  RankData data(c, me.rank(), 0), again(c, me.rank(), 1);
  const Inputs in = me.upload(c, data), more = me.upload(c, again);
  DispatchOptions options = cpu_options(c, me.rank());
  options.stream = me.stream();
  options.num_sms = c.scenario.num_sms;
  me.meet();
  const Dispatched d = exchange.dispatch(in.x, in.ids, in.weights, options);
  me.meet();
  results.add_dispatched("dispatch", d, read);
  const switchyard::RowBuffer y = exchange.allocate_rows(d.handle, c.scenario.y_type);
  const auto rows = static_cast<size_t>(y.rows().rows), hidden = static_cast<size_t>(c.scenario.hidden);
  const auto tokens = static_cast<size_t>(c.problem.tokens(me.rank())), topk = static_cast<size_t>(c.problem.topk);
  std::vector<uint16_t> outputs(rows * hidden + 1);
  data.fill_outputs({outputs.data(), y.rows().rows, c.scenario.hidden, c.scenario.y_type});
  const void* const uploaded = me.upload(outputs.data(), rows * hidden * 2);
  CombineOptions sum = data.combine_options();
  sum.stream = me.stream();
  sum.num_sms = c.scenario.num_sms;
  for (const void*& bias : sum.bias)
    if (bias) bias = me.upload(bias, tokens * hidden * 2);
  const bool rank_major = c.problem.layout == Layout::rank_major;
  const size_t given = (rank_major ? static_cast<size_t>(d.handle.rows()) : tokens) * topk;
  float* out_weights = nullptr;
  if (sum.topk_weights) {  // one entry for each allocated row
    std::vector<float> all(std::max(given, rows * topk) + 1);
    std::copy(sum.topk_weights, sum.topk_weights + given, all.begin());
    sum.topk_weights = static_cast<const float*>(me.upload(all.data(), all.size() * 4));
    if (rank_major) out_weights = reinterpret_cast<float*>(me.allocate(tokens * topk * 4 + 4));
  }
  me.meet();
  launch_copy(y.rows().data, uploaded, rows * hidden * 2, me.stream());
  exchange.combine(y.rows(), d.handle, in.out, sum, out_weights);
  me.meet();
  results.add("combine", read(in.out, tokens * hidden * 2));
  if (out_weights) results.add("weights", read(out_weights, tokens * topk * 4));
  me.meet();
  const Dispatched e = exchange.dispatch(more.x, d.handle, options);
  me.meet();
  results.add_dispatched("cached dispatch", e, read);
  me.meet();
}

struct Both {
  const char* name;
  Layout layout;
  CombineOrder order = CombineOrder::per_rank;
  ScaleKind quantize = ScaleKind::none;
  bool drops = false;
  Staging staging = Staging::direct;
};
std::ostream& operator<<(std::ostream& out, const Both& b) { return out << b.name; }
class SameOnCpuAndGpus : public testing::TestWithParam<Both> {};

TEST_P(SameOnCpuAndGpus, EveryOutput) {
  const Both& both = GetParam();
  isolated([&] {
    for (const int world : {1, 2, 4}) {
      for (const Width width : {Width::narrow, Width::wide}) {
        Scenario s = with_width(gpu_scenario(both.name, world, both.layout, 24, 91), width);
        for (size_t r = 0; r < s.tokens.size(); ++r) s.tokens[r] -= static_cast<int64_t>(5 * r);
        s.identity = false;
        s.problem.size = SizePolicy::exact;
        s.order = both.order;
        s.quantize = both.quantize;
        s.staging = both.staging;
        s.ring = {3, 2, 4};
        s.drop_percent = 10;
        s.num_bias = 1;
        s.replace_weights = both.layout == Layout::rank_major;
        if (both.drops) s.problem.overflow = switchyard::Overflow::drop_and_report, s.capacity_percent = 70;
        const auto c = make_case(s);
        const NormalConfig config = make_config(*c);
        std::vector<Results> cpu(static_cast<size_t>(world)), gpu(static_cast<size_t>(world));
        Fleet fleet;
        fleet.world = world;
        fleet.options.heap_bytes = NormalExchange::heap_bytes(config, world);
        const auto failed = run_threads(
            fleet, [&](Group& group, Failures&) { run_on_cpu(group, config, *c, cpu[static_cast<size_t>(group.rank())]); });
        if (!failed.empty()) throw std::runtime_error(joined(failed));
        on_gpus(world, heap_for(config, world), [&](Station& me) {
          const auto rank = static_cast<size_t>(me.rank());
          me.f.set_context(s.name + ", W" + std::to_string(world));
          run_on_gpu(me, config, *c, gpu[rank]);
          me.f.check(cpu[rank].any(), "nothing to compare");
          cpu[rank].compare(gpu[rank], me.rank(), me.f);
        });
      }
    }
  });
}

constexpr auto kRankMajor = Layout::rank_major, kExpertMajor = Layout::expert_major;
constexpr auto kPerRank = CombineOrder::per_rank, kPerRoute = CombineOrder::per_route;
INSTANTIATE_TEST_SUITE_P(Gpu, SameOnCpuAndGpus,
                         testing::Values(Both{"rank_major", kRankMajor}, Both{"expert_major_per_rank", kExpertMajor},
                                         Both{"expert_major_per_route", kExpertMajor, kPerRoute},
                                         Both{"rank_major_quantised", kRankMajor, kPerRank, ScaleKind::f32},
                                         Both{"expert_major_quantised", kExpertMajor, kPerRank, ScaleKind::ue8m0},
                                         Both{"rank_major_drops", kRankMajor, kPerRank, ScaleKind::none, true},
                                         Both{"expert_major_drops", kExpertMajor, kPerRoute, ScaleKind::none, true},
                                         Both{"rings", kExpertMajor, kPerRank, ScaleKind::f32, false, Staging::ring}),
                         [](const auto& both) { return std::string(both.param.name); });

}  // namespace
}  // namespace harness
