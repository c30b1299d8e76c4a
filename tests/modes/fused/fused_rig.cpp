// SPDX-License-Identifier: Apache-2.0
#include "modes/fused/fused_rig.hpp"

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <thread>

#include "arch/cpu/cpu_arch.hpp"
#include "arch/cpu/worker_pool.hpp"
#include "base/carver.hpp"
#include "base/index.hpp"
#include "base/mix_hash.hpp"
#include "harness/failures.hpp"
#include "launch/on_threads.hpp"
#include "protocol/fused/layer.hpp"

namespace harness {
namespace {

using namespace switchyard::detail;
using switchyard::DType;

constexpr int kHidden = 24, kInner = 40;
constexpr int64_t kRowBytes = kHidden * 4;

/// The closed form of a call: small numbers that depend on every index by which rows could be confused.
uint64_t hash_of(int call, int rank, int64_t a, int64_t b) {
  uint64_t h = mix_hash(static_cast<uint64_t>(call), static_cast<uint64_t>(rank));
  h = mix_hash(mix_hash(h, static_cast<uint64_t>(a)), static_cast<uint64_t>(b));
  return h ^ h >> 31;
}
float token_value(int call, int rank, int64_t t, int column) { return static_cast<float>(hash_of(call, rank, t, column) % 8); }
float weight_value(int call, int rank, int64_t f) { return static_cast<float>(1 + hash_of(call, rank, f, -1) % 3); }
float initial_value(int rank, int64_t t, int column) { return static_cast<float>(hash_of(77, rank, t, column) % 100); }

/// The output of expert e: h[j] = x[j mod H] * (e + 1), and y[c] = h[c] + the sum of h + 1. Each down tile therefore needs all
/// up tiles of its rows.
float expected_output(int call, int rank, int64_t t, int column, int expert) {
  float sum = 0;
  for (int j = 0; j < kInner; ++j) sum += token_value(call, rank, t, j % kHidden);
  return (token_value(call, rank, t, column) + sum) * static_cast<float>(expert + 1) + 1;
}

/// The plan of one call, for all ranks. An expert's rows are ordered by source, token and route.
struct Plan {
  std::vector<std::vector<int32_t>> ids, route_row;  ///< by rank
  std::vector<std::vector<int64_t>> first_row;       ///< by rank: [its experts + 1]
  std::vector<std::vector<int>> first_tiles;
  std::vector<std::vector<int64_t>> tile_row;  ///< by rank: [row tiles + 1]
  std::vector<uint64_t> pulled;                ///< by rank: number of rows that it pulls
};

Plan make_plan(const FusedScenario& s, int call) {
  const ExpertRanges map{s.experts, s.world};
  Plan p;
  std::vector<int64_t> kept(idx(s.experts));
  for (int r = 0; r < s.world; ++r) {
    p.ids.emplace_back();
    p.route_row.emplace_back();
    for (int64_t f = 0; f < s.tokens[idx(r)] * s.topk; ++f) {
      const auto any = static_cast<int32_t>(hash_of(call, r, f, 5) % static_cast<uint64_t>(s.experts + 1)) - 1;
      const int32_t id = s.one_expert ? s.experts - 1 : any;
      const bool drop = id >= 0 && kept[idx(id)] >= s.capacity;
      p.ids.back().push_back(drop ? -2 - id : id);
      p.route_row.back().push_back(id < 0 || drop ? -1 : static_cast<int32_t>(kept[idx(id)]++));
    }
  }
  for (int r = 0; r < s.world; ++r) {
    p.first_row.push_back({0});
    p.first_tiles.push_back({0});
    p.tile_row.push_back({0});
    for (int e = map.first(r); e < map.first(r) + map.count(r); ++e) {
      p.first_row.back().push_back(p.first_row.back().back() + kept[idx(e)]);
      for (int64_t left = kept[idx(e)]; left > 0; left -= s.tile_rows)
        p.tile_row.back().push_back(p.tile_row.back().back() + std::min<int64_t>(left, s.tile_rows));
      p.first_tiles.back().push_back(static_cast<int>(p.tile_row.back().size()) - 1);
    }
  }
  p.pulled.resize(idx(s.world));
  for (int r = 0; r < s.world; ++r) {
    for (int64_t t = 0; t < s.tokens[idx(r)]; ++t) {
      uint64_t ranks = 0;
      for (int64_t f = t * s.topk; f < (t + 1) * s.topk; ++f) {
        const int32_t id = p.ids[idx(r)][idx(f)];
        if (id < 0) continue;
        const int owner = map.owner(id);
        p.route_row[idx(r)][idx(f)] += static_cast<int32_t>(p.first_row[idx(owner)][idx(id - map.first(owner))]);
        ranks |= uint64_t{1} << owner;
      }
      for (int owner = 0; owner < s.world; ++owner) p.pulled[idx(owner)] += ranks >> owner & 1;
    }
  }
  return p;
}

struct FreeMemory {
  void operator()(std::byte* p) const { ::operator delete (p, std::align_val_t{256}); }
};
using Memory = std::unique_ptr<std::byte, FreeMemory>;
Memory make_memory(int64_t bytes) {
  auto* const p = static_cast<std::byte*>(::operator new (idx(bytes), std::align_val_t{256}));
  std::memset(p, 0, idx(bytes));
  return Memory(p);
}
void set_flags(void* flags, int64_t bytes, uint64_t word) { std::fill_n(static_cast<uint64_t*>(flags), bytes / 8, word); }

/// State shared by the ranks: the segments, and a barrier in place of the plan.
struct World {
  explicit World(const FusedScenario& scenario)
      : s(scenario), max(*std::max_element(s.tokens.begin(), s.tokens.end())), meet(s.world) {
    rows = std::accumulate(s.tokens.begin(), s.tokens.end(), int64_t{0}) * s.topk;
    layout = FusedLayout{kHeapHeaderBytes, s.world, s.experts, s.topk, max, rows, kRowBytes, kRowBytes, s.per_rank};
    for (int r = 0; r < s.world; ++r) {
      segments.push_back(make_memory(static_cast<int64_t>(layout.base) + layout.bytes()));
      heap.base[r] = segments.back().get();
      set_flags(heap.base[r] + layout.base, layout.flags_bytes(), flag_word(epoch(-1)));
    }
    heap.world = s.world;
    for (int call = 0; call < s.calls; ++call) plans.push_back(make_plan(s, call));
  }
  uint64_t epoch(int call) const { return (kEpochMask - 1 + static_cast<uint64_t>(call)) & kEpochMask; }

