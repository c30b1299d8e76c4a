// SPDX-License-Identifier: Apache-2.0
// C functions of MoeLayer.
#include "switchyard/layer.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "capi/errors.hpp"
#include "capi/share_group.hpp"
#include "capi/sized.hpp"
#include "capi/views.hpp"
#include "switchyard/c/layer.h"

using namespace switchyard;
using namespace switchyard::detail;

// NOLINTBEGIN(readability-identifier-naming): names of the C ABI
struct sy_moe_layer {
  std::shared_ptr<Group> group;
  MoeLayer layer;
  std::string implementation = layer.implementation();
};
// NOLINTEND(readability-identifier-naming)

namespace {

constexpr sy_moe_layer_config kLayerConfig = SY_MOE_LAYER_CONFIG_INIT;
constexpr sy_moe_layer_call kLayerCall = SY_MOE_LAYER_CALL_INIT;
constexpr MoeLayerConfig kDefaults;

// The macros must match the C++ defaults. Members keep their offsets forever: new ones are appended.
static_assert(kLayerConfig.type == static_cast<int>(kDefaults.type) &&
              kLayerConfig.order == static_cast<int>(kDefaults.order) &&
              kLayerConfig.exchange == static_cast<int>(kDefaults.exchange) &&
              kLayerConfig.form == static_cast<int>(kDefaults.form) &&
              kLayerConfig.overflow == static_cast<int>(kDefaults.overflow) &&
              kLayerConfig.invalid_ids == static_cast<int>(kDefaults.invalid_ids) &&
              kLayerConfig.captured == static_cast<int>(kDefaults.captured) &&
              kLayerConfig.storage == static_cast<int>(kDefaults.storage) &&
              kLayerConfig.row_scales == static_cast<int>(kDefaults.row_scales) &&
              kLayerConfig.weight_scales == static_cast<int>(kDefaults.weight_scales));
static_assert(kLayerCall.num_sms == MoeLayerCall{}.num_sms && kLayerCall.add == static_cast<int>(MoeLayerCall{}.add));
static_assert(offsetof(sy_moe_layer_config, num_experts) == 40 && offsetof(sy_moe_layer_config, w13_scales) == 88 &&
              sizeof(sy_moe_layer_config) == 104 && sizeof(sy_moe_layer_memory) == 48 &&
              offsetof(sy_moe_layer_call, num_sms) == 24 && sizeof(sy_moe_layer_call) == 32);
static_assert(SY_MOE_EXCHANGE_AUTOMATIC == static_cast<int>(MoeExchange::automatic) &&
              SY_MOE_EXCHANGE_NORMAL == static_cast<int>(MoeExchange::normal) &&
              SY_MOE_EXCHANGE_LOW_LATENCY == static_cast<int>(MoeExchange::low_latency) &&
              SY_MOE_FORM_AUTOMATIC == static_cast<int>(MoeForm::automatic) &&
              SY_MOE_FORM_SEPARATE == static_cast<int>(MoeForm::separate) &&
              SY_MOE_FORM_FUSED == static_cast<int>(MoeForm::fused));

MoeLayerConfig to_config(const sy_moe_layer_config* config) {
  const sy_moe_layer_config c = read_struct(config, kLayerConfig, "config");
  MoeLayerConfig result;
  result.hidden = c.hidden;
  result.intermediate = c.intermediate;
  result.num_experts = c.num_experts;
  result.topk = c.topk;
  result.max_tokens = c.max_tokens;
  result.type = to_enum<DType>("config->dtype", c.type);
  result.order = to_enum<CombineOrder>("config->order", c.order);
  result.exchange = to_enum<MoeExchange>("config->exchange", c.exchange);
  result.form = to_enum<MoeForm>("config->form", c.form);
  result.capacity = c.capacity;
  result.overflow = to_enum<Overflow>("config->overflow", c.overflow);
  result.captured = to_bool("config->captured", c.captured);
  result.storage = to_enum<WeightStorage>("config->storage", c.storage);
  result.row_scales = to_enum<ScaleKind>("config->row_scales", c.row_scales);
  result.weight_scales = to_enum<ScaleKind>("config->weight_scales", c.weight_scales);
  result.w13_scales = c.w13_scales;
  result.w2_scales = c.w2_scales;
  result.invalid_ids = to_enum<InvalidIds>("config->invalid_ids", c.invalid_ids);
  return result;
}

MoeLayerCall to_layer_call(const sy_moe_layer_call* call) {
  if (!call) return {};
  const sy_moe_layer_call c = read_struct(call, kLayerCall, "call");
  return {c.stream, c.num_sms, c.device_tokens, to_bool("call->add", c.add)};
}

/// Runs a collective call. If `layer` is NULL, the peers cannot be notified.
template <class Body>
sy_code collective_on(sy_moe_layer* layer, Body&& body) noexcept {
  if (!layer) return guarded([] { require(nullptr, "layer"); });
  return collective(*layer->group, std::forward<Body>(body));
}

}  // namespace

