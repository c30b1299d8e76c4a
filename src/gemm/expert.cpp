// SPDX-License-Identifier: Apache-2.0
#include "switchyard/expert.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "gemm/aligned_buffer.hpp"
#include "gemm/announce.hpp"
#include "gemm/cpu/row_math.hpp"
#include "gemm/grouped_gemm.hpp"

namespace switchyard {
namespace {

using detail::AlignedBuffer;
using detail::kTileRows;
using detail::padded_rows;

constexpr int64_t kMaxPadding = 15;  // most rows that padded_rows() adds

void require(bool ok, const char* where, const std::string& what) {
  if (!ok) throw Error(ErrorCode::invalid_argument, std::string(where) + ": " + what);
}

void check_shape(const ExpertShape& shape, const ExpertOptions& options) {
  constexpr int64_t kMaxWidth = int64_t{1} << 24;
  const char* where = "ExpertMlp";
  require(shape.hidden >= 1 && shape.hidden <= kMaxWidth, where,
          "shape.hidden is " + std::to_string(shape.hidden) + "; allowed: 1 to " + std::to_string(kMaxWidth));
  require(shape.intermediate >= 1 && shape.intermediate <= kMaxWidth, where,
          "shape.intermediate is " + std::to_string(shape.intermediate) + "; allowed: 1 to " + std::to_string(kMaxWidth));
  const int64_t max_experts = (int64_t{1} << 59) / (shape.hidden * shape.intermediate);
  require(shape.num_local_experts >= 0 && shape.num_local_experts <= max_experts, where,
          "shape.num_local_experts is " + std::to_string(shape.num_local_experts) + "; allowed: 0 to " +
              std::to_string(max_experts) + ", so that the size of the weights is a number of 64 bits");
  require(options.storage == WeightStorage::packed || options.storage == WeightStorage::view, where,
          "options.storage is " + std::to_string(static_cast<int>(options.storage)) + "; allowed: packed (0), view (1)");
  require(options.route_scratch_bytes <= std::numeric_limits<size_t>::max() / 4, where,
          "options.route_scratch_bytes is " + std::to_string(options.route_scratch_bytes) + ", which is no size of a memory");
}

/// Routes of one block of forward_rank_major. A row has at most kMaxTopk of them, so that every row fits.
int64_t route_capacity(const ExpertShape& shape, const ExpertOptions& options) {
  return std::max(kTileRows,
                  static_cast<int64_t>(options.route_scratch_bytes / (static_cast<size_t>(shape.hidden) * sizeof(float))));
}
static_assert(kTileRows >= kMaxTopk);

/// One route of the current block, in (row, k) order.
struct Route {
  int64_t row;   // in the caller's x
  int64_t slot;  // place of its output: experts ascending, then (row, k)
  int expert;
  float weight;
};

/// Scratch of one object; the sizes never change.
struct Scratch {
  AlignedBuffer rows;     // bf16 [kTileRows, H]: gathered or padded rows of one tile
  AlignedBuffer gate_up;  // f32 [kTileRows, 2 I]
  AlignedBuffer act;      // bf16 [kTileRows, I]
  AlignedBuffer out;      // f32 [routes + padding, H]: outputs of a block of routes; of one tile in forward
  AlignedBuffer sum;      // f32 [H]
  AlignedBuffer routes;   // Route [routes]
  AlignedBuffer slots;    // int64_t [routes]: row of each slot

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
  buffer(scratch.gate_up, tile * 2 * i * sizeof(float));
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

}  // namespace

struct ExpertMlp::Impl {
  Impl(const ExpertShape& shape_in, const ExpertOptions& options)
      : shape(shape_in),
        gate_up(shape.num_local_experts, 2 * shape.intermediate, shape.hidden, options.storage),
        down(shape.num_local_experts, shape.hidden, shape.intermediate, options.storage),
        capacity(route_capacity(shape, options)),
        scratch(Scratch::make(shape, options, true)),
        expert_rows(static_cast<size_t>(shape.num_local_experts)),
        next_slot(static_cast<size_t>(shape.num_local_experts)) {}

  void mlp_tile(int expert, const uint16_t* x, int64_t m, float* out);
  const uint16_t* padded_tile(const uint16_t* x, int64_t rows);
  int64_t plan_block(const ExpertIds& ids, const float* weights, int64_t begin, int64_t* num_routes);
  void run_block(const uint16_t* x);
  void reduce_block(int64_t begin, int64_t end, int64_t num_routes, uint16_t* y);

