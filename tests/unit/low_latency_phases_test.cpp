// SPDX-License-Identifier: Apache-2.0
// The low-latency phases across hosts, which GPUs run as kernels between rounds. Here they run on the CPU: one thread runs each
// phase for all warps of all ranks in turn and copies the data of the rounds. For any assignment of ranks to hosts, every byte
// of every output must be the same as on one host. The mode's own suites test the outputs on one host.
#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "exchange/low_latency/hosts/remote_plan.hpp"
#include "exchange/low_latency/impl.hpp"
#include "oracle/rows.hpp"

namespace switchyard::detail {
namespace {

constexpr int kBlocks = 2, kWarps = 3;  // per rank
constexpr uint64_t kBase = 8192;        // offset of the object in a heap

struct Shape {
  std::string hosts;  ///< a letter for each rank
  LowLatencyConfig config;
  std::vector<int> tokens;  ///< of each rank
  uint64_t seed = 1;
};

/// Zeroed memory aligned to 256 bytes.
class Bytes {
 public:
  explicit Bytes(int64_t bytes) : memory_(static_cast<size_t>(bytes) + 256) {}
  std::byte* data() {
    const auto at = reinterpret_cast<uintptr_t>(memory_.data());
    return memory_.data() + (256 - at % 256) % 256;
  }

 private:
  std::vector<std::byte> memory_;
};

struct Rank {
  Rank(const HostMap& map, int number, const LowLatencyLayout& l, const ScalePlace& scales)
      : plan(map, number),
        heap(static_cast<int64_t>(kBase) + l.bytes()),
        remote_heap(RemoteReturns(l, plan.max_sources).bytes()),
        messages(2 * static_cast<int64_t>(plan.rails.size()) * rail_bytes(l)),
        output_bytes(carve_output(nullptr, l, scales, number, nullptr).bytes),
        output(output_bytes),
        crossed_ids(plan.sources.size() * static_cast<size_t>(l.max_tokens * l.topk)),
        waits(static_cast<size_t>(kBlocks * kWarps * map.world())),
        moved(static_cast<size_t>(kBlocks * kWarps)) {
    for (int w = 0; w < kBlocks * kWarps; ++w) warps.emplace_back(w / kWarps, w % kWarps, kBlocks, kWarps, nullptr);
    tables = carve_output(output.data(), l, scales, number, nullptr);
    remote.rails = plan.rails.data();
    remote.host_of = plan.host_of.data();
    remote.rail_of_host = plan.rail_of_host.data();
    remote.num_rails = static_cast<int>(plan.rails.size());
    remote.own_host = plan.own_host;
    remote.own_ranks = plan.own_ranks;
    remote.stride = rail_bytes(l);
    remote.sent = messages.data();
    remote.received = messages.data() + remote.num_rails * remote.stride;
  }

  RemotePlan plan;
  Bytes heap, remote_heap, messages;
  int64_t output_bytes;
  Bytes output;
  std::vector<int32_t> crossed_ids;
  std::vector<WaitCounter> waits;
  std::vector<MoveCounter> moved;
  FaultRecord fault;
  uint64_t fault_claims = 0;
  std::deque<CpuWarp> warps;
  LowLatencyTables tables;
  RemoteRails remote;
  std::vector<std::byte> x, out;
  std::vector<int64_t> ids;
  std::vector<float> weights;
  std::vector<std::byte> y;
};

/// All ranks of a group and their calls.
class Cluster {
 public:
  explicit Cluster(const Shape& shape) : shape_(shape), map_(places(shape.hosts)), world_(map_.world()) {
    layout_ = low_latency_layout(shape.config, world_, kBase);
    scales_ = scale_place(shape.config, world_);
    for (int r = 0; r < world_; ++r) ranks_.emplace_back(map_, r, layout_, scales_);
    for (int r = 0; r < world_; ++r) give_inputs(r);
  }

  void dispatch() {
    ++epoch_;
    std::vector<LowLatencyDispatchParams> p;
    for (int r = 0; r < world_; ++r) p.push_back(dispatch_params(r));
    each([&](Rank& rank, size_t r, CpuWarp& w) {
      low_latency_send<Cpu>(w, p[r]);
      LowLatencyDispatchParams in_parts = p[r];  // only data that crosses hosts: the rest would need a block barrier
      in_parts.part_columns = 128;
      in_parts.parts = (layout_.hidden + 127) / 128;
      if (!map_.one_host())
        rank.moved[static_cast<size_t>(w.index())].network_bytes += pack_crossing<Cpu>(w, in_parts, rank.remote);
      return true;
    });
    exchange([&](const Rank& rank, size_t) { return dispatch_transfers(rank.plan, rank.remote, layout_); });
    each([&](Rank& rank, size_t r, CpuWarp& w) {
      return map_.one_host() || forward_crossing_tokens<Cpu>(w, p[r], rank.remote, CrossedIds{rank.crossed_ids.data()});
    });
    each([&](Rank&, size_t r, CpuWarp& w) { return low_latency_receive<Cpu>(w, p[r]); });
  }

