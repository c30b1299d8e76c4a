// SPDX-License-Identifier: Apache-2.0
// FusedMoe, with its checks and its memory requirement.
#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "exchange/fused/impl.hpp"
#include "exchange/fused/sizes.hpp"
#include "exchange/normal/plan/tables.hpp"
#include "exchange/group/enum_checks.hpp"
#include "exchange/group/make.hpp"
#include "switchyard/status.hpp"

namespace switchyard::detail {

int64_t max_rows(const FusedMoeConfig& c, int world) {
  const int64_t worst = c.max_tokens * c.topk * world;
  return c.capacity > 0 ? std::min(c.capacity, worst) : worst;
}

SplitPasses split_passes(const FusedMoeConfig& c, int world) {
  if (c.overflow != Overflow::split || c.topk < 1) return {};
  const int64_t tokens = max_rows(c, world) / (int64_t{world} * c.topk);
  if (tokens < 1 || tokens >= c.max_tokens) return {};  // check_config() rejects a capacity for less than one token per rank
  const auto parts = [](int64_t whole, int64_t part) { return (whole + part - 1) / part; };
  const int64_t count = parts(c.max_tokens, tokens);
  return {static_cast<int>(count), parts(c.max_tokens, count)};
}

namespace {

/// Maximum number of rows whose tiles fit the bits of a tile index and the range of tickets.
int64_t countable_rows(const FusedMoeConfig& c, int world) {
  constexpr int64_t kMaxTiles = int64_t{1} << 20, kMaxTickets = int64_t{1} << 30;
  const int64_t columns = (c.intermediate + kUpColumns - 1) / kUpColumns + (c.hidden + kDownColumns - 1) / kDownColumns;
  const int64_t tiles = std::min(kMaxTiles, kMaxTickets / columns) - ExpertRanges{c.num_experts, world}.max_count();
  return tiles * fused_type_sizes(c).tile_rows;
}

void check_split(const FusedMoeConfig& c, int world) {
  if (c.overflow != Overflow::split || c.capacity == 0) return;
  const int64_t least = (c.max_tokens + kMaxPasses - 1) / kMaxPasses * world * c.topk;
  if (c.capacity < least)
    invalid_value("MoeLayerConfig::capacity", std::to_string(c.capacity),
                  "0 or at least " + std::to_string(least) + " for overflow split: the rows of " + std::to_string(world) +
                      " ranks in one of " + std::to_string(kMaxPasses) + " passes");
}

void check_type(const FusedMoeConfig& c, int world) {
  if (c.dtype == DType::bf16) return;
  if (c.dtype != DType::fp8_e4m3)
    invalid_value("MoeLayerConfig::dtype", is_named(c.dtype) ? to_string(c.dtype) : std::to_string(static_cast<int>(c.dtype)),
                  "bf16 or fp8_e4m3");
  if (const int local_experts = ExpertRanges{c.num_experts, world}.max_count(); local_experts > kMaxFusedFp8Experts)
    invalid_value("MoeLayerConfig::num_experts", std::to_string(c.num_experts),
                  "at most " + std::to_string(kMaxFusedFp8Experts) + " of a rank for fp8_e4m3");
  check_range("MoeLayerConfig::hidden (fp8)", c.hidden, 128, kMaxFusedFp8Hidden);
  for (const auto& [name, width] :
       {std::pair{"MoeLayerConfig::hidden", c.hidden}, {"MoeLayerConfig::intermediate", c.intermediate}})
    if (width % kFusedScaled != 0) invalid_value(name, std::to_string(width), "a multiple of 128 for fp8_e4m3");
  check_enum("MoeLayerConfig::row_scales", c.row_scales);
  check_enum("MoeLayerConfig::weight_scales", c.weight_scales);
  if (c.row_scales == ScaleKind::none) invalid_value("MoeLayerConfig::row_scales", "none", "f32 or ue8m0");
  if (c.weight_scales == ScaleKind::none) invalid_value("MoeLayerConfig::weight_scales", "none", "f32 or ue8m0");
}

/// Bytes per transferred token: its elements and, for fp8, the float32 scales that follow them, rounded up to a multiple of
/// 128.
int64_t token_bytes(const FusedMoeConfig& c) {
  return c.dtype == DType::fp8_e4m3 ? round_up(c.hidden + c.hidden / kFusedScaled * 4, 128) : c.hidden * 2;
}

}  // namespace

void check_config(const FusedMoeConfig& c, int world) {
  constexpr int64_t kMaxColumnTiles = 4095;  // twelve bits of a tile
  check_range("world", world, 1, kMaxRanks);
  check_range("MoeLayerConfig::hidden", c.hidden, 8, kMaxColumnTiles * 256);
  check_range("MoeLayerConfig::intermediate", c.intermediate, 8, kMaxColumnTiles * 128);
  if (c.hidden % 8 != 0) invalid_value("MoeLayerConfig::hidden", std::to_string(c.hidden), "a multiple of 8");
  if (c.intermediate % 8 != 0) invalid_value("MoeLayerConfig::intermediate", std::to_string(c.intermediate), "a multiple of 8");
  check_range("MoeLayerConfig::num_experts", c.num_experts, 1, kMaxFusedExperts);
  check_range("MoeLayerConfig::topk", c.topk, 1, kMaxTopk);
  check_range("MoeLayerConfig::max_tokens", c.max_tokens, 0, std::numeric_limits<int32_t>::max() / (int64_t{c.topk} * world));
  check_range("MoeLayerConfig::capacity", c.capacity, 0, std::numeric_limits<int32_t>::max());
  check_enum("MoeLayerConfig::overflow", c.overflow);
  check_enum("MoeLayerConfig::invalid_ids", c.invalid_ids);
  check_enum("MoeLayerConfig::order", c.order);
  if (c.order == CombineOrder::per_host) invalid_value("MoeLayerConfig::order", "per_host", "per_rank or per_route");
  check_split(c, world);
  check_type(c, world);
  const int64_t max = countable_rows(c, world);
  if (max_rows(c, world) <= max) return;
  const std::string rows = std::to_string(max) + " rows of a rank, for these widths";
  if (c.capacity > max) invalid_value("MoeLayerConfig::capacity", std::to_string(c.capacity), "at most " + rows);
  invalid_value("MoeLayerConfig::max_tokens", std::to_string(c.max_tokens), "fewer, or capacity at most " + rows);
}

void check_type_on_cpu(const FusedMoeConfig& c) {
  if (c.dtype == DType::bf16) return;
  throw Error(ErrorCode::unsupported,
              std::string("MoeLayerConfig::dtype = ") + to_string(c.dtype) + ": must be bf16 on the CPU",
              "MoeLayerConfig::dtype");
}

/// Layout of the symmetric memory, without a base address.
FusedLayout layout_of(const FusedMoeConfig& c, int world) {
  return {0,
          world,
          c.num_experts,
          c.topk,
          c.max_tokens,
          max_rows(c, world),
          c.hidden * 2,
          token_bytes(c),
          c.order == CombineOrder::per_rank};
}

AgreedFields agreed_fields(const FusedMoeConfig& c) {
  return {agreed("MoeLayerConfig::hidden", c.hidden),
          agreed("MoeLayerConfig::intermediate", c.intermediate),
          agreed("MoeLayerConfig::num_experts", c.num_experts),
          agreed("MoeLayerConfig::topk", c.topk),
          agreed("MoeLayerConfig::max_tokens", c.max_tokens),
          agreed("MoeLayerConfig::capacity", c.capacity),
          agreed("MoeLayerConfig::overflow", c.overflow),
          agreed("MoeLayerConfig::dtype", c.dtype),
          agreed("MoeLayerConfig::row_scales", c.row_scales),
          agreed("MoeLayerConfig::weight_scales", c.weight_scales),
          agreed("MoeLayerConfig::order", c.order)};
}

void FusedImpl::check_arguments(const FusedParts& parts, const void* x, const ExpertIds& ids, const float* weights,
                                const void* out) const {
  if (ids.topk != config.topk)
    invalid("topk_ids.topk",
            " = " + std::to_string(ids.topk) + ": must equal MoeLayerConfig::topk, " + std::to_string(config.topk));
  check_num_tokens(ids.num_tokens, config.max_tokens);
  const bool per_rank = config.order == CombineOrder::per_rank;
  if (weights != nullptr && !(per_rank ? parts.up : parts.down))
    invalid("topk_weights", per_rank ? " is not null: with per_rank, dispatch_up takes the weights"
                                     : " is not null: with per_route, down_combine takes the weights");
  if (ids.num_tokens == 0) return;
  if (parts.up && x == nullptr) invalid("x", " is null");
  if (parts.up && ids.data == nullptr) invalid("topk_ids.data", " is null");
  if (parts.down && out == nullptr) invalid("out", " is null");
}

namespace {
constexpr const char* kInstead = "use MoeForm::separate";
}  // namespace

FusedMoe::FusedMoe(Group& group, const FusedMoeConfig& config, const void* w13, const void* w2, void* stream)
    : impl_(group.impl().collective_call("MoeLayer", [&] {
        group.impl().require_one_host("MoeForm::fused", kInstead);
        if constexpr (kHasGpuCode)
          if (group.impl().device)
            return FusedImpl::make_on_gpu(group, config, {w13, w2, config.w13_scales, config.w2_scales, stream});
        throw AgreedError(ErrorCode::unsupported,
                          "FusedMoe: the group is of CPUs, where products come from the caller: give FusedProducts", "");
        return std::unique_ptr<FusedImpl>();
      })) {}
FusedMoe::FusedMoe(Group& group, const FusedMoeConfig& config, std::shared_ptr<FusedProducts> products)
    : impl_(group.impl().collective_call("MoeLayer", [&] {
        if (group.impl().device)
          throw AgreedError(ErrorCode::unsupported, "FusedMoe: the group is of GPUs, which multiply themselves: give weights",
                            "");
        group.impl().require_one_host("MoeForm::fused", kInstead);
        const FusedOnCpu from{config, std::move(products)};
        if (group.impl().defers_copies) return make_deferred<FusedImpl, FusedOnCpu>(group, from);
        return FusedImpl::make_on_cpu<Cpu>(group, from);
      })) {}
FusedMoe::FusedMoe(FusedMoe&&) noexcept = default;
FusedMoe& FusedMoe::operator=(FusedMoe&& other) noexcept {
  if (this != &other) replace_at_home(impl_.pointer(), std::move(other.impl_.pointer()));
  return *this;
}
FusedMoe::~FusedMoe() { replace_at_home(impl_.pointer(), {}); }

FusedMoeMemory FusedMoe::memory_required(const FusedMoeConfig& config, int world, Backend backend) {
  check_config(config, world);
  check_enum("backend", backend);
  const int64_t rows = max_rows(config, world);
  const auto heap = static_cast<size_t>(layout_of(config, world).bytes());
  FusedMemory memory;
  if (backend == Backend::cpu) check_type_on_cpu(config);
  const auto slots = static_cast<size_t>(SelectedSlots::bytes(config.max_tokens * config.topk));
  if (backend == Backend::cpu) return {heap, static_cast<size_t>(carve_fused_on_cpu(nullptr, config, rows, memory)) + slots};
  const int local_experts = ExpertRanges{config.num_experts, world}.max_count();
  const TablesShape tables{world, config.num_experts, local_experts, config.topk, config.max_tokens, true};
  const int64_t own = carve_fused(nullptr, config, rows, local_experts, memory) + carve_tables(nullptr, tables).bytes;
  return {heap, static_cast<size_t>(own) + slots + weight_scales_bytes(config, local_experts)};
}
size_t FusedMoe::heap_bytes(const FusedMoeConfig& config, int world) {
  return memory_required(config, world).heap_bytes + kHeapHeaderBytes + 4096;
}

void FusedMoe::forward(const void* x, const ExpertIds& ids, const float* weights, void* out, const FusedMoeCall& call) {
  impl_->collective_call("MoE layer", [&] { impl_->forward(x, ids, weights, out, call); });
}
void FusedMoe::dispatch_up(const void* x, const ExpertIds& ids, const float* weights, const FusedMoeCall& call) {
  impl_->collective_call("MoE layer", [&] { impl_->dispatch_up(x, ids, weights, call); });
}
void FusedMoe::down_combine(const float* weights, void* out, const FusedMoeCall& call) {
  impl_->collective_call("MoE layer", [&] { impl_->down_combine(weights, out, call); });
}
FusedMoeRows FusedMoe::rows() const { return impl_->rows(); }
int FusedMoe::add_weights(const MoeWeights& weights) {
  return as_error("FusedMoe::add_weights", [&] { return impl_->add_weights(weights); });
}
int FusedMoe::add_products(std::shared_ptr<FusedProducts> products) {
  return as_error("FusedMoe::add_products", [&] { return impl_->add_products(std::move(products)); });
}
void FusedMoe::remove_weights(int set) { impl_->remove_weights(set); }
void* FusedMoe::tokens() const { return impl_->tokens(); }
std::span<const uint8_t> FusedMoe::dropped() const { return impl_->dropped(); }
const FusedMoeConfig& FusedMoe::config() const { return impl_->config; }
CallStatistics FusedMoe::last_call() const { return impl_->last_call(); }
int64_t FusedMoe::invalid_ids() const {
  return as_error("MoeLayer::invalid_ids", [&] { return impl_->invalid_ids(); });
}

}  // namespace switchyard::detail