  ExpertShape shape;
  detail::GroupedGemm gate_up, down;
  int64_t capacity;
  Scratch scratch;
  std::vector<int64_t> expert_rows, next_slot;  // [L] of the current block
};

/// Rows x [m, H] through one expert, to out [m, H] before rounding. m is a value of padded_rows().
void ExpertMlp::Impl::mlp_tile(int expert, const uint16_t* x, int64_t m, float* out) {
  const int64_t width = shape.intermediate;
  float* products = scratch.gate_up.as<float>();
  uint16_t* act = scratch.act.as<uint16_t>();
  gate_up.tile(expert, x, m, products);
  for (int64_t row = 0; row < m; ++row) {
    const float* gate = products + row * 2 * width;
    detail::swiglu(gate, gate + width, width, act + row * width);
  }
  down.tile(expert, act, m, out);
}

/// `rows` rows as a tile operand: where they lie if no padding is needed, else a copy followed by zero rows.
const uint16_t* ExpertMlp::Impl::padded_tile(const uint16_t* x, int64_t rows) {
  const int64_t m = padded_rows(rows);
  if (m == rows) return x;
  uint16_t* copy = scratch.rows.as<uint16_t>();
  std::copy_n(x, rows * shape.hidden, copy);
  std::fill_n(copy + rows * shape.hidden, (m - rows) * shape.hidden, uint16_t{0});
  return copy;
}

/// Takes rows from `begin` while their routes fit; fills routes, slots and expert_rows; returns one past the last row.
int64_t ExpertMlp::Impl::plan_block(const ExpertIds& ids, const float* weights, int64_t begin, int64_t* num_routes) {
  Route* routes = scratch.routes.as<Route>();
  std::fill(expert_rows.begin(), expert_rows.end(), 0);
  int64_t count = 0, row = begin;
  for (; row < ids.tokens; ++row) {
    int64_t end = count;
    for (int k = 0; k < ids.topk && end <= capacity; ++k) {
      const int64_t index = row * ids.topk + k, id = expert_id(ids, index);
      if (id < 0 || id >= shape.num_local_experts) continue;
      if (end < capacity) routes[end] = {row, 0, static_cast<int>(id), weights != nullptr ? weights[index] : 1.0f};
      ++end;
    }
    if (end > capacity) break;
    for (; count < end; ++count) ++expert_rows[static_cast<size_t>(routes[count].expert)];
  }
  int64_t first = 0;
  for (size_t expert = 0; expert < expert_rows.size(); ++expert) {
    next_slot[expert] = first;
    first += expert_rows[expert];
  }
  int64_t* slots = scratch.slots.as<int64_t>();
  for (int64_t i = 0; i < count; ++i) {
    routes[i].slot = next_slot[static_cast<size_t>(routes[i].expert)]++;
    slots[routes[i].slot] = routes[i].row;
  }
  *num_routes = count;
  return row;
}

/// Outputs of all routes of the block, slot by slot.
void ExpertMlp::Impl::run_block(const uint16_t* x) {
  const int64_t h = shape.hidden;
  uint16_t* gathered = scratch.rows.as<uint16_t>();
  const int64_t* slots = scratch.slots.as<int64_t>();
  int64_t slot = 0;  // tiles come in slot order
  detail::for_each_tile(expert_rows, [&](int expert, int64_t, int64_t rows) {
    const int64_t m = padded_rows(rows);
    for (int64_t i = 0; i < rows; ++i)
      std::memcpy(gathered + i * h, x + slots[slot + i] * h, static_cast<size_t>(h) * sizeof(uint16_t));
    std::fill_n(gathered + rows * h, (m - rows) * h, uint16_t{0});
    // The padding rows of `out` belong to later slots, which are written later, or lie behind the last slot.
    mlp_tile(expert, gathered, m, scratch.out.as<float>() + slot * h);
    slot += rows;
  });
}

/// Sums the routes of rows [begin, end), which are in (row, k) order.
void ExpertMlp::Impl::reduce_block(int64_t begin, int64_t end, int64_t num_routes, uint16_t* y) {
  const int64_t h = shape.hidden;
  const Route* routes = scratch.routes.as<Route>();
  float* sum = scratch.sum.as<float>();
  int64_t i = 0;
  for (int64_t row = begin; row < end; ++row) {
    std::fill_n(sum, h, 0.0f);
    for (; i < num_routes && routes[i].row == row; ++i) {
      detail::add_scaled(scratch.out.as<float>() + routes[i].slot * h, routes[i].weight, h, sum);
    }
    detail::round_to_bf16(sum, h, y + row * h);
  }
}

ExpertMlp::ExpertMlp(const ExpertShape& shape, const uint16_t* w13, const uint16_t* w2, const ExpertOptions& options) {
  check_shape(shape, options);
  require((w13 != nullptr && w2 != nullptr) || shape.num_local_experts == 0, "ExpertMlp",
          std::string(w13 == nullptr ? "w13" : "w2") + " is null; allowed: the weights of " +
              std::to_string(shape.num_local_experts) + " experts");
  impl_ = std::make_unique<Impl>(shape, options);
  if (options.storage == WeightStorage::view) {
    impl_->gate_up.bind(w13);
    impl_->down.bind(w2);
    return;
  }
  for (int expert = 0; expert < shape.num_local_experts; ++expert) {
    impl_->gate_up.pack(expert, w13 + expert * 2 * shape.intermediate * shape.hidden);
    impl_->down.pack(expert, w2 + expert * shape.hidden * shape.intermediate);
  }
}

ExpertMlp::ExpertMlp(const ExpertShape& shape, const Source& source, const ExpertOptions& options) {
  check_shape(shape, options);
  require(static_cast<bool>(source), "ExpertMlp", "source is empty; allowed: a function that writes one expert's weights");
  require(options.storage == WeightStorage::packed, "ExpertMlp",
          "options.storage is view; allowed with a source: packed, as there is nothing to view");
  impl_ = std::make_unique<Impl>(shape, options);
  const auto size2 = static_cast<size_t>(shape.hidden * shape.intermediate);
  const AlignedBuffer w13(2 * size2 * sizeof(uint16_t), "one expert's weights");
  const AlignedBuffer w2(size2 * sizeof(uint16_t), "one expert's weights");
  for (int expert = 0; expert < shape.num_local_experts; ++expert) {
    source(expert, {w13.as<uint16_t>(), 2 * size2}, {w2.as<uint16_t>(), size2});
    impl_->gate_up.pack(expert, w13.as<uint16_t>());
    impl_->down.pack(expert, w2.as<uint16_t>());
  }
}

ExpertMlp::ExpertMlp(ExpertMlp&&) noexcept = default;
ExpertMlp& ExpertMlp::operator=(ExpertMlp&&) noexcept = default;
ExpertMlp::~ExpertMlp() = default;

ExpertMemory ExpertMlp::memory_required(const ExpertShape& shape, const ExpertOptions& options) {
  check_shape(shape, options);
  const auto gemm = [&](int64_t n, int64_t k) {
    return detail::GroupedGemm::memory_required(shape.num_local_experts, n, k, options.storage);
  };
  const ExpertMemory gate_up = gemm(2 * shape.intermediate, shape.hidden), down = gemm(shape.hidden, shape.intermediate);
  return {gate_up.weight_bytes + down.weight_bytes,
          gate_up.scratch_bytes + down.scratch_bytes + Scratch::make(shape, options, false).bytes()};
}

void ExpertMlp::forward(const uint16_t* x, std::span<const int64_t> first_row, std::span<const int64_t> num_rows, uint16_t* y) {
  const char* where = "ExpertMlp::forward";
  const auto experts = static_cast<size_t>(impl_->shape.num_local_experts);
  require(first_row.size() == experts && num_rows.size() == experts, where,
          "first_row and num_rows have " + std::to_string(first_row.size()) + " and " + std::to_string(num_rows.size()) +
              " entries; allowed: one per local expert, " + std::to_string(experts));
  bool any = false;
  for (size_t e = 0; e < experts; ++e) {
    require(num_rows[e] >= 0 && (num_rows[e] == 0 || first_row[e] >= 0), where,
            "local expert " + std::to_string(e) + " has first_row " + std::to_string(first_row[e]) + " and num_rows " +
                std::to_string(num_rows[e]) + "; allowed: >= 0");
    any |= num_rows[e] > 0;
  }
  require(!any || (x != nullptr && y != nullptr), where, "x or y is null; allowed only if all num_rows are 0");

  const int64_t h = impl_->shape.hidden;
  float* out = impl_->scratch.out.as<float>();
  detail::for_each_tile(num_rows, [&](int expert, int64_t first, int64_t rows) {
    const int64_t at = (first_row[static_cast<size_t>(expert)] + first) * h;
    impl_->mlp_tile(expert, impl_->padded_tile(x + at, rows), padded_rows(rows), out);
    detail::round_to_bf16(out, rows * h, y + at);
  });
}

void ExpertMlp::forward_rank_major(const uint16_t* x, const ExpertIds& ids, const float* weights, uint16_t* y) {
  const char* where = "ExpertMlp::forward_rank_major";
  Impl& impl = *impl_;
  require(ids.tokens >= 0, where, "ids.tokens is " + std::to_string(ids.tokens) + "; allowed: >= 0");
  if (ids.tokens == 0) return;
  require(ids.topk >= 1 && ids.topk <= kMaxTopk, where,
          "ids.topk is " + std::to_string(ids.topk) + "; allowed: 1 to " + std::to_string(kMaxTopk));
  require(ids.data != nullptr && x != nullptr && y != nullptr, where,
          "ids.data, x or y is null; allowed only if ids.tokens is 0");
  for (int64_t row = 0; row < ids.tokens;) {
    int64_t num_routes = 0;
    const int64_t end = impl.plan_block(ids, weights, row, &num_routes);
    impl.run_block(x);
    impl.reduce_block(row, end, num_routes, y);
    row = end;
  }
}

const ExpertShape& ExpertMlp::shape() const { return impl_->shape; }

ExpertMemory ExpertMlp::memory() const {
  const ExpertMemory gate_up = impl_->gate_up.memory(), down = impl_->down.memory();
  return {gate_up.weight_bytes + down.weight_bytes, gate_up.scratch_bytes + down.scratch_bytes + impl_->scratch.bytes()};
}

std::string ExpertMlp::implementation() const { return impl_->gate_up.implementation(); }

}  // namespace switchyard