  void combine(CombineOrder order, DType type) {
    ++epoch_;
    std::vector<PhasedCombineParams> p;
    for (int r = 0; r < world_; ++r) p.push_back(combine_params(r, order, type));
    each([&](Rank&, size_t r, CpuWarp& w) {
      low_latency_return<Cpu>(w, p[r]);
      if (is_announcer(w)) write_combine_heads<Cpu>(w, p[r]);
      return true;
    });
    each([&](Rank&, size_t r, CpuWarp& w) { return collect_returned<Cpu>(w, p[r], 0); });
    exchange([&](const Rank& rank, size_t r) {
      PhasedCombineParams on_gpu = p[r];  // the host cannot read these tables
      on_gpu.rails.rails = nullptr;
      on_gpu.rails.host_of = on_gpu.rails.rail_of_host = nullptr;
      on_gpu.own = nullptr;
      on_gpu.source_tokens = nullptr;
      return combine_transfers(rank.plan, on_gpu, 0);
    });
    each([&](Rank&, size_t r, CpuWarp& w) { return !is_announcer(w) || announce_entered<Cpu>(w, p[r]); });
    each([&](Rank& rank, size_t r, CpuWarp& w) {
      const bool ok = low_latency_sum<Cpu>(w, p[r]);
      rank.moved[static_cast<size_t>(w.index())].network_bytes += returned_bytes<Cpu>(w, p[r]);
      return ok;
    });
  }

  int world() const { return world_; }
  const std::vector<std::byte>& out(int r) const { return at(r).out; }
  std::string output(int r) {
    return {reinterpret_cast<const char*>(at(r).output.data()), static_cast<size_t>(at(r).output_bytes)};
  }
  uint64_t network_bytes(int r) const { return sum_moved(at(r).moved).network_bytes; }
  /// Number of rows for rank r's tokens that cross hosts in a dispatch and, from rows_back(), in a combine with this order.
  uint64_t crossings(int r) const {
    return count(r, [&](int32_t e) { return map_.host_of(layout_.owner(e)); });
  }
  uint64_t rows_back(int r, CombineOrder order) const {
    return count(r, [&](int32_t e) { return order == CombineOrder::per_rank ? layout_.owner(e) : e; });
  }

 private:
  static std::vector<std::string> places(const std::string& hosts) {
    std::vector<std::string> texts;
    for (const char c : hosts) texts.emplace_back(1, c);
    return texts;
  }
  Rank& at(int r) { return ranks_[static_cast<size_t>(r)]; }
  const Rank& at(int r) const { return ranks_[static_cast<size_t>(r)]; }
  uint64_t draw(int r, int what, int64_t i) const {
    return oracle::mix(shape_.seed, static_cast<uint64_t>(r * 8 + what), static_cast<uint64_t>(i));
  }

  /// Some expert choices repeat, and some are not experts. Row values have few significant bits in every type.
  void give_inputs(int r) {
    const auto tokens = shape_.tokens[static_cast<size_t>(r)];
    for (int64_t f = 0; f < int64_t{tokens} * layout_.topk; ++f) {
      const uint64_t bits = draw(r, 0, f);
      at(r).ids.push_back(bits % 7 == 0 ? -1 : static_cast<int64_t>(bits / 8 % static_cast<uint64_t>(layout_.map.experts)));
      at(r).weights.push_back(static_cast<float>(bits / 1024 % 8) * 0.25f);
    }
    at(r).x = rows(tokens, [&](int64_t i) { return draw(r, 1, i); });
    at(r).out.resize(static_cast<size_t>(tokens) * static_cast<size_t>(layout_.return_bytes));
  }
  template <class F>
  std::vector<std::byte> rows(int64_t count, const F& bits) const {
    const size_t element = dtype_bytes(shape_.config.dtype, 1);
    std::vector<std::byte> made(static_cast<size_t>(count) * static_cast<size_t>(layout_.hidden) * element);
    for (size_t i = 0; i < made.size() / element; ++i) {
      const float value = static_cast<float>(bits(static_cast<int64_t>(i)) % 61) - 30.0f;
      uint32_t word = 0;
      std::memcpy(&word, &value, sizeof value);
      const auto half = static_cast<uint16_t>(word >> 16);  // exact: bf16
      std::memcpy(made.data() + i * element, element == 4 ? static_cast<const void*>(&word) : &half, element);
    }
    return made;
  }

