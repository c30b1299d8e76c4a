// SPDX-License-Identifier: Apache-2.0
#include "layer/exchange.hpp"

#include <algorithm>
#include <optional>

#include "layer/experts.hpp"

namespace switchyard::tool {
namespace {

class NormalCalls final : public LayerExchange {
 public:
  NormalCalls(const NormalConfig& config, ScaleKind quantize, Group& group, CallSms sms, void* stream)
      : exchange_(group, config), quantize_(quantize), sms_(sms), stream_(stream) {}

  void dispatch(const LayerInput& input) override {
    y_ = {};
    delivered_.reset();
    DispatchOptions o;
    o.quantize = quantize_;
    o.stream = stream_;
    o.num_sms = sms_.dispatch;
    ExpertIds ids = input.ids;
    if (input.selector != nullptr) {
      input.selector->select(ids, input.slots, stream_);
      ids.data = input.slots;
    }
    delivered_.emplace(exchange_.dispatch(input.x, ids, input.weights, o));
    y_ = exchange_.allocate_rows(delivered_->handle, kLayerType, stream_);
  }
  ConstRows x() const override { return delivered_->x; }
  ExpertRows rows() const override { return ExpertRows::of(*delivered_); }
  Rows y() const override { return y_.rows(); }
  void combine(CombineOrder order, void* out) override {
    CombineOptions o;
    o.order = order;
    o.stream = stream_;
    o.num_sms = sms_.combine;
    exchange_.combine(y_.rows(), delivered_->handle, out, o);
  }

 private:
  NormalExchange exchange_;
  ScaleKind quantize_;
  CallSms sms_;
  void* stream_;
  std::optional<Dispatched> delivered_;
  RowBuffer y_;
};

class LowLatencyCalls final : public LayerExchange {
 public:
  LowLatencyCalls(const LowLatencyConfig& config, Group& group, CallSms sms, void* stream)
      : exchange_(group, config),
        sms_(sms),
        stream_(stream),
        delivered_(exchange_.make_output()),
        y_(exchange_.make_rows(kLayerType)) {}

  void dispatch(const LayerInput& input) override {
    LowLatencyDispatchOptions o;
    o.topk_weights = input.weights;
    o.stream = stream_;
    o.num_sms = sms_.dispatch;
    o.selector = input.selector;
    exchange_.dispatch(input.x, input.ids, delivered_, o);
  }
  ConstRows x() const override { return delivered_.x; }
  ExpertRows rows() const override { return ExpertRows::of(delivered_); }
  Rows y() const override { return y_; }
  void combine(CombineOrder order, void* out) override {
    LowLatencyCombineOptions o;
    o.order = order;
    o.stream = stream_;
    o.num_sms = sms_.combine;
    exchange_.combine(y_, delivered_, out, o);
  }

 private:
  LowLatencyExchange exchange_;
  CallSms sms_;
  void* stream_;
  LowLatencyOutput delivered_;
  LowLatencyRows y_;
};

}  // namespace

NormalConfig layer_normal_config(const Scenario& s) {
  NormalConfig c;
  c.hidden = s.hidden;
  c.num_experts = s.experts;
  c.topk = s.topk;
  for (int r = 0; r < s.world; ++r) c.max_tokens = std::max(c.max_tokens, s.tokens(r));
  c.layout = Layout::expert_major;
  c.expert_alignment = s.alignment;
  c.dtype = kLayerType;
  return c;
}

LowLatencyConfig layer_low_latency_config(const Scenario& s, ScaleKind quantize) {
  return low_latency_config(s, kLayerType, quantize);
}

size_t exchange_heap_bytes(const LayerExchangeConfig& config, int world, Backend backend) {
  if (const auto* normal = std::get_if<NormalConfig>(&config)) return NormalExchange::heap_bytes(*normal, world, backend);
  return LowLatencyExchange::heap_bytes(std::get<LowLatencyConfig>(config), world);
}

int64_t exchange_max_rows(const LayerExchangeConfig& config, int world) {
  if (const auto* normal = std::get_if<NormalConfig>(&config)) return max_rows(*normal, world);
  const auto& c = std::get<LowLatencyConfig>(config);
  return first_expert(c.num_experts, world, 1) * c.max_tokens * world;
}

std::unique_ptr<LayerExchange> make_layer_exchange(const LayerExchangeConfig& config, ScaleKind quantize, Group& group,
                                                   CallSms sms, void* stream) {
  if (const auto* normal = std::get_if<NormalConfig>(&config))
    return std::make_unique<NormalCalls>(*normal, quantize, group, sms, stream);
  return std::make_unique<LowLatencyCalls>(std::get<LowLatencyConfig>(config), group, sms, stream);
}

}  // namespace switchyard::tool
