// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "gemm/aligned_buffer.hpp"
#include "gemm/checks.hpp"
#include "gemm/cpu/mlp_tiles.hpp"
#include "gemm/cpu/row_math.hpp"
#include "gemm/experts.hpp"

namespace switchyard::detail {
namespace {

constexpr int64_t kMaxPadding = 15;  // maximum rows that padded_rows() adds

/// Maximum number of routes in one block of forward_rank_major. A row has at most kMaxTopk routes, so any row fits.
int64_t route_capacity(const ExpertShape& shape, const ExpertOptions& options) {
  return std::max(kTileRows,
                  static_cast<int64_t>(options.route_scratch_bytes / (static_cast<size_t>(shape.hidden) * sizeof(float))));
}
static_assert(kTileRows >= kMaxTopk);

/// One route in the current block; routes are in (row, k) order.
struct Route {
  int64_t row;   // in the caller's x
  int64_t slot;  // position of its output: experts ascending, then (row, k) order
  int expert;
  float weight;
};

/// Scratch memory of one object; its sizes never change.
struct Scratch {
  AlignedBuffer rows;    // bf16 [kTileRows, H]: gathered or padded rows of one tile
  AlignedBuffer act;     // bf16 [kTileRows, I]
  AlignedBuffer out;     // f32 [routes + padding, H]: outputs of a block of routes; of one tile in forward
  AlignedBuffer sum;     // f32 [H]
  AlignedBuffer routes;  // Route [routes]
  AlignedBuffer slots;   // int64_t [routes]: row of each slot

  static Scratch make(const ExpertShape& shape, const ExpertOptions& options, bool allocate);
  size_t bytes() const { return total; }
  size_t total = 0;
};

Scratch Scratch::make(const ExpertShape& shape, const ExpertOptions& options, bool allocate) {
  const auto h = static_cast<size_t>(shape.hidden), i = static_cast<size_t>(shape.intermediate);
  const auto tile = static_cast<size_t>(kTileRows), routes = static_cast<size_t>(route_capacity(shape, options));
  Scratch scratch;
  const auto buffer = [&](AlignedBuffer& member, size_t bytes) {
    scratch.total += bytes;
    if (allocate) member = AlignedBuffer(bytes, "expert scratch");
  };
  buffer(scratch.rows, tile * h * sizeof(uint16_t));
  buffer(scratch.act, tile * i * sizeof(uint16_t));
  buffer(scratch.out, (routes + kMaxPadding) * h * sizeof(float));
  buffer(scratch.sum, h * sizeof(float));
  buffer(scratch.routes, routes * sizeof(Route));
  buffer(scratch.slots, routes * sizeof(int64_t));
  return scratch;
}

int64_t expert_id(const ExpertIds& ids, int64_t index) {
  return ids.is_int64 ? static_cast<const int64_t*>(ids.data)[index] : static_cast<const int32_t*>(ids.data)[index];
}

/// Experts computed on the calling thread.
class CpuExperts final : public ExpertMlp::Impl {
 public:
  CpuExperts(const ExpertShape& shape_in, const ExpertOptions& options_in)
      : Impl(shape_in, options_in),
        tiles_(shape, options.storage),
        capacity_(route_capacity(shape, options)),
        scratch_(Scratch::make(shape, options, true)),
        expert_rows_(static_cast<size_t>(shape.num_local_experts)),
        next_slot_(static_cast<size_t>(shape.num_local_experts)) {}

  void forward(const ConstRows& x, const ExpertRows& rows, const Rows& y, const ExpertCall& call) override;
  void forward_on_host(const uint16_t* x, std::span<const int64_t> first_row, std::span<const int64_t> num_rows,
                       uint16_t* y) override;
  void forward_rank_major(const uint16_t* x, const ExpertIds& ids, const float* weights, uint16_t* y) override;
  ExpertImpl with_weights(const MoeWeights& weights) const override {
    return make_cpu_experts(shape, weights.w13, weights.w2, options);
  }
  ExpertMemory memory() const override;
  std::string implementation() const override { return tiles_.implementation(); }

  MlpTiles& tiles() { return tiles_; }