  CallContext context(int r, Operation operation) {
    CallContext call;
    for (int s = 0; s < world_; ++s) call.heap.base[s] = map_.together(r, s) ? at(s).heap.data() : nullptr;
    call.heap.rank = r;
    call.heap.world = world_;
    call.epoch = epoch_;
    call.timeout_ns = 1'000'000'000;
    call.operation = operation;
    call.abort_word = reinterpret_cast<const uint64_t*>(at(r).heap.data());
    call.left_ranks = call.abort_word + 1;
    for (int s = 0; s < world_; ++s) headers_[s] = reinterpret_cast<const HeapHeader*>(at(s).heap.data());
    call.headers = headers_;
    call.fault = &at(r).fault;
    call.fault_claims = &at(r).fault_claims;
    call.waits = at(r).waits.data();
    call.moved = at(r).moved.data();
    return call;
  }

  LowLatencyDispatchParams dispatch_params(int r) {
    const LowLatencyTables& t = at(r).tables;
    LowLatencyDispatchParams p;
    p.call = context(r, Operation::dispatch);
    p.layout = layout_;
    p.x = at(r).x.data();
    p.tokens = shape_.tokens[static_cast<size_t>(r)];
    p.src_row_bytes = layout_.return_bytes;
    p.src_type = shape_.config.dtype;
    p.quantize = shape_.config.scales;
    p.scale_group = shape_.config.scale_group;
    p.scale_element_bytes = scales_.element_bytes;
    p.ids = IdReader{at(r).ids.data(), true, layout_.map.experts};
    p.weights = at(r).weights.data();
    p.part_columns = static_cast<int>(round_up(layout_.hidden, 128));
    p.teams = sending_teams(kWarps, 1);
    p.own_ids = t.own_ids;
    p.own_weights = t.own_weights;
    p.own = t.own;
    p.rows = t.rows;
    p.out_scales = t.scales;
    p.scale_place = scales_;
    p.rows_of_expert = t.rows_of_expert;
    p.source_range = t.source_range;
    p.row_source = t.row_source;
    p.routes = t.routes;
    p.source_tokens = t.source_tokens;
    return p;
  }

  PhasedCombineParams combine_params(int r, CombineOrder order, DType type) {
    const LowLatencyTables& t = at(r).tables;
    const int64_t count = layout_.map.count(r) * layout_.rows_per_expert();
    at(r).y = rows(count, [&](int64_t i) { return draw(0, 2, t.row_source[i / layout_.hidden] ^ i % layout_.hidden * 7919); });
    PhasedCombineParams p;
    p.call = context(r, Operation::combine);
    p.layout = layout_;
    p.order = order;
    p.type = type;
    p.row_bytes = static_cast<int64_t>(dtype_bytes(type, layout_.hidden));
    p.y = at(r).y.data();
    p.rows_of_expert = t.rows_of_expert;
    p.row_source = t.row_source;
    p.routes = t.routes;
    p.source_tokens = t.source_tokens;
    p.own = t.own;
    p.combined = t.own->call;
    p.own_ids = t.own_ids;
    p.weights = t.own_weights;
    p.out = at(r).out.data();
    p.remote = RemoteReturns(layout_, at(r).plan.max_sources);
    p.remote.proxy = at(r).plan.proxy.data();
    p.remote.number = at(r).plan.number.data();
    for (int s = 0; s < world_; ++s) p.remote.heap.base[s] = map_.together(r, s) ? at(s).remote_heap.data() : nullptr;
    p.rails = at(r).remote;
    p.crossed.ids = at(r).crossed_ids.data();
    return p;
  }

  /// Runs one phase for all warps of all ranks.
  template <class F>
  void each(const F& phase) {
    for (size_t r = 0; r < ranks_.size(); ++r)
      for (CpuWarp& w : ranks_[r].warps) EXPECT_TRUE(phase(ranks_[r], r, w)) << "rank " << r << " warp " << w.index();
  }

  /// Transfers the data of all ranks' rounds. Both ends of a leg must list it with the same size.
  template <class TransfersOf>
  void exchange(const TransfersOf& transfers_of) {
    std::vector<std::vector<PeerTransfer>> all;
    for (size_t r = 0; r < ranks_.size(); ++r) all.push_back(transfers_of(ranks_[r], r));
    for (size_t r = 0; r < all.size(); ++r) {
      for (const PeerTransfer& transfer : all[r]) {
        for (const PeerTransfer& other : all[static_cast<size_t>(transfer.peer)]) {
          if (other.peer != static_cast<int>(r)) continue;
          ASSERT_EQ(transfer.send.size(), other.receive.size()) << r << " to " << transfer.peer;
          if (!transfer.send.empty()) std::memcpy(other.receive.data(), transfer.send.data(), transfer.send.size());
        }
      }
    }
  }

