// SPDX-License-Identifier: Apache-2.0
#include "layer/setup.hpp"

#include <algorithm>
#include <initializer_list>
#include <string>

#include "base/enum_text.hpp"
#include "base/mix_hash.hpp"
#include "exchange/normal/known_memory.hpp"
#include "gemm/cpu/fused_products.hpp"

namespace switchyard::detail {
namespace {

[[noreturn]] void refuse(const char* member, const std::string& given, const std::string& allowed,
                         ErrorCode code = ErrorCode::invalid_argument) {
  const std::string field = std::string("MoeLayerConfig::") + member;
  throw Error(code, field + " = " + given + ": must be " + allowed, field);
}

void check_range(const char* member, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high)
    refuse(member, std::to_string(value), "in [" + std::to_string(low) + ", " + std::to_string(high) + "]");
}

template <NamedEnum E>
void check_enum(const char* member, E value) {
  if (!is_named(value)) refuse(member, text_of(value), numbered_names<E>());
}

void check_sizes(const MoeLayerConfig& c, int world) {
  if (world < 1 || world > kMaxRanks)
    throw Error(ErrorCode::invalid_argument,
                "world = " + std::to_string(world) + ": must be in [1, " + std::to_string(kMaxRanks) + "]", "world");
  constexpr int64_t kMaxColumns = int64_t{1} << 24;
  check_range("hidden", c.hidden, 1, kMaxColumns);
  check_range("intermediate", c.intermediate, 1, kMaxColumns);
  check_range("num_experts", c.num_experts, 1, 1 << 20);
  check_range("topk", c.topk, 1, kMaxTopk);
  check_range("max_tokens", c.max_tokens, 0, int64_t{1} << 26);
  check_range("capacity", c.capacity, 0, int64_t{1} << 31);
}

void check_kinds(const MoeLayerConfig& c, Backend backend) {
  check_enum("dtype", c.dtype);
  check_enum("order", c.order);
  check_enum("exchange", c.exchange);
  check_enum("form", c.form);
  check_enum("overflow", c.overflow);
  check_enum("invalid_ids", c.invalid_ids);
  check_enum("storage", c.storage);
  check_enum("row_scales", c.row_scales);
  check_enum("weight_scales", c.weight_scales);
  check_enum("accumulate", c.accumulate);
  check_enum("scaling", c.scaling);
  check_enum("intermediate_scaling", c.intermediate_scaling);
  if (!is_named(backend))
    throw Error(ErrorCode::invalid_argument, "backend = " + text_of(backend) + ": must be " + numbered_names<Backend>(),
                "backend");
  if (c.dtype == DType::f32) refuse("dtype", "f32", "bf16, and on GPUs f16 or fp8_e4m3");
  if (backend == Backend::cpu && c.dtype != DType::bf16)
    refuse("dtype", to_string(c.dtype), "bf16 on the CPU", ErrorCode::unsupported);
  if (c.accumulate == Accumulate::fast && (c.dtype != DType::fp8_e4m3 || c.form == MoeForm::fused))
    refuse("accumulate", "fast", "exact, but for fp8_e4m3 in the separate form", ErrorCode::unsupported);
  if (c.dtype == DType::fp8_e4m3) {
    if (c.row_scales == ScaleKind::none) refuse("row_scales", "none", "f32 or ue8m0 for fp8_e4m3");
    if (c.weight_scales == ScaleKind::none) refuse("weight_scales", "none", "f32 or ue8m0 for fp8_e4m3");
  }
  if (backend == Backend::cuda && c.storage != WeightStorage::view)
    refuse("storage", "packed", "view on GPUs, as the weights are read where the caller has them");
  if (c.exchange != MoeExchange::low_latency) return;
  if (c.order == CombineOrder::per_host)
    refuse("order", "per_host", "per_rank or per_route for low_latency, or exchange normal", ErrorCode::unsupported);
  check_range("max_tokens (low_latency)", c.max_tokens, 1, 65535);
  if (c.capacity != 0) refuse("capacity", std::to_string(c.capacity), "0 for low_latency, which has room for any routing");
}

/// Checks the granularity of fp8 scales. \pre the enumerators have been checked
void check_scaling(const MoeLayerConfig& c) {
  if (c.intermediate_scale != nullptr && c.intermediate_scaling != OutputScaling::fixed)
    refuse("intermediate_scale", "a scale", "null unless intermediate_scaling is fixed");
  if (c.scaling == ScaleGranularity::block) {
    if (c.intermediate_scaling != OutputScaling::per_group)
      refuse("intermediate_scaling", to_string(c.intermediate_scaling), "per_group if scaling is block");
    return;
  }
  if (c.dtype != DType::fp8_e4m3 || c.form == MoeForm::fused)
    refuse("scaling", to_string(c.scaling), "block, but for fp8_e4m3 in the separate form", ErrorCode::unsupported);
  if (c.scaling == ScaleGranularity::per_channel && c.exchange == MoeExchange::low_latency)
    refuse("scaling", "per_channel", "block or group_channel for low_latency", ErrorCode::unsupported);
  if (c.accumulate != Accumulate::exact) refuse("accumulate", "fast", "exact unless scaling is block");
  if (c.row_scales != ScaleKind::f32) refuse("row_scales", to_string(c.row_scales), "f32 unless scaling is block");
  if (c.weight_scales != ScaleKind::f32) refuse("weight_scales", to_string(c.weight_scales), "f32 unless scaling is block");
}

/// Returns the normal-mode config, with the memory size that normal mode computes.
NormalConfig expert_major(const MoeLayerConfig& config) {
  NormalConfig c;
  c.hidden = config.hidden;
  c.num_experts = config.num_experts;
  c.topk = config.topk;
  c.max_tokens = config.max_tokens;
  c.layout = Layout::expert_major;
  c.dtype = config.token_dtype();
  c.invalid_ids = config.invalid_ids;
  return c;
}

/// The same layer in the fused form, with a capacity if none is given; calls that exceed it are split.
LayerSetup as_fused(LayerSetup s) {
  MoeLayerConfig& c = s.config;
  c.form = MoeForm::fused;
  c.exchange = MoeExchange::normal;
  const int64_t worst = s.world * c.max_tokens * c.topk, rows = std::max(kMoeSplitRows, 2 * c.max_tokens * c.topk);
  if (c.capacity != 0 || c.overflow == Overflow::drop_and_report || rows >= worst) return s;
  c.capacity = rows;
  c.overflow = Overflow::split;
  return s;
}

/// True if the fused form supports these sizes.
bool fused_takes(const FusedMoeConfig& config, int world) {
  try {
    (void)FusedMoe::memory_required(config, world, Backend::cuda);
    return true;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

int LayerSetup::experts_of(int rank) const {
  return first_expert(config.num_experts, world, rank + 1) - first_expert(config.num_experts, world, rank);
}

NormalConfig LayerSetup::normal() const {
  NormalConfig c = expert_major(config);
  const auto left_out = static_cast<size_t>(max_rows(c, world) - rows());
  const size_t default_bytes = NormalExchange::memory_required(c, world, backend).pool_bytes;
  c.pool_bytes = default_bytes - 2 * left_out * row_bytes();  // received rows and returned rows
  if (backend == Backend::cuda && config.captured) c.pool_bytes *= 2;
  return c;
}

LowLatencyConfig LayerSetup::low_latency() const {
  LowLatencyConfig c;
  c.hidden = config.hidden;
  c.num_experts = config.num_experts;
  c.topk = config.topk;
  c.max_tokens = config.max_tokens;
  c.dtype = config.token_dtype();
  c.invalid_ids = config.invalid_ids;
  c.scales = config.dtype == DType::fp8_e4m3 ? config.row_scales : ScaleKind::none;
  return c;
}

FusedMoeConfig LayerSetup::fused() const {
  FusedMoeConfig c;
  c.hidden = config.hidden;
  c.intermediate = config.intermediate;
  c.num_experts = config.num_experts;
  c.topk = config.topk;
  c.max_tokens = config.max_tokens;
  c.capacity = config.capacity;
  c.overflow = config.overflow;
  c.dtype = config.dtype;
  c.invalid_ids = config.invalid_ids;
  c.row_scales = config.row_scales;
  c.weight_scales = config.weight_scales;
  c.w13_scales = config.w13_scales;
  c.w2_scales = config.w2_scales;
  c.order = config.order;
  return c;
}

int64_t LayerSetup::rows() const {
  if (config.exchange == MoeExchange::low_latency) return experts_of(0) * config.max_tokens * world;
  const int64_t max = max_rows(expert_major(config), world);
  return config.capacity > 0 ? std::min(config.capacity, max) : max;
}

ExpertOptions LayerSetup::expert_options() const {
  ExpertOptions o;
  o.backend = backend;
  o.dtype = config.dtype;
  o.storage = config.storage;
  o.route_scratch_bytes = 0;  // scratch of forward_rank_major, which a layer does not call
  o.max_rows = rows();
  o.w13_scales = config.w13_scales;
  o.w2_scales = config.w2_scales;
  o.weight_scales = config.weight_scales;
  o.accumulate = config.accumulate;
  o.scaling = config.scaling;
  o.intermediate_scaling = config.intermediate_scaling;
  o.intermediate_scale = config.intermediate_scale;
  return o;
}

MoeLayerMemory LayerSetup::memory() const {
  MoeLayerMemory m;
  if (config.form == MoeForm::fused) {
    const FusedMoeMemory fused_memory = FusedMoe::memory_required(fused(), world, backend);
    m.heap_bytes = fused_memory.heap_bytes;
    m.scratch_bytes = fused_memory.private_bytes;
    if (backend == Backend::cuda) return m;
    const ExpertMemory products = expert_products_memory(shape_of(0), config.storage);
    m.weight_bytes = products.weight_bytes;
    m.scratch_bytes += products.scratch_bytes;
    return m;
  }
  const ExpertMemory experts = ExpertMlp::memory_required(shape_of(0), expert_options());
  m.weight_bytes = experts.weight_bytes;
  m.scratch_bytes = experts.scratch_bytes;
  if (config.exchange == MoeExchange::normal) {
    m.heap_bytes = NormalExchange::memory_required(normal(), world, backend).total();
    m.scratch_bytes += token_bytes() + NormalCalls::slot_bytes(normal());
    return m;
  }
  const LowLatencyConfig c = low_latency();
  m.heap_bytes = LowLatencyExchange::memory_required(c, world).total();
  const auto sent = dtype_bytes(config.dtype, c.hidden) + scale_row_bytes(c.hidden, c.scales);
  const auto ranks = static_cast<size_t>(world), tokens = static_cast<size_t>(c.max_tokens);
  const size_t tables = static_cast<size_t>(rows()) * 8 + static_cast<size_t>(experts_of(0)) * (4 + 8 * ranks) +
                        (ranks + 2) * tokens * static_cast<size_t>(c.topk) * 8 + ranks * 8 + 4096;
  m.private_bytes = static_cast<size_t>(rows()) * (sent + row_bytes()) + tables + sum_bytes();
  return m;
}

size_t LayerSetup::heap_bytes() const {
  if (config.form == MoeForm::fused) return FusedMoe::heap_bytes(fused(), world);
  return config.exchange == MoeExchange::normal ? NormalExchange::heap_bytes(normal(), world, backend)
                                                : LowLatencyExchange::heap_bytes(low_latency(), world);
}

AgreedFields LayerSetup::agreed_fields() const {
  return {agreed("MoeLayerConfig::hidden", config.hidden),
          agreed("MoeLayerConfig::intermediate", config.intermediate),
          agreed("MoeLayerConfig::num_experts", config.num_experts),
          agreed("MoeLayerConfig::topk", config.topk),
          agreed("MoeLayerConfig::max_tokens", config.max_tokens),
          agreed("MoeLayerConfig::capacity", config.capacity),
          agreed("MoeLayerConfig::captured", config.captured),
          agreed("MoeLayerConfig::dtype", config.dtype),
          agreed("MoeLayerConfig::order", config.order),
          agreed("MoeLayerConfig::exchange", config.exchange),
          agreed("MoeLayerConfig::form", config.form),
          agreed("MoeLayerConfig::overflow", config.overflow),
          agreed("MoeLayerConfig::row_scales", config.row_scales),
          agreed("MoeLayerConfig::weight_scales", config.weight_scales),
          agreed("MoeLayerConfig::accumulate", config.accumulate),
          agreed("MoeLayerConfig::scaling", config.scaling),
          agreed("MoeLayerConfig::intermediate_scaling", config.intermediate_scaling)};
}

LayerSetup set_up(const MoeLayerConfig& given, int world, Backend backend) {
  check_sizes(given, world);
  check_kinds(given, backend);
  check_scaling(given);
  LayerSetup s{given, world, backend, -1};
  MoeLayerConfig& c = s.config;
  const bool typed = c.dtype == DType::bf16 || (backend == Backend::cuda && c.dtype == DType::fp8_e4m3);
  const bool fuses = typed && c.accumulate == Accumulate::exact && c.scaling == ScaleGranularity::block &&
                     c.order != CombineOrder::per_host && c.exchange != MoeExchange::low_latency;
  if (c.form == MoeForm::fused) {
    if (!fuses)
      refuse("form", "fused", "separate or automatic, but for bf16, or on GPUs fp8_e4m3, normal mode, per_route or per_rank",
             ErrorCode::unsupported);
    return as_fused(s);
  }
  if (c.overflow == Overflow::split) {
    if (c.form == MoeForm::separate || !fuses)
      refuse("overflow", "split", "fail or drop_and_report, except in the fused form, which alone splits calls",
             ErrorCode::unsupported);
    return as_fused(s);
  }
  if (c.exchange == MoeExchange::automatic) {
    const bool decodes = c.capacity == 0 && c.scaling != ScaleGranularity::per_channel && c.order != CombineOrder::per_host &&
                         c.max_tokens >= 1 && c.max_tokens <= kMaxDecodeTokens &&
                         s.experts_of(0) * c.max_tokens * world <= kMaxDecodeRows;
    c.exchange = decodes ? MoeExchange::low_latency : MoeExchange::normal;
  }
  if (c.form == MoeForm::separate) return s;
  const bool measured_faster = backend == Backend::cuda && c.dtype == DType::bf16 && c.exchange == MoeExchange::normal &&
                               c.order == CombineOrder::per_route;
  c.form = MoeForm::separate;
  if (!fuses || !measured_faster) return s;
  const LayerSetup fused = as_fused(s);
  return fused_takes(fused.fused(), world) ? fused : s;
}

}  // namespace switchyard::detail
