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
#include "capi/layer/structs.hpp"
#include "capi/internal_exports.hpp"
#include "layer/known_memory.hpp"
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
    fill(memory, MoeLayer::memory_required(from_c(config), world, to_enum<Backend>("backend", backend)));
  });
}

sy_code sy_moe_layer_heap_bytes(const sy_moe_layer_config* config, int32_t world, sy_backend backend, size_t* bytes) {
  return guarded([&] {
    require(bytes, "bytes");
    *bytes = MoeLayer::heap_bytes(from_c(config), world, to_enum<Backend>("backend", backend));
  });
}

sy_code sy_moe_layer_create(sy_group* group, const sy_moe_layer_config* config, const void* w13, const void* w2, void* stream,
                            sy_moe_layer** layer) {
  if (layer) *layer = nullptr;
  if (!group) return guarded([] { require(nullptr, "group"); });
  std::shared_ptr<Group> share;
  sy_internal_share_group_1(group, &share);
  return collective(*share, [&] {
    require(layer, "layer");
    *layer = std::make_unique<sy_moe_layer>(sy_moe_layer{share, MoeLayer(*share, from_c(config), w13, w2, stream)}).release();
  });
}

sy_code sy_moe_layer_with_weights(const sy_moe_layer* layer, const void* w13, const void* w2, const void* w13_scales,
                                  const void* w2_scales, void* stream, sy_moe_layer** other) {
  return sy_moe_layer_with_scaled_weights(layer, w13, w2, w13_scales, w2_scales, nullptr, stream, other);
}

sy_code sy_moe_layer_with_scaled_weights(const sy_moe_layer* layer, const void* w13, const void* w2, const void* w13_scales,
                                         const void* w2_scales, const float* intermediate_scale, void* stream,
                                         sy_moe_layer** other) {
  if (other) *other = nullptr;
  return guarded([&] {
    require(layer, "layer");
    require(other, "other");
    const MoeWeights weights{w13, w2, w13_scales, w2_scales, stream, intermediate_scale};
    *other = std::make_unique<sy_moe_layer>(sy_moe_layer{layer->group, layer->layer.with_weights(weights)}).release();
  });
}

sy_code sy_moe_layer_destroy(sy_moe_layer* layer) {
  delete layer;
  return SY_OK;
}

sy_code sy_moe_layer_forward(sy_moe_layer* layer, const void* x, const sy_expert_ids* ids, const float* weights, void* out,
                             const sy_moe_layer_call* call) {
  return collective_on(layer, [&] {
    const sy_moe_layer_call& init = kInit<sy_moe_layer_call>;
    const sy_moe_layer_call c = call ? read_struct(call, init, "call") : init;
    MoeLayerCall twin = twin_of(c, "call");
    twin.selector = sy_internal_slot_selector_1(c.selector);
    LayerCalls::forward(layer->layer, x, from_c(ids), weights, out, twin, to_bool_of("call", "known_memory", c.known_memory));
  });
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