  template <class Key>
  uint64_t count(int r, const Key& key) const {
    uint64_t n = 0;
    for (size_t t = 0; t < at(r).ids.size(); t += static_cast<size_t>(layout_.topk)) {
      std::vector<int> met;
      for (size_t f = t; f < t + static_cast<size_t>(layout_.topk); ++f) {
        if (at(r).ids[f] < 0) continue;
        const auto expert = static_cast<int32_t>(at(r).ids[f]);
        if (map_.together(r, layout_.owner(expert))) continue;
        const int k = key(expert);
        if (std::find(met.begin(), met.end(), k) == met.end()) met.push_back(k);
      }
      n += met.size();
    }
    return n;
  }

  const Shape shape_;
  const HostMap map_;
  const int world_;
  LowLatencyLayout layout_;
  ScalePlace scales_;
  std::deque<Rank> ranks_;
  const HeapHeader* headers_[kMaxRanks] = {};
  uint64_t epoch_ = 0;
};

/// Expects calls on `shape`'s hosts and on a single host to produce the same results.
void expect_alike(const Shape& shape) {
  Shape one = shape;
  one.hosts.assign(shape.hosts.size(), 'a');
  Cluster here(one), there(shape);
  const DType type = shape.config.dtype;
  const auto expect_outputs = [&] {
    for (int r = 0; r < here.world(); ++r) EXPECT_EQ(here.output(r) == there.output(r), true) << "output of rank " << r;
  };
  const LowLatencyLayout l = low_latency_layout(shape.config, here.world(), 0);
  for (int round = 0; round < 3; ++round) {
    for (Cluster* cluster : {&here, &there}) cluster->dispatch();
    expect_outputs();
    for (int r = 0; r < here.world(); ++r)
      EXPECT_EQ(there.network_bytes(r), there.crossings(r) * static_cast<uint64_t>(l.payload_bytes + l.scale_bytes));
    for (const CombineOrder order : {CombineOrder::per_rank, CombineOrder::per_route, CombineOrder::per_rank}) {
      if (order == CombineOrder::per_route && round == 1) continue;  // so calls of each kind have both parities
      for (Cluster* cluster : {&here, &there}) cluster->combine(order, type);
      for (int r = 0; r < here.world(); ++r) {
        EXPECT_EQ(here.out(r) == there.out(r), true) << "sums of rank " << r << ", round " << round;
        EXPECT_EQ(there.network_bytes(r), there.rows_back(r, order) * static_cast<uint64_t>(l.return_bytes));
      }
    }
  }
}

class LowLatencyPhases : public testing::TestWithParam<const char*> {
 protected:
  Shape shape(int64_t hidden, int topk, int experts) const {
    Shape s;
    s.hosts = GetParam();
    s.config.hidden = hidden;
    s.config.num_experts = experts;
    s.config.topk = topk;
    s.config.max_tokens = 6;
    for (size_t r = 0; r < s.hosts.size(); ++r) s.tokens.push_back(static_cast<int>((r * 5 + 3) % 7));
    return s;
  }
};

TEST_P(LowLatencyPhases, OfRowsAsTheyAre) {
  for (const Sending sending : {Sending::per_rank, Sending::per_route}) {
    for (const int64_t hidden : {int64_t{37}, int64_t{144}, int64_t{640}}) {
      Shape s = shape(hidden, 4, 11);
      s.config.scales = ScaleKind::none;
      s.config.dtype = hidden == 144 ? DType::f32 : DType::bf16;
      s.config.sending = sending;
      s.config.pieces = hidden == 640 ? 3 : 0;
      s.seed = static_cast<uint64_t>(hidden);
      expect_alike(s);
    }
  }
}

TEST_P(LowLatencyPhases, OfQuantisedRows) {
  for (const Sending sending : {Sending::per_rank, Sending::per_route}) {
    for (const ScaleKind kind : {ScaleKind::f32, ScaleKind::ue8m0}) {
      Shape s = shape(400, 6, 5);
      s.config.scales = kind;
      s.config.scale_group = 64;
      s.config.scale_order = kind == ScaleKind::f32 ? ScaleOrder::row_major : ScaleOrder::column_major;
      s.config.sending = sending;
      expect_alike(s);
    }
  }
}

TEST_P(LowLatencyPhases, OfManyChoicesAndOfOne) {
  for (const int topk : {1, 9}) {
    Shape s = shape(128, topk, 40);
    s.config.scales = ScaleKind::none;
    expect_alike(s);
  }
}

INSTANTIATE_TEST_SUITE_P(Hosts, LowLatencyPhases,
                         testing::Values("ab", "aab", "abb", "aabb", "abcd", "aaabc", "abcab", "aabbccdd"),
                         [](const auto& d) { return std::string(d.param); });

}  // namespace
}  // namespace switchyard::detail
