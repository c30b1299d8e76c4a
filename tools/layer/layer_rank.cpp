// SPDX-License-Identifier: Apache-2.0
#include "layer/layer_rank.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <span>

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
  const auto* const normal = std::get_if<NormalConfig>(&spec.exchange);
  c.max_tokens = normal ? normal->max_tokens : std::get<LowLatencyConfig>(spec.exchange).max_tokens;
  c.exchange = normal ? MoeExchange::normal : MoeExchange::low_latency;
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
  c.storage = spec.backend == Backend::cuda ? WeightStorage::view : WeightStorage::packed;  // as in LayerExperts
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

/// Whether the calls one by one receive quantized tokens.
bool quantises_tokens(const LayerSpec& spec) { return spec.has_calls() && spec.arithmetic.quantises_tokens(); }

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
  size_t bytes = spec.has_calls() ? exchange_heap_bytes(spec.exchange, world, spec.backend) : 0;
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
  const int64_t rows = exchange_max_rows(spec.exchange, s.world);
  // Low-latency rows are not in the heap.
  const bool masked = spec.has_calls() && std::holds_alternative<LowLatencyConfig>(spec.exchange);
  const size_t row = dtype_bytes(kLayerType, s.hidden);
  const size_t codes = quantises_tokens(spec) ? at(s.hidden) + scale_row_bytes(s.hidden, ScaleKind::f32) : 0;
  return at(2 * tokens + (masked ? 2 * rows : 0)) * row + at(tokens) * codes + at(tokens * s.topk * (spec.selected ? 16 : 8)) +
         LayerExperts::device_bytes(shape_of(spec), spec.has_calls() ? rows : 0, spec.arithmetic, spec.backend) +
         (size_t{1} << 20);
}

LayerRank::LayerRank(const LayerSpec& spec, Group& group, RankDevice& device)
    : spec_(spec),
      group_(group),
      device_(device),
      rank_(group.rank()),
      experts_(shape_of(spec, rank_), spec.scenario.first_expert(rank_), spec.scenario.seed,
               spec.has_calls() ? exchange_max_rows(spec.exchange, spec.scenario.world) : 0, spec.arithmetic,
               spec.scenario.world, device) {
  const Routing& mine = spec.scenario.routing[at(rank_)];
  input_.ids = mine.expert_ids();
  input_.ids.data = device_.upload(mine.topk_ids.data(), mine.topk_ids.size() * 4);
  if (!mine.topk_weights.empty()) input_.weights = device_.upload(mine.topk_weights.data(), mine.topk_weights.size() * 4);
  const size_t elements = at(mine.num_tokens * spec.scenario.hidden), bytes = some(elements * dtype_bytes(kLayerType, 1));
  rows_ = device_.allocate(bytes);
  out_ = device_.allocate(bytes);
  if (quantises_tokens(spec)) {
    codes_ = device_.allocate(some(elements));
    scales_ = device_.allocate(some(at(mine.num_tokens) * scale_row_bytes(spec.scenario.hidden, ScaleKind::f32)));
  }
  group_.barrier();  // every rank has its memory before any rank waits for another, which may share its GPU
  const ScaleKind by_dispatch = quantises_tokens(spec) ? ScaleKind::none : spec.arithmetic.quantize;
  if (spec.has_calls()) exchange_ = make_layer_exchange(spec.exchange, by_dispatch, group, spec.sms, device.stream());
  if (!layers_of(spec).empty()) make_layers();
  if (!spec.selected) return;
  const Routing& of_experts = spec.selected->of_experts[at(rank_)];
  const size_t id_bytes = of_experts.topk_ids.size() * 4;
  expert_ids_ = of_experts.expert_ids();
  expert_ids_.data = device_.upload(of_experts.topk_ids.data(), id_bytes);
  slots_ = device_.allocate(some(id_bytes));
  selector_.emplace(group, spec.selected->map, spec.selected->expected);
}

void LayerRank::make_layers() {
  const void *w13 = experts_.w13(), *w2 = experts_.w2();
  std::vector<uint16_t> gate_up, down;  // on the host: the layer packs these weights
  if (device_.on_host()) {
    const ExpertShape shape = shape_of(spec_, rank_);
    const size_t each = at(shape.hidden * shape.intermediate);
    const ExpertWeights weights(spec_.scenario.seed, shape.hidden, shape.intermediate);
    gate_up.resize(2 * each * at(shape.num_local_experts));
    down.resize(each * at(shape.num_local_experts));
    for (int64_t e = 0; e < shape.num_local_experts; ++e)
      weights.fill(spec_.scenario.first_expert(rank_) + e, std::span(gate_up).subspan(2 * each * at(e), 2 * each),
                   std::span(down).subspan(each * at(e), each));
    w13 = gate_up.data();
    w2 = down.data();
  }
  device_.wait();  // for the scales, which the constructors read
  const auto make = [&](MoeForm form, CombineOrder order) {
    MoeLayerConfig config = config_of(spec_, form, order);
    config.w13_scales = experts_.w13_scales();
    config.w2_scales = experts_.w2_scales();
    config.intermediate_scale = experts_.intermediate_scale();
    return MoeLayer(group_, config, w13, w2);
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
  input_.x = {rows_, x_.rows(), s.hidden, kLayerType};
  if (quantises_tokens(spec_)) write_codes();
  device_.wait();
  group_.barrier();
}

/// The scale of a token is repeated throughout its row of scales.
void LayerRank::write_codes() {
  const int64_t hidden = spec_.scenario.hidden;
  const size_t scale_bytes = scale_row_bytes(hidden, ScaleKind::f32);
  std::vector<uint8_t> codes(at(x_.rows() * hidden));
  std::vector<std::byte> scales(at(x_.rows()) * scale_bytes);
  for (int64_t t = 0; t < x_.rows(); ++t) {
    float scale[4] = {};  // padded to 16 bytes
    oracle::quantise(kLayerType, x_.row(t), hidden, ScaleKind::f32, &codes[at(t * hidden)], scale, static_cast<int>(hidden));
    for (size_t i = 0; i < scale_bytes; i += sizeof(float)) std::memcpy(&scales[at(t) * scale_bytes + i], scale, sizeof(float));
  }
  device_.write(codes_, codes.data(), codes.size());
  device_.write(scales_, scales.data(), scales.size());
  input_.x = {codes_, x_.rows(), hidden, DType::fp8_e4m3, scales_, ScaleKind::f32};
}

void LayerRank::forward(MoeLayer& layer) {
  layer.forward(rows_, input_.ids, input_.weights, out_, {.stream = device_.stream(), .num_sms = spec_.layer_sms});
}

void LayerRank::calls() {
  dispatch();
  experts();
  combine();
}

LayerInput LayerRank::selecting_input() {
  LayerInput input = input_;
  input.ids = expert_ids_;
  input.selector = &*selector_;
  input.slots = slots_;
  return input;
}

void LayerRank::selecting_layer() {
  select_and_dispatch();
  experts();
  combine();
}

std::vector<std::byte> LayerRank::outputs() const {
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
