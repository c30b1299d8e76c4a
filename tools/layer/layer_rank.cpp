// SPDX-License-Identifier: Apache-2.0
#include "layer/layer_rank.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>

#include "cli/verb.hpp"
#include "layer/moe_reference.hpp"
#include "oracle/rows.hpp"
#include "run/index.hpp"

namespace switchyard::tool {
namespace {

/// Shape of a rank's experts; by default, rank 0's, which has the maximum number of experts.
ExpertShape shape_of(const LayerSpec& spec, int rank = 0) {
  const Scenario& s = spec.scenario;
  return {s.hidden, spec.intermediate, s.first_expert(rank + 1) - s.first_expert(rank)};
}

int64_t width_step(ScaleKind quantize) { return quantize != ScaleKind::none ? 16 : 8; }

MoeLayerConfig config_of(const LayerSpec& spec, MoeForm form, CombineOrder order) {
  const Scenario& s = spec.scenario;
  MoeLayerConfig c;
  c.hidden = s.hidden;
  c.intermediate = spec.intermediate;
  c.num_experts = s.experts;
  c.topk = s.topk;
  c.max_tokens = spec.exchange == MoeExchange::low_latency ? 1 : 0;
  for (int r = 0; r < s.world; ++r) c.max_tokens = std::max(c.max_tokens, s.tokens(r));
  c.exchange = spec.exchange;
  const LayerArithmetic& numbers = spec.arithmetic;
  c.dtype = numbers.fp8() ? DType::fp8_e4m3 : kLayerType;
  if (numbers.fp8()) c.row_scales = numbers.quantize;
  c.accumulate = numbers.accumulate;
  c.scaling = numbers.scaling;
  c.intermediate_scaling = numbers.intermediate_scaling;
  c.form = form;
  c.order = order;
  if (form == MoeForm::fused && spec.fused_rows > 0) {
    c.capacity = spec.fused_rows;
    c.overflow = Overflow::split;
  }
  c.captured = false;
  c.storage = spec.backend == Backend::cuda ? WeightStorage::view : WeightStorage::packed;
  return c;
}

/// The MoeLayers of a rank.
std::vector<MoeLayerConfig> layers_of(const LayerSpec& spec) {
  std::vector<MoeLayerConfig> layers;
  if (spec.separate) layers.push_back(config_of(spec, MoeForm::separate, spec.order));
  if (spec.fused) layers.push_back(config_of(spec, MoeForm::fused, spec.fused_order));
  if (spec.fused && spec.fused_per_rank) layers.push_back(config_of(spec, MoeForm::fused, CombineOrder::per_rank));
  return layers;
}

MoeLayerMemory memory_of(const LayerSpec& spec, const MoeLayerConfig& layer) {
  return MoeLayer::memory_required(layer, spec.scenario.world, spec.backend);
}

/// A device allocates a minimum size even for empty buffers.
size_t some(size_t bytes) { return std::max<size_t>(bytes, 16); }

}  // namespace

bool layer_widths_allowed(int64_t hidden, int64_t intermediate, ScaleKind quantize) {
  return hidden % width_step(quantize) == 0 && intermediate % width_step(quantize) == 0;
}

void check_layer_widths(int64_t hidden, int64_t intermediate, ScaleKind quantize) {
  if (layer_widths_allowed(hidden, intermediate, quantize)) return;
  const bool of_rows = hidden % width_step(quantize) != 0;
  const std::string fp8 = quantize != ScaleKind::none ? std::string(" and --quantize ") + to_string(quantize) : "";
  throw UsageError(fmt::format("{}: {} given; allowed for a layer with --backend cuda{}: a multiple of {}",
                               of_rows ? "--hidden" : "--intermediate", of_rows ? hidden : intermediate, fp8,
                               width_step(quantize)));
}

std::string why_not_fused(const LayerSpec& spec) {
  try {
    (void)memory_of(spec, config_of(spec, MoeForm::fused, spec.fused_order));
  } catch (const Error& e) {
    if (e.code() != ErrorCode::unsupported && e.code() != ErrorCode::invalid_argument) throw;
    return e.what();
  }
  return {};
}

size_t layer_heap_bytes(const LayerSpec& spec) {
  const int world = spec.scenario.world;
  size_t bytes = 0;
  for (const MoeLayerConfig& layer : layers_of(spec)) bytes += MoeLayer::heap_bytes(layer, world, spec.backend);
  return bytes;
}

size_t layer_private_bytes(const LayerSpec& spec) {
  const std::vector<MoeLayerConfig> layers = layers_of(spec);
  if (layers.empty()) return 0;
  const ExpertShape shape = shape_of(spec);
  const int64_t elements = 3 * shape.num_local_experts * shape.hidden * shape.intermediate;
  size_t bytes = spec.backend == Backend::cpu ? dtype_bytes(kLayerType, elements) : 0;  // weights, during construction
  for (const MoeLayerConfig& layer : layers) {
    const MoeLayerMemory memory = memory_of(spec, layer);
    bytes += memory.total() - memory.heap_bytes;
  }
  return bytes;
}

size_t layer_device_bytes(const LayerSpec& spec) {
  const Scenario& s = spec.scenario;
  int64_t tokens = 0;
  for (int r = 0; r < s.world; ++r) tokens = std::max(tokens, s.tokens(r));
  const size_t weights = spec.backend == Backend::cuda ? LayerWeights::device_bytes(shape_of(spec), spec.arithmetic) : 0;
  return at(2 * tokens) * dtype_bytes(kLayerType, s.hidden) + at(tokens * s.topk * (spec.selected ? 12 : 8)) + weights +
         (size_t{1} << 20);
}

LayerRank::LayerRank(const LayerSpec& spec, Group& group, RankDevice& device)
    : spec_(spec), group_(group), device_(device), rank_(group.rank()) {
  const LayerWeights weights(shape_of(spec, rank_), spec.scenario.first_expert(rank_), spec.scenario.seed, spec.arithmetic,
                             device);
  const Routing& mine = spec.scenario.routing[at(rank_)];
  ids_ = mine.expert_ids();
  ids_.data = device_.upload(mine.topk_ids.data(), mine.topk_ids.size() * 4);
  if (!mine.topk_weights.empty()) weights_ = device_.upload(mine.topk_weights.data(), mine.topk_weights.size() * 4);
  const size_t bytes = some(dtype_bytes(kLayerType, mine.num_tokens * spec.scenario.hidden));
  rows_ = device_.allocate(bytes);
  out_ = device_.allocate(bytes);
  group_.barrier();  // every rank has its memory before any rank waits for another, which may share its GPU
  make_layers(weights);
  if (!spec.selected) return;
  const Routing& of_experts = spec.selected->of_experts[at(rank_)];
  expert_ids_ = of_experts.expert_ids();
  expert_ids_.data = device_.upload(of_experts.topk_ids.data(), of_experts.topk_ids.size() * 4);
  selector_.emplace(group, spec.selected->map, spec.selected->expected);
}

void LayerRank::make_layers(const LayerWeights& weights) {
  const auto make = [&](MoeForm form, CombineOrder order) {
    MoeLayerConfig config = config_of(spec_, form, order);
    weights.set_scales(config);
    return MoeLayer(group_, config, weights.w13(), weights.w2());
  };
  if (spec_.separate) separate_.emplace(make(MoeForm::separate, spec_.order));
  if (!spec_.fused) return;
  try {
    fused_.emplace(make(MoeForm::fused, spec_.fused_order));
    if (spec_.fused_per_rank) fused_per_rank_.emplace(make(MoeForm::fused, CombineOrder::per_rank));
  } catch (const Error& e) {
    if (e.code() != ErrorCode::unsupported) throw;
    why_not_fused_ = e.what();
  }
}

void LayerRank::prepare(uint64_t set) {
  const Scenario& s = spec_.scenario;
  x_ = token_rows(s.seed, set, rank_, s.tokens(rank_), s.hidden, kLayerType, ScaleKind::none);
  device_.write(rows_, x_.view().data, out_bytes());
  device_.fill(out_, 0xFF, out_bytes());
  device_.wait();
  group_.barrier();
}

void LayerRank::forward(MoeLayer& layer) {
  layer.forward(rows_, ids_, weights_, out_, {.stream = device_.stream(), .num_sms = spec_.sms});
}

void LayerRank::selecting_layer() {
  separate_->forward(rows_, expert_ids_, weights_, out_,
                     {.stream = device_.stream(), .num_sms = spec_.sms, .selector = &*selector_});
}

std::vector<std::byte> LayerRank::outputs() const {
  group_.barrier();
  std::vector<std::byte> out(out_bytes());
  device_.read(out.data(), out_, out.size());
  return out;
}

CheckResult LayerRank::check(const std::string& name, const std::vector<std::byte>& outputs, int64_t max_tokens,
                             int threads) const {
  const Scenario& s = spec_.scenario;
  const Routing& mine = s.routing[at(rank_)];
  const int64_t count = std::min(mine.num_tokens, max_tokens);
  const auto token = [&](int64_t i) { return i * mine.num_tokens / count; };
  RowArray rows(count, s.hidden, kLayerType);
  ReferenceInput input;
  input.rows = {reinterpret_cast<const uint16_t*>(rows.row(0))};
  input.routing = {{mine.num_experts, mine.topk, count, {}, {}}};
  Routing& routes = input.routing.front();
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(rows.row(i), x_.row(token(i)), x_.row_bytes());
    const auto from = at(token(i) * mine.topk), to = from + at(mine.topk);
    for (size_t f = from; f < to; ++f) {
      routes.topk_ids.push_back(mine.topk_ids[f]);
      if (!mine.topk_weights.empty()) routes.topk_weights.push_back(mine.topk_weights[f]);
    }
  }
  CheckResult result;
  result.name = name;
  const ExpertWeights weights(s.seed, s.hidden, spec_.intermediate);
  input.arithmetic = spec_.arithmetic;
  std::vector<std::vector<double>> ambiguity;
  const auto expected = moe_reference(input, weights, s.hidden, spec_.intermediate, threads, {}, &ambiguity);
  for (int64_t i = 0; i < count; ++i, result.compared += s.hidden) {
    const auto* got = reinterpret_cast<const uint16_t*>(outputs.data() + at(token(i)) * x_.row_bytes());
    const float* const wanted = &expected.front()[at(i * s.hidden)];
    const double error = row_error(got, wanted, s.hidden);
    const double tolerance =
        layer_tolerance(input, s.hidden, spec_.intermediate, norm_of(wanted, s.hidden), ambiguity.front()[at(i)]);
    if (error <= tolerance || !result.passed) continue;
    result.passed = false;
    result.detail = fmt::format("token {}: off by {:.2f} %, at most {:.2f} % allowed", token(i), 100 * error, 100 * tolerance);
  }
  return result;
}

}  // namespace switchyard::tool
