// SPDX-License-Identifier: Apache-2.0
#include "layer/experts.hpp"

#include <cmath>

#include "oracle/numbers.hpp"

namespace switchyard::tool {
namespace {

size_t at(int64_t i) { return static_cast<size_t>(i); }

/// Of experts on the host: forward_rank_major, which has routes, is not called.
ExpertOptions host_options() {
  ExpertOptions o;
  o.route_scratch_bytes = 0;
  return o;
}

/// docs/expert.md, "Weights for demonstrations".
measure::WeightForm form_of(uint64_t seed, uint64_t matrix, double amplitude) {
  measure::WeightForm form;
  form.key = measure::mix_weight_key(seed + matrix * 0x9E3779B97F4A7C15u);
  for (int i = 0; i < measure::WeightForm::kLevels; ++i)
    oracle::store(kLayerType, form.levels, i, static_cast<float>(amplitude * (static_cast<double>(2 * i - 255) / 255)));
  return form;
}

}  // namespace

WeightForms weight_forms(uint64_t seed, int64_t hidden, int64_t intermediate) {
  return {form_of(seed, 13, std::sqrt(3.0 / static_cast<double>(hidden))),
          form_of(seed, 2, std::sqrt(3.0 / (0.3557 * static_cast<double>(intermediate))))};
}

void write_weights(const ExpertShape& shape, int first_expert, uint64_t seed, void* w13, void* w2, RankDevice& device) {
  const int64_t experts = shape.num_local_experts, h = shape.hidden, width = shape.intermediate;
  const WeightForms forms = weight_forms(seed, h, width);
  measure::write_expert_weights(forms.gate_up, first_expert, experts, 2 * width, h, w13, device.stream());
  measure::write_expert_weights(forms.down, first_expert, experts, h, width, w2, device.stream());
}

LayerExperts::LayerExperts(const ExpertShape& shape, int first_expert, uint64_t seed, int64_t max_rows, int world,
                           RankDevice& device)
    : shape_(shape), device_(device), sms_(device.sms_of_products(world)) {
  if (device.on_host())
    mlp_.emplace(shape, ExpertWeights(seed, shape.hidden, shape.intermediate).source(first_expert), host_options());
  else if (shape.num_local_experts > 0)
    make_products(first_expert, seed, max_rows);
}

size_t LayerExperts::device_bytes(const ExpertShape& shape, int64_t max_rows, Backend backend) {
  if (backend == Backend::cpu) return ExpertMlp::memory_required(shape, host_options()).total();
  return at(shape.num_local_experts * 3 * shape.hidden * shape.intermediate + max_rows * shape.intermediate) *
         dtype_bytes(kLayerType);
}

void LayerExperts::make_products(int first_expert, uint64_t seed, int64_t max_rows) {
  const int64_t experts = shape_.num_local_experts, h = shape_.hidden, width = shape_.intermediate;
  void* const w13 = device_.allocate(at(experts * 2 * width * h) * dtype_bytes(kLayerType));
  void* const w2 = device_.allocate(at(experts * h * width) * dtype_bytes(kLayerType));
  write_weights(shape_, first_expert, seed, w13, w2, device_);
  between_ = {device_.allocate(at(max_rows * width) * dtype_bytes(kLayerType)), max_rows, width, kLayerType};

  GroupedGemmConfig config;
  config.num_experts = shape_.num_local_experts;
  config.type = kLayerType;
  config.n = 2 * width;
  config.k = h;
  config.epilogue = Epilogue::swiglu;
  up_.emplace(config, w13);
  config.n = h;
  config.k = width;
  config.epilogue = Epilogue::none;
  down_.emplace(config, w2);
  device_.wait();
}

void LayerExperts::up(const ConstRows& x, const ExpertRows& rows) {
  if (up_) up_->run(x, rows, {between_.data, x.rows, between_.cols, between_.dtype}, {device_.stream(), sms_});
}

void LayerExperts::down(const ExpertRows& rows, const Rows& y) {
  if (down_) down_->run({between_.data, y.rows, between_.cols, between_.dtype}, rows, y, {device_.stream(), sms_});
}

void LayerExperts::forward(const ConstRows& x, const ExpertRows& rows, const Rows& y) {
  if (mlp_) return mlp_->forward(x, rows, y);
  up(x, rows);
  down(rows, y);
}

}  // namespace switchyard::tool
