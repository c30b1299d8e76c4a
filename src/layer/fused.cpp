// SPDX-License-Identifier: Apache-2.0
// A layer in one kernel.
#include "layer/impl.hpp"
#include "switchyard/fused.hpp"

namespace switchyard::detail {
namespace {

class FusedLayer final : public MoeLayer::Impl {
 public:
  FusedLayer(Group& group, const LayerSetup& setup, const void* w13, const void* w2)
      : Impl(setup), layer_(group, setup.fused(), w13, w2) {}

  void forward(const ConstRows& x, const ExpertIds& ids, const float* weights, void* out, const MoeLayerCall& call) override {
    layer_.forward(x.data, ids, weights, out,
                   {.stream = call.stream, .num_sms = call.num_sms, .device_tokens = call.device_tokens, .add = call.add});
  }
  std::span<const uint8_t> dropped() const override { return layer_.dropped(); }
  std::string implementation() const override {
    return std::string("fused, normal, ") + to_string(config.type) + " wgmma:sm_90a";
  }

 private:
  FusedMoe layer_;
};

}  // namespace

std::unique_ptr<MoeLayer::Impl> make_fused_layer(Group& group, const LayerSetup& setup, const void* w13, const void* w2) {
  return std::make_unique<FusedLayer>(group, setup, w13, w2);
}

}  // namespace switchyard::detail