extern "C" {

sy_code sy_moe_layer_memory_required(const sy_moe_layer_config* config, int32_t world, sy_backend backend,
                                               sy_moe_layer_memory* memory) {
  return guarded([&] {
    check_struct(memory, sizeof *memory, "memory");
    const MoeLayerMemory m = MoeLayer::memory_required(to_config(config), world, to_enum<Backend>("backend", backend));
    write_struct(memory, sy_moe_layer_memory{sizeof(sy_moe_layer_memory), m.heap_bytes, m.private_bytes, m.weight_bytes,
                                             m.scratch_bytes, m.total()});
  });
}

sy_code sy_moe_layer_heap_bytes(const sy_moe_layer_config* config, int32_t world, sy_backend backend, size_t* bytes) {
  return guarded([&] {
    require(bytes, "bytes");
    *bytes = MoeLayer::heap_bytes(to_config(config), world, to_enum<Backend>("backend", backend));
  });
}

sy_code sy_moe_layer_create(sy_group* group, const sy_moe_layer_config* config, const void* w13, const void* w2,
                                      sy_moe_layer** layer) {
  return sy_moe_layer_create(group, config, w13, w2, nullptr, layer);
}

sy_code sy_moe_layer_create(sy_group* group, const sy_moe_layer_config* config, const void* w13, const void* w2,
                                         void* stream, sy_moe_layer** layer) {
  if (layer) *layer = nullptr;
  if (!group) return guarded([] { require(nullptr, "group"); });
  std::shared_ptr<Group> share;
  sy_internal_share_group_1(group, &share);
  return collective(*share, [&] {
    require(layer, "layer");
    *layer =
        std::make_unique<sy_moe_layer>(sy_moe_layer{share, MoeLayer(*share, to_config(config), w13, w2, stream)}).release();
  });
}

sy_code sy_moe_layer_with_weights(const sy_moe_layer* layer, const void* w13, const void* w2, const void* w13_scales,
                                            const void* w2_scales, sy_moe_layer** other) {
  return sy_moe_layer_with_weights(layer, w13, w2, w13_scales, w2_scales, nullptr, other);
}

sy_code sy_moe_layer_with_weights(const sy_moe_layer* layer, const void* w13, const void* w2,
                                               const void* w13_scales, const void* w2_scales, void* stream,
                                               sy_moe_layer** other) {
  if (other) *other = nullptr;
  return guarded([&] {
    require(layer, "layer");
    require(other, "other");
    const MoeWeights weights{w13, w2, w13_scales, w2_scales, stream};
    *other = std::make_unique<sy_moe_layer>(sy_moe_layer{layer->group, layer->layer.with_weights(weights)}).release();
  });
}

sy_code sy_moe_layer_destroy(sy_moe_layer* layer) {
  delete layer;
  return SY_OK;
}

sy_code sy_moe_layer_forward(sy_moe_layer* layer, const void* x, const sy_expert_ids* ids, const float* weights,
                                       void* out, const sy_moe_layer_call* call) {
  return collective_on(layer, [&] { layer->layer.forward(x, to_ids(ids), weights, out, to_layer_call(call)); });
}

sy_code sy_moe_layer_dropped(const sy_moe_layer* layer, const uint8_t** dropped, int64_t* count) {
  return guarded([&] {
    require(layer, "layer");
    require(dropped, "dropped");
    require(count, "count");
    const std::span<const uint8_t> routes = layer->layer.dropped();
    *dropped = routes.empty() ? nullptr : routes.data();
    *count = static_cast<int64_t>(routes.size());
  });
}

sy_code sy_moe_layer_invalid_ids(const sy_moe_layer* layer, int64_t* count) {
  return guarded([&] {
    require(layer, "layer");
    require(count, "count");
    *count = layer->layer.invalid_ids();
  });
}

sy_code sy_moe_layer_implementation(const sy_moe_layer* layer, const char** text) {
  return guarded([&] {
    require(layer, "layer");
    require(text, "text");
    *text = layer->implementation.c_str();
  });
}

}  // extern "C"