  const FusedScenario& s;
  int64_t max, rows = 0;
  FusedLayout layout;
  HeapView heap;
  std::vector<Memory> segments;
  std::vector<Plan> plans;
  std::barrier<> meet;
};

/// Columns of a column tile; all tiles are nearly equal in size.
struct Columns {
  int begin, end;
};
Columns columns_of(int columns, int tiles, int tile) { return {columns * tile / tiles, columns * (tile + 1) / tiles}; }

template <class A>
class Rank {
 public:
  Rank(World& world, int rank)
      : world_(world), s_(world.s), rank_(rank), tokens_(s_.tokens[idx(rank)]), pool_(s_.blocks, s_.warps), f_(name()) {
    pool_.reserve_scratch(idx(kInner * 4));
    waits_.resize(idx(pool_.total() * s_.world));
    moved_.resize(idx(pool_.total()));
    carve(nullptr);
    memory_ = make_memory(bytes_);
    carve(memory_.get());
    set_flags(p_.memory.arrived, p_.memory.flags - (reinterpret_cast<std::byte*>(p_.memory.arrived) - memory_.get()),
              flag_word(world.epoch(-1)));
  }

  void run() {
    if (rank_ == s_.absent) return world_.meet.arrive_and_drop();
    for (int call = 0; call < s_.calls && !f_.any(); ++call) {
      set_up(call);
      world_.meet.arrive_and_wait();
      std::atomic<bool> good = true;
      pool_.run([&](CpuWarp& w) {
        const auto multiply = [&](CpuWarp& warp, const FusedTile& tile) {
          std::this_thread::yield();  // distributes tiles and rows over several warps
          this->multiply(warp, tile);
        };
        if (!fused_layer<A>(w, p_, multiply)) good = false;
      });
      f_.set_context("call " + std::to_string(call));
      f_.check(good, std::string("a wait for ") + site_name(fault_.site) + " of rank " + std::to_string(fault_.awaited_rank) +
                         " ended in a fault");
      if (good) check(call);
    }
    world_.meet.arrive_and_drop();
  }
  std::vector<std::string> failures() const { return f_.take(); }