 private:
  void mlp_tile(int expert, const uint16_t* x, int64_t m, float* out);
  int64_t plan_block(const ExpertIds& ids, const float* weights, int64_t begin, int64_t* num_routes);
  void run_block(const uint16_t* x);
  void reduce_block(int64_t begin, int64_t end, int64_t num_routes, uint16_t* y);

  MlpTiles tiles_;
  int64_t capacity_;
  Scratch scratch_;
  std::vector<int64_t> expert_rows_, next_slot_;  // [L] for the current block; rows and first rows for the current call
};

/// Applies one expert to rows x [m, H]; out [m, H] is not rounded. m is a value returned by padded_rows().
void CpuExperts::mlp_tile(int expert, const uint16_t* x, int64_t m, float* out) {
  uint16_t* const act = scratch_.act.as<uint16_t>();
  tiles_.up(expert, x, m, m, act);
  tiles_.down(expert, act, m, out);
}

/// Adds rows, starting at `begin`, as long as their routes fit. Fills routes, slots and expert_rows_; returns one past the last
/// row.
int64_t CpuExperts::plan_block(const ExpertIds& ids, const float* weights, int64_t begin, int64_t* num_routes) {
  Route* routes = scratch_.routes.as<Route>();
  std::fill(expert_rows_.begin(), expert_rows_.end(), 0);
  int64_t count = 0, row = begin;
  for (; row < ids.num_tokens; ++row) {
    int64_t end = count;
    for (int k = 0; k < ids.topk && end <= capacity_; ++k) {
      const int64_t index = row * ids.topk + k, id = expert_id(ids, index);
      if (id < 0 || id >= shape.num_local_experts) continue;
      if (end < capacity_) routes[end] = {row, 0, static_cast<int>(id), weights != nullptr ? weights[index] : 1.0f};
      ++end;
    }
    if (end > capacity_) break;
    for (; count < end; ++count) ++expert_rows_[static_cast<size_t>(routes[count].expert)];
  }
  int64_t first = 0;
  for (size_t expert = 0; expert < expert_rows_.size(); ++expert) {
    next_slot_[expert] = first;
    first += expert_rows_[expert];
  }
  int64_t* slots = scratch_.slots.as<int64_t>();
  for (int64_t i = 0; i < count; ++i) {
    routes[i].slot = next_slot_[static_cast<size_t>(routes[i].expert)]++;
    slots[routes[i].slot] = routes[i].row;
  }
  *num_routes = count;
  return row;
}

/// Computes the outputs of all routes in the block, slot by slot.
void CpuExperts::run_block(const uint16_t* x) {
  const int64_t h = shape.hidden;
  uint16_t* gathered = scratch_.rows.as<uint16_t>();
  const int64_t* slots = scratch_.slots.as<int64_t>();
  int64_t slot = 0;  // tiles are in slot order
  for_each_tile(expert_rows_, [&](int expert, int64_t, int64_t rows) {
    const int64_t m = padded_rows(rows);
    for (int64_t i = 0; i < rows; ++i)
      std::memcpy(gathered + i * h, x + slots[slot + i] * h, static_cast<size_t>(h) * sizeof(uint16_t));
    std::fill_n(gathered + rows * h, (m - rows) * h, uint16_t{0});
    // The padding rows of `out` belong to later slots, which are written afterwards, or lie past the last slot.
    mlp_tile(expert, gathered, m, scratch_.out.as<float>() + slot * h);
    slot += rows;
  });
}

/// Sums the routes for rows [begin, end), which are in (row, k) order.
void CpuExperts::reduce_block(int64_t begin, int64_t end, int64_t num_routes, uint16_t* y) {
  const int64_t h = shape.hidden;
  const Route* routes = scratch_.routes.as<Route>();
  float* sum = scratch_.sum.as<float>();
  int64_t i = 0;
  for (int64_t row = begin; row < end; ++row) {
    std::fill_n(sum, h, 0.0f);
    for (; i < num_routes && routes[i].row == row; ++i) {
      add_scaled(scratch_.out.as<float>() + routes[i].slot * h, routes[i].weight, h, sum);
    }
    round_to_bf16(sum, h, y + row * h);
  }
}

void CpuExperts::forward_on_host(const uint16_t* x, std::span<const int64_t> first_row, std::span<const int64_t> num_rows,
                                 uint16_t* y) {
  const int64_t h = shape.hidden;
  float* out = scratch_.out.as<float>();
  for_each_tile(num_rows, [&](int expert, int64_t first, int64_t rows) {
    const int64_t at = (first_row[static_cast<size_t>(expert)] + first) * h;
    mlp_tile(expert, padded_tile(x + at, rows, h, scratch_.rows.as<uint16_t>()), padded_rows(rows), out);
    round_to_bf16(out, rows * h, y + at);
  });
}

void CpuExperts::forward(const ConstRows& x, const ExpertRows& rows, const Rows& y, const ExpertCall&) {
  const int64_t end = std::min(x.rows, y.rows);
  int64_t total = 0;
  for (size_t e = 0; e < expert_rows_.size(); ++e) {
    const int64_t given = rows.num_rows != nullptr ? rows.num_rows[e] : rows.num_rows_32[e];
    const int64_t first = rows.first_row != nullptr ? rows.first_row[e] : static_cast<int64_t>(e) * rows.rows_per_expert;
    require(first >= 0, "ExpertMlp::forward",
            "rows.first_row of local expert " + std::to_string(e) + " is " + std::to_string(first) + "; allowed: >= 0");
    const int64_t max = rows.first_row != nullptr ? end - first : std::min(end - first, rows.rows_per_expert);
    next_slot_[e] = first;
    expert_rows_[e] = std::max<int64_t>(0, std::min(given, max));
    total += expert_rows_[e];
  }
  in_step(ExpertStep::mlp, total, nullptr, [&] {
    forward_on_host(static_cast<const uint16_t*>(x.data), next_slot_, expert_rows_, static_cast<uint16_t*>(y.data));
  });
}

void CpuExperts::forward_rank_major(const uint16_t* x, const ExpertIds& ids, const float* weights, uint16_t* y) {
  for (int64_t row = 0; row < ids.num_tokens;) {
    int64_t num_routes = 0;
    const int64_t end = plan_block(ids, weights, row, &num_routes);
    run_block(x);
    reduce_block(row, end, num_routes, y);
    row = end;
  }
}

ExpertMemory CpuExperts::memory() const {
  const ExpertMemory tiles = tiles_.memory();
  return {tiles.weight_bytes, tiles.scratch_bytes + scratch_.bytes()};
}

}  // namespace

ExpertMemory cpu_experts_memory(const ExpertShape& shape, const ExpertOptions& options) {
  const ExpertMemory tiles = MlpTiles::memory_required(shape, options.storage);
  return {tiles.weight_bytes, tiles.scratch_bytes + Scratch::make(shape, options, false).bytes()};
}

ExpertImpl make_cpu_experts(const ExpertShape& shape, const void* w13_in, const void* w2_in, const ExpertOptions& options) {
  const auto* const w13 = static_cast<const uint16_t*>(w13_in);
  const auto* const w2 = static_cast<const uint16_t*>(w2_in);
  auto made = std::make_unique<CpuExperts>(shape, options);
  if (options.storage == WeightStorage::view) {
    made->tiles().bind(w13, w2);
    return made;
  }
  const int64_t size = shape.intermediate * shape.hidden;
  for (int expert = 0; expert < shape.num_local_experts; ++expert)
    made->tiles().pack(expert, w13 + expert * 2 * size, w2 + expert * size);
  return made;
}

ExpertImpl make_cpu_experts(const ExpertShape& shape, const ExpertMlp::Source& source, const ExpertOptions& options) {
  auto made = std::make_unique<CpuExperts>(shape, options);
  const auto size = static_cast<size_t>(shape.hidden * shape.intermediate);
  const AlignedBuffer w13(2 * size * sizeof(uint16_t), "one expert's weights");
  const AlignedBuffer w2(size * sizeof(uint16_t), "one expert's weights");
  for (int expert = 0; expert < shape.num_local_experts; ++expert) {
    source(expert, {w13.as<uint16_t>(), 2 * size}, {w2.as<uint16_t>(), size});
    made->tiles().pack(expert, w13.as<uint16_t>(), w2.as<uint16_t>());
  }
  return made;
}

}  // namespace switchyard::detail