 private:
  std::string name() const { return "rank " + std::to_string(rank_); }

  void carve(std::byte* base) {
    const ExpertRanges map{s_.experts, s_.world};
    const int64_t tiles = world_.rows / s_.tile_rows + map.count(rank_);
    FusedMemory& m = p_.memory;
    Carver carver(base);
    carver.take(m.counters, 1);
    carver.take(m.arrived, world_.rows);
    carver.take(m.h_done, tiles * s_.up_columns);
    carver.take(m.y_done, tiles * s_.down_columns);
    m.flags = carver.bytes();
    carver.take(m.x_rows, world_.rows * kRowBytes);
    carver.take(m.h, world_.rows * kInner * 4);
    carver.take(m.y, world_.rows * kRowBytes);
    bytes_ = carver.bytes();
  }

  void set_up(int call) {
    const Plan& plan = world_.plans[idx(call)];
    const ExpertRanges map{s_.experts, s_.world};
    p_.call.heap = world_.heap;
    p_.call.heap.rank = rank_;
    p_.call.epoch = world_.epoch(call);
    p_.call.timeout_ns = static_cast<uint64_t>(s_.deadline_ms) * 1'000'000;
    auto* const header = reinterpret_cast<HeapHeader*>(world_.heap.base[rank_]);
    p_.call.abort_word = &header->abort_word;
    p_.call.left_ranks = &header->left_ranks;
    p_.call.fault = &fault_;
    p_.call.fault_claims = &fault_claims_;
    p_.call.waits = waits_.data();
    p_.call.moved = moved_.data();
    p_.layout = world_.layout;
    p_.routes = {plan.ids[idx(rank_)].data(), plan.route_row[idx(rank_)].data(), map, s_.topk};
    p_.order = {plan.first_tiles[idx(rank_)].data(), map.count(rank_), s_.lag, s_.up_columns, s_.down_columns};
    p_.tile_row = plan.tile_row[idx(rank_)].data();
    p_.tokens = tokens_;
    p_.type = DType::f32;
    p_.hidden = kHidden;
    x_.resize(idx(tokens_ * kHidden));
    out_.resize(x_.size());
    weights_.resize(idx(tokens_ * s_.topk));
    for (int64_t t = 0; t < tokens_; ++t) {
      for (int c = 0; c < kHidden; ++c) {
        x_[idx(t * kHidden + c)] = token_value(call, rank_, t, c);
        out_[idx(t * kHidden + c)] = initial_value(rank_, t, c);
      }
    }
    for (int64_t f = 0; f < tokens_ * s_.topk; ++f) weights_[idx(f)] = weight_value(call, rank_, f);
    p_.x = s_.in_heap ? nullptr : reinterpret_cast<const std::byte*>(x_.data());
    if (s_.in_heap && tokens_ > 0) std::memcpy(p_.call.heap.local(p_.layout.x(0)), x_.data(), x_.size() * sizeof(float));
    (s_.per_rank ? p_.routes.weights : p_.weights) = s_.weighted ? weights_.data() : nullptr;
    p_.out = reinterpret_cast<std::byte*>(out_.data());
    p_.add = s_.add;
  }

  /// Leaves outputs pending, as the protocol allows.
  void multiply(CpuWarp& w, const FusedTile& tile) const {
    const int expert = ExpertRanges{s_.experts, s_.world}.first(rank_) + tile.expert;
    auto* const made = reinterpret_cast<float*>(w.scratch());
    for (int64_t r = tile.row; r < tile.row + tile.rows; ++r) {
      const auto* const x = reinterpret_cast<const float*>(p_.memory.x_rows) + r * kHidden;
      auto* const h = reinterpret_cast<float*>(p_.memory.h) + r * kInner;
      auto* const y = reinterpret_cast<float*>(p_.memory.y) + r * kHidden;
      A::drain_sources(w);  // waits for the previous row
      const Columns columns = tile.down ? columns_of(kHidden, s_.down_columns, tile.column_tile)
                                        : columns_of(kInner, s_.up_columns, tile.column_tile);
      const float sum = tile.down ? std::accumulate(h, h + kInner, 0.0f) : 0;
      for (int c = columns.begin; c < columns.end; ++c)
        made[c] = tile.down ? h[c] + sum + 1 : x[c % kHidden] * static_cast<float>(expert + 1);
      A::copy(w, (tile.down ? y : h) + columns.begin, made + columns.begin, idx(columns.end - columns.begin) * sizeof(float));
    }
  }

  void check(int call) {
    const Plan& plan = world_.plans[idx(call)];
    std::vector<float> expected;
    for (int64_t t = 0; t < tokens_; ++t) {
      for (int c = 0; c < kHidden; ++c) {
        float sum = s_.add ? initial_value(rank_, t, c) : 0;
        for (int64_t f = t * s_.topk; f < (t + 1) * s_.topk; ++f) {
          const int32_t id = plan.ids[idx(rank_)][idx(f)];
          if (id < 0) continue;
          sum += (s_.weighted ? weight_value(call, rank_, f) : 1) * expected_output(call, rank_, t, c, id);
        }
        expected.push_back(sum);
      }
    }
    f_.equal_range(expected, out_, "out");
    uint64_t pulled = 0;
    for (const MoveCounter& moved : moved_) pulled += moved.payload_rows;
    f_.equal(plan.pulled[idx(rank_)], pulled, "rows pulled");
    const FusedCounters& counters = *p_.memory.counters;
    f_.equal(uint64_t{0},
             counters.announced | counters.pulls | counters.tickets | counters.returns | counters.sums | counters.exits,
             "counters after the call");
  }

  World& world_;
  const FusedScenario& s_;
  int rank_;
  int64_t tokens_, bytes_ = 0;
  WorkerPool pool_;
  Failures f_;
  Memory memory_;
  FusedLayerParams p_;
  FaultRecord fault_;
  uint64_t fault_claims_ = 0;
  std::vector<WaitCounter> waits_;
  std::vector<MoveCounter> moved_;
  std::vector<float> x_, out_, weights_;
};

template <class A>
std::vector<std::string> run_on(const FusedScenario& s) {
  World world(s);
  std::vector<std::unique_ptr<Rank<A>>> ranks;
  for (int r = 0; r < s.world; ++r) ranks.push_back(std::make_unique<Rank<A>>(world, r));
  switchyard::launch::on_threads(ranks.size(), [&](size_t r) { ranks[r]->run(); });
  std::vector<std::string> all;
  for (const auto& rank : ranks)
    for (const std::string& text : rank->failures()) all.push_back(text);
  return all;
}

}  // namespace

std::string to_string(const FusedScenario& s) {
  std::string text = std::to_string(s.world) + " ranks of " + std::to_string(s.blocks) + "x" + std::to_string(s.warps) +
                     " warps, " + std::to_string(s.experts) + " experts, K " + std::to_string(s.topk) + ", T";
  for (const int64_t t : s.tokens) text += " " + std::to_string(t);
  text += ", lag " + std::to_string(s.lag) + ", columns " + std::to_string(s.up_columns) + " " +
          std::to_string(s.down_columns) + ", capacity " + std::to_string(s.capacity);
  return text + (s.one_expert ? ", one expert" : "") + (s.add ? ", add" : "") + (s.per_rank ? ", per_rank" : "") +
         (s.deferred ? ", deferred" : "");
}

std::vector<std::string> run_fused_layer(const FusedScenario& s) {
  return s.deferred ? run_on<CpuDeferred>(s) : run_on<Cpu>(s);
}

}  // namespace harness
